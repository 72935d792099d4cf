"""What can be wrong with a call, as exceptions with the error's parts as attributes."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConfigurationError",
    "DTypeError",
    "DeviceError",
    "Error",
    "NumericalError",
    "OutOfMemoryError",
    "TensorError",
    "UnsupportedError",
]


class Error(Exception):
    """The base of all exceptions of this package.

    Attributes:
        code: which error it is, in a word (``"out-of-range"``, ``"shape"``, ...).
        field: the field of the configuration or the argument, where one is at fault.
        tensor: the tensor, where one is at fault.
        remedy: how to mend the call.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "other",
        field: str | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.tensor = tensor
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        # Without it an exception that crosses processes loses everything but its message.
        return (type(self), self.args, self.__dict__)


class ConfigurationError(Error, ValueError):
    """The mechanism or an argument is not valid: an unknown field, a wrong type, a value out of range."""


class UnsupportedError(Error, ValueError):
    """The mechanism is not defined for what the call asks; nothing is ignored silently."""


class TensorError(Error, ValueError):
    """A tensor is missing, not wanted, of a wrong shape, or in memory that cannot be used."""


class DTypeError(TensorError, TypeError):
    """An argument is no tensor, or one of a type that the call does not take."""


class DeviceError(TensorError):
    """A tensor is not in the CPU's memory."""


class NumericalError(Error, ArithmeticError):
    """The inputs have no right result in float32, or a solver did not reach its tolerance."""


class OutOfMemoryError(Error, MemoryError):
    """The system does not give the memory that a call needs beside its tensors."""


def not_dense(name: str, error: Exception) -> TensorError:
    """What is raised for a tensor whose library cannot lay it out in rows, such as a sparse one."""
    remedy = "pass a dense one"
    return TensorError(f"tensor `{name}` is not dense: {error}; {remedy}", code="layout", tensor=name, remedy=remedy)
