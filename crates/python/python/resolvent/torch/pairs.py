"""What masks of ``torch.nn`` say, and which mechanisms can honour those of pairs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..mechanism import Mechanism

__all__ = ["Pairs", "hides_later", "is_row_local", "kept", "pairs_of"]

#: Numbers that hide: minus infinity, and the most negative ones of a type.
_HIDDEN = -1e4


class Pairs(NamedTuple):
    """Which pairs of queries and keys meet."""

    causal: bool
    keys: int
    """How many of the first keys any query sees."""
    bias: Tensor | None = None
    """What is added to logits; of booleans, true = keep."""


def is_row_local(mechanism: Mechanism) -> bool:
    """Whether each row depends on its own query and the keys that this sees alone."""
    # The rows of `uniform` are means, whatever the queries are.
    return mechanism._core.row_local or mechanism.id == "uniform"


def hides_later(pairs: Tensor) -> bool:
    """Whether no query sees a later key, of booleans (true = keep) or numbers; the last query is at the last key."""
    queries, keys = pairs.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=pairs.device).triu(1 + keys - queries)
    hidden = ~pairs if pairs.dtype == torch.bool else pairs <= _HIDDEN
    return bool(later.any()) and bool(hidden[..., later].all())


def kept(padding: Tensor) -> Tensor:
    """Which tokens a padding mask of ``torch.nn`` keeps: true, or minus infinity, leaves one out."""
    if padding.dtype == torch.bool:
        return ~padding
    keep = padding == 0
    whole = (keep | (padding == -math.inf)).all()
    what = "a key_padding_mask of other numbers than 0 and -inf"
    if torch.compiler.is_compiling():
        torch._assert_async(whole, f"{what} is not supported")
    elif not bool(whole):
        raise UnsupportedError(f"{what} is not supported: weights of tokens are no mask", code="unsupported", field=what, remedy="pass booleans")
    return keep


def pairs_of(mask: Tensor | None, is_causal: bool, batch: int, queries: int, keys: int) -> Pairs:
    """What ``attn_mask`` and ``is_causal`` of ``torch.nn`` say. The second is a hint about the first; alone it counts from the first key
    on, as there."""
    if is_causal and queries == keys:
        return Pairs(True, keys)
    if mask is None:
        if not is_causal:
            return Pairs(False, keys)
        if queries < keys:
            return Pairs(True, queries)
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    # What a compiler sees has no numbers yet: pairs are hidden one by one then.
    elif not mask.requires_grad and not torch.compiler.is_compiling():
        found = _recognised(mask, queries, keys)
        if found is not None:
            return found
    added = ~mask if mask.dtype == torch.bool else mask
    # Batch and heads are one axis there.
    whole = mask.dim() == 3 and mask.shape[0] % batch == 0
    return Pairs(False, keys, added.reshape(batch, -1, *mask.shape[1:]) if whole else added)


def _recognised(mask: Tensor, queries: int, keys: int) -> Pairs | None:
    """A mask that hides nothing, or just later keys."""
    hidden = mask if mask.dtype == torch.bool else mask == -math.inf
    if mask.dtype != torch.bool and not bool((hidden | (mask == 0)).all()):
        return None
    if not bool(hidden.any()):
        return Pairs(False, keys)
    if hidden.shape[-2:] == (queries, keys):
        for seen in (keys, queries)[: 2 if queries < keys else 1]:
            if bool((hidden == torch.ones(queries, keys, dtype=torch.bool).triu(1 + seen - queries)).all()):
                return Pairs(True, seen)
    return None
