"""Arrays and tensors of other libraries as the kernels read them, and results of their kind."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from .errors import DTypeError, TensorError, not_dense
from .threads import get_num_threads, told

__all__ = ["Tensors", "cumulative", "dense", "is_torch"]


def is_torch(x: Any) -> bool:
    """Whether it is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _has_tangent(x: Any) -> bool:
    """Whether the tensor carries a derivative in forward mode."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _is_bfloat16(x: Any) -> bool:
    # NumPy knows bfloat16 through packages alone, whose types DLPack does not carry. A type's name takes long to make.
    return isinstance(x, np.ndarray) and x.dtype.kind == "V" and x.dtype.name == "bfloat16"


def _in_rows(x: np.ndarray[Any, Any]) -> bool:
    """Whether the kernels read the array where it lies."""
    if x.flags.c_contiguous and x.flags.aligned:
        return True
    steps = [stride // x.itemsize for stride, size in zip(x.strides, x.shape) if size > 1]
    whole = x.flags.aligned and all(stride >= 0 and stride % x.itemsize == 0 for stride in x.strides)
    return whole and (x.ndim == 0 or x.shape[-1] < 2 or steps[-1] == 1)


def dense(x: Any, name: str, rows: bool = False) -> Any:
    """A tensor with the elements of `x`, contiguous, or, for `rows`, with channels side by side: itself where it is one."""
    if isinstance(x, np.ndarray):
        if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
            remedy = "pass its numbers (.data, .filled()), and masks of tokens as key_mask and query_mask"
            raise DTypeError(f"tensor `{name}` is a masked array, whose mask is not read; {remedy}", code="type", tensor=name, remedy=remedy)
        return x if rows and _in_rows(x) else np.require(x, requirements=["C", "A"])
    if is_torch(x):
        if x.requires_grad or _has_tangent(x):
            raise TensorError(
                f"tensor `{name}` requires gradients, which this function does not record; call resolvent.torch.attend, or "
                "detach it",
                code="tensor",
                tensor=name,
                remedy="call resolvent.torch.attend, or detach it",
            )
        x = x.resolve_neg()  # a view whose numbers have other signs than its memory
        try:
            return x if rows and (x.shape[-1:] == (1,) or x.stride()[-1:] == (1,)) else x.contiguous()
        except RuntimeError as error:
            raise not_dense(name, error) from error
    if not hasattr(x, "__dlpack__"):
        raise DTypeError(
            f"tensor `{name}` is {type(x).__name__}, which is no tensor; pass a NumPy array or anything that speaks DLPack",
            code="type",
            tensor=name,
            remedy="pass a NumPy array or anything that speaks DLPack",
        )
    if tuple(x.__dlpack_device__())[0] != 1:
        return x  # refused with its device named
    return dense(np.from_dlpack(x), name, rows)


class Tensors:
    """q, k and v as they are read, and how results of their kind are made."""

    def __init__(self, source: Any, q: Any, k: Any, v: Any, end_to_end: bool) -> None:
        self.source, self.like_q, self.end_to_end = source, q, end_to_end
        self.is_bits = _is_bfloat16(q)
        self.inputs = (self.seen(q), None if k is None else self.seen(k), self.seen(v))

    @classmethod
    def read(cls, q: Any, k: Any, v: Any, end_to_end: bool = False) -> Tensors:
        named = {name: None if x is None else dense(x, name, rows=True) for name, x in (("q", q), ("k", k), ("v", v))}
        for name, x in named.items():
            if end_to_end and x is not None and x.ndim != 3:
                remedy = "expected [tokens, heads, channels]"
                raise TensorError(f"tensor `{name}` has {x.ndim} axes; {remedy}", code="shape", tensor=name, remedy=remedy)
        return cls(q, named["q"], named["k"], named["v"], end_to_end)

    def order(self, x: Any) -> Any:
        """Heads before tokens, or back."""
        return x.swapaxes(0, 1) if self.end_to_end else x

    def seen(self, x: Any) -> Any:
        """A tensor as the kernels see it."""
        return self.order(x.view(np.uint16) if self.is_bits and _is_bfloat16(x) else x)

    def shape(self, rows: int, channels: int) -> tuple[int, ...]:
        """Of a result."""
        shape = self.like_q.shape
        return (rows, shape[1], channels) if self.end_to_end else (*shape[:-2], rows, channels)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """Room for a result."""
        if is_torch(self.like_q):
            return sys.modules["torch"].empty(shape, dtype=self.like_q.dtype)
        return np.empty(shape, self.like_q.dtype)

    def present(self, x: Any) -> Any:
        """A result as one of the library that `q` came from."""
        if isinstance(self.source, np.ndarray) or not isinstance(x, np.ndarray):
            return x
        if is_torch(self.source):
            return sys.modules["torch"].from_numpy(x)
        namespace = getattr(self.source, "__array_namespace__", None)
        return x if namespace is None else namespace().from_dlpack(x)

    def threads(self) -> int:
        """On how many threads a call computes that says nothing of them."""
        if told() is None and is_torch(self.source):
            threads: int = sys.modules["torch"].get_num_threads()
            return threads
        return get_num_threads()


def cumulative(lengths: Any, name: str) -> list[int]:
    """Cumulative lengths as a list, from an array, a tensor or a sequence of integers."""
    try:
        values = [operator.index(n) for n in (lengths.tolist() if hasattr(lengths, "tolist") else lengths)]
    except TypeError:
        values = [-1]
    if min(values, default=0) < 0:
        remedy = "pass integers on one axis: 0, then ever larger numbers"
        raise TensorError(f"tensor `{name}` has no cumulative lengths; {remedy}", code="type", tensor=name, remedy=remedy)
    return values
