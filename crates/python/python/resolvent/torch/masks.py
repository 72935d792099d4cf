"""What a mask of ``scaled_dot_product_attention`` says: nothing, causality, padding, or numbers for single pairs."""

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

    causal: bool = False
    keep: Tensor | None = None
    """Keys that are kept, ``[batch, keys]``."""
    bias: Tensor | None = None
    """What is added to logits: four axes, those that it is broadcast over being 1."""


Kind = Literal["causal", "keys", "pairs"]
_Array = npt.NDArray[Any]

#: What masks have been found to be in a forward pass, for its backward pass: their version, and what they say.
_FOUND = WeakIdKeyDictionary()


def remember(mask: Tensor, kind: Kind) -> None:
    """Keeps what `read` has found, while the mask lives."""
    _FOUND[mask] = (_version(mask), kind)


def recall(mask: Tensor) -> Optional[Kind]:
    """What has been found of this mask, if nobody has written to it since."""
    found: tuple[Optional[int], Kind] | None = _FOUND.get(mask)
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
    kind = kind or _kind(array, queries, keys)
    if kind == "causal":
        return kind, Mask(causal=True)
    if kind == "keys":
        keep = _kept(array[:, 0, 0, :])
        if not keep.any(-1).all():
            return "attn_mask that hides all keys"
        return kind, Mask(keep=torch.from_numpy(np.ascontiguousarray(np.broadcast_to(keep, (batch, keys)))))
    if array.dtype == np.bool_:
        array = np.where(array, np.float32(0.0), np.float32(-np.inf))
    return kind, Mask(bias=torch.from_numpy(np.ascontiguousarray(array)))


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


def _kind(array: _Array, queries: int, keys: int) -> Kind:
    if array.shape[1] == array.shape[2] == 1 and bool((_kept(array) | _hidden(array)).all()):
        return "keys"
    return "causal" if _is_causal(array, queries, keys) else "pairs"


def _is_causal(array: _Array, queries: int, keys: int) -> bool:
    """Whether the mask hides later keys, and does nothing else."""
    if queries != keys or array.shape[2:] != (queries, keys):
        return False
    # Corners first: they tell most other masks apart.
    if not bool(_kept(array[..., -1, 0]).all()) or not bool(_hidden(array[..., 0, -1]).all()):
        return False
    earlier = np.tri(queries, dtype=np.bool_)
    return bool((_kept(array) == earlier).all()) and bool((_hidden(array) != earlier).all())
