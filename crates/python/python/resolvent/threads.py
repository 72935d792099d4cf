"""How many threads calls use."""

from __future__ import annotations

import operator
import os
from typing import Any

from . import _resolvent
from .errors import ConfigurationError

__all__ = ["get_num_threads", "number", "release_memory", "set_num_threads"]

_told: int | None = None


def set_num_threads(threads: int | None) -> None:
    """Sets how many threads calls use that do not say so themselves.

    ``None`` goes back to the default: those of ``torch.get_num_threads()`` for PyTorch tensors, else all that the process
    may use. The number of threads changes no bit of a result.
    """
    global _told
    _told = None if threads is None else number("threads", threads, 1, " or None")


def number(name: str, value: Any, least: int, or_else: str = "") -> int:
    """The value of an argument that is a number.

    Raises:
        ConfigurationError: for what is no whole number, and one that is too small or too large.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or not least <= found < 2**63:
        remedy = f"expected a whole number from {least} to 2^63 - 1{or_else}"
        raise ConfigurationError(f"argument `{name}` is {value!r}; {remedy}", code="argument", field=name, remedy=remedy)
    return found


def get_num_threads() -> int:
    """How many threads calls on arrays use."""
    return _told if _told is not None else _resolvent.available()


def told() -> int | None:
    """What `set_num_threads` has been told."""
    return _told


def release_memory() -> None:
    """Gives back the working memory that is kept between calls."""
    _resolvent.release()


# A forked process has none of the threads of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resolvent.after_fork)
