"""Mechanisms as attention implementations of Hugging Face transformers.

    resolvent.transformers.register()
    model.set_attn_implementation("resolvent:fna")

Queries, keys and values are the model's own; what a mechanism could learn keeps its configured value.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .crossing import crosses
from .decoding import beside, decodes
from .errors import ConfigurationError
from .fits import HeadMechanisms
from .mechanism import Mechanism, MechanismLike, mechanisms
from .patterns import added, is_ordered, pattern_of, refuse_other_rows, refused, token_mask
from .torch import Attention, HeadAttention, attend
from .torch.heads import by_group, of_heads
from .torch.pairs import is_row_local
from .values import DotExp

__all__ = ["register"]

#: Presets whose field `scale` multiplies the product of query and key.
_SCALED = ("softmax", "infsa", "infsa-resolvent", "linear-infsa", "ssa")


def register(mechanism: MechanismLike | HeadMechanisms | None = None, name: str | None = None) -> list[str]:
    """Registers a mechanism as ``resolvent:<name>``, or every preset by its id; returns the names for ``set_attn_implementation``.
    `HeadMechanisms` and mechanisms other than a preset as it is need a name. Presets are registered when this module is imported; those
    with names are registered by every process that uses them.

    The mask comes with it: the padding mask, causality and sliding windows of a model reach the mechanism; any other mask, and biases of
    positions, reach those that form pairs. What a mechanism has no place for is refused.
    """
    if mechanism is None:
        if name is not None:
            raise ConfigurationError(
                "argument `mechanism` is missing; a name alone says nothing",
                code="argument",
                field="mechanism",
                remedy="pass the mechanism that the name is for",
            )
        return [full for preset in mechanisms() for full in register(preset, preset)]
    if isinstance(mechanism, HeadMechanisms):
        if name is None:
            raise _nameless("say what to call heads with mechanisms of their own")
        full, attention = f"resolvent:{name}", functools.partial(_attention_by_group, mechanism)
    else:
        found = Mechanism.of(mechanism)
        if name is None and (found.id not in mechanisms() or found != Mechanism(found.id)):
            raise _nameless("say what to call it; names of presets are those of the presets as they are")
        full, attention = f"resolvent:{name or found.id}", functools.partial(_attention, found)
    AttentionInterface.register(full, attention)
    AttentionMaskInterface.register(full, token_mask)
    return [full]


def _nameless(remedy: str) -> ConfigurationError:
    return ConfigurationError(f"argument `name` is missing; {remedy}", code="argument", field="name", remedy=remedy)


class _Group(NamedTuple):
    """Heads with a mechanism of their own: its number, and which of all heads they are. All of them, by default."""

    number: int = 0
    heads: tuple[int, ...] = ()
    all: int = 0

    def of(self, x: Tensor) -> Tensor:
        return of_heads(x, self.heads, self.all) if self.all else x


@functools.lru_cache(maxsize=256)
def _adapted(mechanism: Mechanism, scale: float | None, softcap: float | None, window: int | None, sink: bool = False) -> Mechanism:
    """The mechanism with what a model asks of it. `sink`: whether the first key stands for none, and is seen from everywhere."""
    document = mechanism.to_dict()
    score = document.get("score", {})
    if sink and not _has_logits(mechanism, document):
        raise refused("`s_aux`, a learned sink", f"`{mechanism}` has no logits of products that one could stand beside; take `softmax`")
    if scale is not None:
        if mechanism.id in _SCALED and document.get("score") is None:
            document["scale"] = scale if document["scale"] is None else document["scale"]
        elif score.get("kind", "").startswith("dot-"):
            score["scale"] = scale if score["scale"] is None else score["scale"]
        else:
            raise refused("a scale of the products", f"`{mechanism}` does not multiply queries and keys; take a score of products, as `softmax` has")
    if softcap is not None:
        if mechanism.id != "softmax" and score.get("kind") != "dot-exp":
            raise refused("a softcap", f"`{mechanism}` has no logits to bound; take `softmax` or the score dot-exp")
        own = score.get("scale") if score else document.pop("scale")
        document["score"] = DotExp(scale=own, softcap=softcap).to_dict()
    adapted = Mechanism.from_dict(document)
    return adapted if window is None else adapted.with_window(window, int(sink))


def _has_logits(mechanism: Mechanism, document: dict[str, Any]) -> bool:
    """Whether rows are softmaxes of products, all of them formed."""
    if mechanism.id == "softmax":
        return True
    kinds = {name: (document.get(name) or {}).get("kind") for name in ("score", "structure", "normalisation", "series")}
    wanted = {"score": ("dot-exp", "cosine-exp"), "structure": ("dense",), "normalisation": ("row",), "series": ("one-hop",)}
    return all(kinds[name] in (None, *found) for name, found in wanted.items()) and kinds["score"] is not None


def _with_sink(
    sinks: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A key before all others whose logit is the head's own number, and whose value is nothing. Its product with any query is 0."""
    key, value = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (key, value))
    keep = None if keep is None else torch.nn.functional.pad(keep, (1, 0), value=True)
    column = sinks.float().reshape(1, -1, 1, 1)
    if bias is None:
        rest = column.new_zeros((1, 1, 1, key.shape[2] - 1))
    else:
        rest = torch.zeros(bias.shape).masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else bias.float()
    axes = [max(a, b) for a, b in zip(rest.shape[:3], column.shape[:3])]
    return key, value, keep, torch.cat((column.expand(*axes, 1), rest.expand(*axes, -1)), -1)


def _refuse_options(options: dict[str, Any]) -> None:
    """Refuses what a model asks of its attention and no mechanism has."""
    for name in ("head_mask", "cache", "block_mask", "block_indices"):
        if options.get(name) is not None:
            raise refused(f"`{name}` of this model", "the mechanisms have no place for it; use another implementation")
    if options.get("output_attentions"):
        raise refused("output_attentions", "the weights of attention are never formed; leave it out")


def _attention(
    mechanism: Mechanism,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    learned: Attention | None = None,
    group: _Group = _Group(),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What models call: ``[batch, heads, tokens, channels]`` in, ``[batch, tokens, heads, channels]`` out. `learned` holds the
    mechanism's parameters where the layer has its own; `group` says which heads are meant, of all of whose keys and values these are."""
    _refuse_options(kwargs)
    pattern, keep = pattern_of(module, query, key, attention_mask, is_causal, sliding_window)
    cached = key
    if pattern.keys is not None:
        key, value = key[..., : pattern.keys, :], value[..., : pattern.keys, :]
    crossed = crosses(module)
    if mechanism.tied and learned is None:
        why = "models have keys of their own; resolvent.convert leaves them out"
        raise refused(f"the tied mechanism `{mechanism}`", why)
    if mechanism.tied and (crossed or query.shape[2] != key.shape[2]):
        why = "its keys are its queries, which must be the same tokens; leave cross-attention and caches out"
        raise refused(f"the tied mechanism `{mechanism}` on other keys", why)
    default = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5, rel_tol=1e-6)
    # Under a decoder's single new token a window is what the cache has kept.
    wide = pattern.window is None or pattern.window >= key.shape[2]
    sinks = kwargs["s_aux"] if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    asked = (None if default else scaling, softcap, None if wide else pattern.window)
    # Compilers trace this, and cannot follow what reads a configuration.
    adapted = mechanism if asked == (None, None, None) and sinks is None else _adapted(mechanism, *asked, sinks is not None)
    # A single new token sees all there is. Which keys it sees by their clusters, causality says, and whether a text can be gone on with.
    local = is_row_local(adapted)
    if not local:
        refuse_other_rows(adapted, module, pattern, query.shape[2], key.shape[2])
    chooses = adapted.clustered and local
    causal = pattern.causal if query.shape[2] > 1 or chooses else not local and is_ordered(module, pattern)
    bias = added(pattern.pairs, kwargs.get("position_bias"))
    parameters = None if learned is None else learned.values()
    plain = bias is None and dropout == 0.0 and (learned is None or learned.codebook is None)
    if pattern.causal and chooses and plain and decodes(adapted):
        tensors = (query, key, value, *(parameters or {}).values())
        kept = beside(module, cached, key.shape[2], query.shape[2], tensors)
        if kept is not None:
            return kept.rows(group.number, adapted, query, key, value, keep, parameters, group.of).transpose(1, 2).contiguous(), None
    key, value = key if mechanism.tied else group.of(key), group.of(value)
    if sinks is not None:
        key, value, keep, bias = _with_sink(sinks, key, value, keep, bias)
    out = attend(
        query,
        None if mechanism.tied else key,
        value,
        adapted,
        causal=causal,
        key_mask=keep,
        # Sums over all rows must not see padding either.
        query_mask=keep if pattern.one_token_set and not crossed and not adapted._core.row_local else None,
        bias=bias,
        parameters=parameters,
        codebook=None if learned is None else learned.codebook,
        dropout=dropout,
        enable_gqa=True,
    )
    return out.transpose(1, 2).contiguous(), None


def _attention_by_group(
    mechanisms: HeadMechanisms,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    learned: HeadAttention | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`_attention` for heads with mechanisms of their own."""

    def call(n: int, q: Tensor, k: Tensor | None, v: Tensor, positions: Tensor | None) -> Tensor:
        heads, own = mechanisms.groups[n].heads, None if learned is None else learned.groups[n]
        # A tied group leaves the keys out, but for their number.
        keys = key if k is None else k
        mask = attention_mask
        if mask is not None and mask.dim() == 4:
            mask = of_heads(mask, heads, mechanisms.heads)
        aux = None if s_aux is None else of_heads(s_aux, heads, mechanisms.heads, axis=-1)
        options: dict[str, Any] = {**kwargs, "learned": own, "position_bias": positions, "s_aux": aux, "group": _Group(n, heads, mechanisms.heads)}
        return _attention(mechanisms.groups[n].mechanism, module, q, keys, v, mask, **options)[0]

    return by_group(mechanisms, query, key, value, position_bias, call, shared=True, whole=True, axis=-2), None


register()
