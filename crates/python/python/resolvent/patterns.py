"""Which pairs of tokens a model of transformers lets meet: what its masks say, and which mechanisms can honour it."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .crossing import crosses, writes
from .errors import UnsupportedError
from .mechanism import Mechanism
from .torch.pairs import hides_later

__all__ = ["Pattern", "added", "is_ordered", "pattern_of", "refuse_other_rows", "refused", "token_mask"]


class Pattern(NamedTuple):
    """Which pairs a model lets meet, beside its padding."""

    causal: bool
    window: int | None
    padded: bool
    one_token_set: bool
    """Whether the queries are the keys' tokens."""
    pairs: Tensor | None = None
    """Which pairs may meet, or what is added to their logits, ``[batch, 1, queries, keys]``, where that is neither causality nor a
    window."""
    keys: int | None = None
    """How many slots of a cache that has room for later tokens are taken."""


def refused(what: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not supported: {why}", code="unsupported", field=what, remedy=why)


def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The keys that are kept, ``[batch, keys]``, and as its attribute the `Pattern`."""
    if isinstance(getattr(attention_mask, "_resolvent", None), Pattern):
        # Generation makes the mask of a static cache before the model asks for it.
        assert attention_mask is not None
        return attention_mask
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    causal, window, pairs, taken = mask_function is causal_mask_function, None, None, None
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        arguments = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, "device": device}
        allowed = sdpa_mask(batch_size, q_length, kv_length, allow_is_causal_skip=False, **arguments)
        assert allowed is not None  # as nothing may be skipped
        found = _recognised(allowed, q_offset - kv_offset, local_size)
        pairs = allowed if found is None else None
        causal, window = (False, None) if found is None else found
    if causal and q_offset + q_length < kv_offset + kv_length:
        # A static cache: no query sees the slots behind the last one, which are left out.
        kv_length = taken = q_offset + q_length - kv_offset
    keep = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    padded = attention_mask is not None
    if attention_mask is not None:
        # Slots of a cache that is longer than what has been seen hold nothing.
        seen = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        keep[:, seen.shape[1] :] = False
        keep[:, : seen.shape[1]] = seen
    if (causal or window is not None) and q_offset + q_length != kv_offset + kv_length:
        raise refused("a cache whose last key is not the last query", "use a dynamic cache, or pass use_cache=False")
    same = q_length == kv_length and q_offset == kv_offset
    keep._resolvent = Pattern(causal, window, padded, same, pairs, taken)  # type: ignore[attr-defined]
    return keep


def _recognised(allowed: Tensor, offset: int, local_size: int | None) -> tuple[bool, int | None] | None:
    """Causality and window of a mask ``[batch, 1, queries, keys]``, if these are all that it hides."""
    queries, keys = allowed.shape[-2:]
    apart = torch.arange(keys)[None, :] - (torch.arange(queries) + offset)[:, None]
    for window in (None, local_size, None if local_size is None else local_size + 1):
        near = torch.ones_like(apart, dtype=torch.bool) if window is None else apart.abs() < window
        for causal in (False, True):
            if bool((allowed == (near & (apart <= 0) if causal else near)).all()):
                return causal, window
    return None


def added(pairs: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """What is added to logits: of booleans, true keeps a pair."""
    if pairs is None or positions is None:
        return pairs if positions is None else positions
    return positions.masked_fill(~pairs, -math.inf) if pairs.dtype == torch.bool else positions + pairs


def pattern_of(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> tuple[Pattern, Tensor | None]:
    """What the model's mask says, and the keys that it keeps."""
    pattern = getattr(mask, "_resolvent", None)
    if isinstance(pattern, Pattern):
        return pattern, mask if pattern.padded else None
    square = query.shape[2] == key.shape[2]
    if mask is not None and mask.dim() == 4:
        return Pattern(False, None, False, square, mask[..., : key.shape[2]]), None
    if mask is not None and mask.dim() != 2:
        raise refused(f"a mask of {mask.dim()} axes", "masks are of tokens or of pairs, with two axes or four")
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    keep = None if mask is None else mask[:, -key.shape[2] :].to(torch.bool)
    return Pattern(bool(causal), sliding_window, mask is not None, square), keep


def is_ordered(module: torch.nn.Module, pattern: Pattern) -> bool:
    """Whether queries see no later key, for all that the layer and its mask say."""
    return pattern.causal or (bool(getattr(module, "is_causal", False)) and not crosses(module))


def refuse_other_rows(mechanism: Mechanism, module: torch.nn.Module, pattern: Pattern, queries: int, keys: int) -> None:
    """Refuses a mechanism whose rows depend on other rows where these are not at hand, or must not be seen."""
    why = "its rows depend on the queries of other tokens"
    others = "take a mechanism without such sums, as `softmax`, `fna` and `routed` are"
    ordered = is_ordered(module, pattern)
    if ordered and queries < keys:
        raise refused(f"a cache with `{mechanism}`", f"{why}, which a cache does not keep; pass use_cache=False, or {others}")
    if pattern.pairs is not None and (ordered or hides_later(pattern.pairs)):
        apart = "which a mask of pairs (packed texts, four axes) does not keep apart"
        raise refused(f"a causal mask of pairs with `{mechanism}`", f"{why}, {apart}; pass one text per row and a mask of tokens, or {others}")
    if writes(module) and (crosses(module) or queries != keys):
        raise refused(f"cross-attention with `{mechanism}`", f"{why}, which a decoder has not written yet; {others}")
