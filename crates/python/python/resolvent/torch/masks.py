"""What a mask of ``scaled_dot_product_attention`` says, where it is causality, padding, or both."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Mask", "read", "recall", "remember"]

#: Additive masks hide by minus infinity or by the most negative number of a type.
_HIDDEN = -1e9


class Mask(NamedTuple):
    """A mask as the kernels take it."""

    causal: bool
    keep: Tensor | None
    """Keys that are kept, ``[batch, keys]``."""


Kind = Literal["causal", "keys", "causal keys"]
_Array = npt.NDArray[Any]

#: What masks have been found to be in a forward pass, for its backward pass: their version, and what they say.
_FOUND = WeakIdKeyDictionary()


def remember(mask: Tensor, kind: Kind) -> None:
    """Keeps what `read` has found, while the mask lives."""
    _FOUND[mask] = (_version(mask), kind)


def recall(mask: Tensor) -> Optional[Kind]:
    """What has been found of this mask, if nobody has written to it since."""
    found: tuple[Optional[int], Kind] | None = _FOUND.get(mask)  # type: ignore[no-untyped-call]
    return found[1] if found is not None and found[0] is not None and found[0] == _version(mask) else None


def _version(mask: Tensor) -> Optional[int]:
    return None if mask.is_inference() else mask._version


def read(mask: Tensor, batch: int, queries: int, keys: int, kind: Optional[Kind] = None) -> Union[tuple[Kind, Mask], str]:
    """What a mask of numbers or booleans is, or why PyTorch's kernel must read it. `kind` spares the search where it is known."""
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.dim() != 4 or mask.dtype not in (torch.bool, torch.float32):
        return "attn_mask of another rank or type"
    # NumPy looks at it on this thread alone: PyTorch's own threads would still spin when the kernels' begin.
    array = _narrowed(mask.detach().numpy())
    found = kind or _kind(array, queries, keys)
    if found is None:
        return _why_not(array)
    if found == "causal":
        return found, Mask(causal=True, keep=None)
    # The last query of a causal mask sees all keys that any query sees.
    keep = _kept(array[:, 0, -1, :])
    if not keep.any(-1).all():
        return "attn_mask that hides all keys"
    keep = np.array(np.broadcast_to(keep, (batch, keys)), order="C")
    return found, Mask(causal=found == "causal keys", keep=torch.from_numpy(keep))


def _why_not(array: _Array) -> str:
    for axis, what in ((1, "heads"), (2, "queries")):
        if array.shape[axis] > 1:
            return f"attn_mask that differs between {what}"
    return "attn_mask that weighs keys"


def _kept(array: _Array) -> _Array:
    return array if array.dtype == np.bool_ else array == 0


def _hidden(array: _Array) -> _Array:
    return ~array if array.dtype == np.bool_ else array <= _HIDDEN


def _narrowed(array: _Array) -> _Array:
    """The mask without what it repeats: along axes without a stride, and heads or rows that are all the same."""
    for axis, stride in enumerate(array.strides):
        if array.shape[axis] > 1 and (stride == 0 or axis in (1, 2) and _is_repeated(array, axis)):
            array = array[(slice(None),) * axis + (slice(1),)]
    return array


def _is_repeated(array: _Array, axis: int) -> bool:
    first, last = (np.moveaxis(array, axis, 0)[n] for n in (0, -1))
    # The last differs from the first in most masks: they are told apart at the cost of one row.
    return bool((first == last).all()) and bool((array == np.expand_dims(first, axis)).all())


def _kind(array: _Array, queries: int, keys: int) -> Optional[Kind]:
    if array.shape[1] != 1:
        return None
    if array.shape[2] == 1:
        return "keys" if bool((_kept(array) | _hidden(array)).all()) else None
    return _causal(array[:, 0], queries) if queries == keys and array.shape[2:] == (queries, keys) else None


def _causal(array: _Array, tokens: int) -> Optional[Kind]:
    """Whether the mask ``[batch, tokens, tokens]`` hides later keys, and at most whole keys beside them."""
    keep = _kept(array[:, -1])
    # A corner first: it tells most other masks apart.
    if not bool(_hidden(array[:, 0, -1]).all()):
        return None
    seen = np.tri(tokens, dtype=np.bool_) & keep[:, None, :]
    if not bool((_kept(array) == seen).all()) or not bool((_hidden(array) != seen).all()):
        return None
    if bool(keep.all()):
        return "causal"
    blind = ~seen.any(-1)
    # Where finite numbers hide all keys of a query, PyTorch weighs them all alike.
    finite = array.dtype != np.bool_ and bool((array[blind] > -np.inf).any())
    return None if finite else "causal keys"
