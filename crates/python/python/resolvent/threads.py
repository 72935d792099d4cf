"""How many threads calls use."""

from __future__ import annotations

import os

from . import _resolvent
from .errors import ConfigurationError

__all__ = ["get_num_threads", "release_memory", "set_num_threads"]

_told: int | None = None


def set_num_threads(threads: int | None) -> None:
    """Sets how many threads calls use that do not say so themselves.

    ``None`` goes back to the default: those of ``torch.get_num_threads()`` for PyTorch tensors, else all that the process
    may use. The number of threads changes no bit of a result.
    """
    global _told
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ConfigurationError(
            f"argument `threads` is {threads!r}; expected a number from 1, or None",
            code="argument",
            field="threads",
            remedy="expected a number from 1, or None",
        )
    _told = threads


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
