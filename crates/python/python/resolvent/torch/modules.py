"""Modules: attention with learned parameters, and multi-head attention with the signature of ``torch.nn``'s."""

from __future__ import annotations

import math
from typing import Any, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError, UnsupportedError
from ..mechanism import Mechanism, MechanismLike, Sizes
from .functional import attend

__all__ = ["Attention", "MultiheadAttention"]

#: Learned values without bounds that stand for parameters with bounds: suffix, map and its inverse.
_MAPS: dict[str, tuple[str, float]] = {
    "gamma": ("_logit", 0.0),
    "alpha": ("_logit", 1.0),
    "kappa": ("_log", 0.0),
    "lambda": ("_log", 0.0),
    "scale": ("_log", 0.0),
}
#: Numbers of a bias by distance begin as in "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows".
_TABLE_DEVIATION = 0.02
#: Tokens of the call that shapes of parameters are asked for; what is learned does not depend on them.
_TOKENS = 4096


def _refused(what: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not supported: {why}", code="unsupported", field=what, remedy=why)


class Attention(nn.Module):
    """Attention of queries, keys and values that are given, with what the mechanism learns.

    A parameter that has bounds is learned as a value without any, as in the project's Rust modules: ``gamma`` and ``alpha`` by
    ``gamma_logit`` and ``alpha_logit``, ``kappa``, ``lambda`` and ``scale`` by their logarithms ``kappa_log``, and so on.
    `values` gives the parameters themselves.

    Args:
        heads: Heads of the calls.
        head_dim: Channels of a query and a key.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping.
        value_dim: Channels of a value; ``head_dim`` by default.
        causal: Whether queries see no later key.
        learned: Names of the parameters that are learned; by default all that the mechanism has, but for a decay that is
            configured as 1. Those without configured values are learned in any case.
        dropout: Probability by which each weight is left out in training.
        codebook: Fixed centroids ``[heads, clusters, head_dim]``, a buffer.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        mechanism: MechanismLike = "softmax",
        *,
        value_dim: int | None = None,
        causal: bool = False,
        learned: Iterable[str] | None = None,
        dropout: float = 0.0,
        codebook: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mechanism = Mechanism.of(mechanism)
        self.heads, self.head_dim, self.value_dim = heads, head_dim, head_dim if value_dim is None else value_dim
        self.causal, self.dropout = causal, dropout
        sizes = (1, heads, _TOKENS, _TOKENS, head_dim, self.value_dim)
        document = self.mechanism.to_dict()
        bias = document.get("bias") or {}
        grid = document.get("grid") or ([bias["height"], bias["width"]] if bias.get("kind") == "grid" else None)
        if grid:
            sizes = (1, heads, grid[0] * grid[1], grid[0] * grid[1], head_dim, self.value_dim)
        self.learned = self._names(learned, sizes)
        for name in self.learned:
            start = torch.tensor(self.mechanism._core.parameter_default(name, sizes), dtype=torch.float32)
            start = start.reshape(self.mechanism.parameter_shape(name, sizes))
            if name == "bias" and name in self.mechanism.required_parameters:
                nn.init.normal_(start, std=_TABLE_DEVIATION)
            self.register_parameter(_stored(name), nn.Parameter(_free(name, start).to(device=device, dtype=dtype)))
        self.register_buffer("codebook", codebook)
        self.codebook: Tensor | None

    def _names(self, learned: Iterable[str] | None, sizes: Sizes) -> tuple[str, ...]:
        own, required = self.mechanism.parameters, self.mechanism.required_parameters
        if "given_landmarks" in own:
            raise _refused("landmarks of kind given", "they are other in every call; use `attend`")
        if (self.mechanism.to_dict().get("bias") or {}).get("kind") == "tensor":
            raise _refused("a bias of kind tensor in a module", "it comes with a call; pass `bias`")
        if learned is None:
            default = self.mechanism._core.parameter_default
            return tuple(n for n in own if n in required or n != "gamma" or max(default(n, sizes)) < 1.0)
        listed = set(learned)
        if unknown := sorted(listed - set(own)):
            remedy = f"it has {', '.join(own) or 'none'}"
            raise ConfigurationError(
                f"`{self.mechanism}` has no parameter `{unknown[0]}`; {remedy}",
                code="argument",
                field="learned",
                remedy=remedy,
            )
        return tuple(n for n in own if n in listed or n in required)

    def values(self) -> dict[str, Tensor]:
        """The learned parameters, within their bounds."""
        return {name: _bounded(name, getattr(self, _stored(name)).float()) for name in self.learned}

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See `attend`; ``causal`` adds to the module's."""
        return attend(
            q,
            k,
            v,
            self.mechanism,
            causal=self.causal or causal,
            key_mask=key_mask,
            query_mask=query_mask,
            bias=bias,
            parameters=self.values(),
            codebook=self.codebook,
            dropout=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        causal = ", causal" if self.causal else ""
        learned = f", learned={list(self.learned)}" if self.learned else ""
        return f"{self.heads}, {self.head_dim}, {self.mechanism}{causal}{learned}"


def _stored(name: str) -> str:
    return name + _MAPS[name][0] if name in _MAPS else name


def _bounded(name: str, free: Tensor) -> Tensor:
    kind, low = _MAPS.get(name, ("", 0.0))
    if kind == "_logit":
        return torch.sigmoid(free) + low
    return free.exp() if kind == "_log" else free


def _free(name: str, value: Tensor) -> Tensor:
    """The value without bounds that stands for a parameter."""
    kind, low = _MAPS.get(name, ("", 0.0))
    inside = (value > low) & (value < low + 1.0) if kind == "_logit" else value > 0.0
    if kind and not bool(inside.all()):
        expected = f"inside ({low:g}, {low + 1:g})" if kind == "_logit" else "above 0"
        remedy = f"must be {expected} where it is learned; configure another value or leave it out of `learned`"
        raise ConfigurationError(
            f"configuration field `{name}` is {value.flatten()[0].item():g}; {remedy}",
            code="out-of-range",
            field=name,
            remedy=remedy,
        )
    if kind == "_logit":
        return torch.logit(value.double() - low).float()
    return value.log() if kind == "_log" else value


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` with another mechanism: its arguments, its weights by its names, its results.

    Two lines differ. Weights of attention are never formed, so that ``need_weights`` is false by default and true is refused.
    ``attn_mask`` is added to the logits, or hides where it is true, for mechanisms that form pairs; the causal mask is for all that have
    a causal form. What hides single tokens is ``key_padding_mask``. In self-attention, where
    ``query`` and ``key`` are one tensor, a padded token is no query either: its output is the bias of the last projection.

    A tied mechanism has no projection of keys: the weights of ``in_proj`` are those of queries and values.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: MechanismLike = "softmax",
        learned: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise _refused("add_bias_kv or add_zero_attn", "tokens that are not in the input would join every sum")
        if num_heads < 1 or embed_dim % num_heads:
            remedy = "embed_dim must be a multiple of num_heads"
            message = f"argument `num_heads` is {num_heads} beside embed_dim {embed_dim}; {remedy}"
            raise ConfigurationError(message, code="argument", field="num_heads", remedy=remedy)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"learned": learned, "dropout": dropout, **factory}
        self.attention = Attention(num_heads, self.head_dim, mechanism, **options)
        self.tied = self.attention.mechanism.tied
        self._one_width = self.kdim == self.vdim == embed_dim
        # Encoder layers of `torch.nn` read this: it keeps them, in evaluation, off their own path of softmax.
        self._qkv_same_embed_dim = False
        if self.tied and self.kdim != embed_dim:
            raise _refused("kdim of a tied mechanism", "the keys are the queries; leave it out")
        parts = 2 if self.tied else 3
        if self._one_width:
            self.in_proj_weight = nn.Parameter(torch.empty((parts * embed_dim, embed_dim), **factory))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty((embed_dim, embed_dim), **factory))
            if not self.tied:
                self.k_proj_weight = nn.Parameter(torch.empty((embed_dim, self.kdim), **factory))
            self.v_proj_weight = nn.Parameter(torch.empty((embed_dim, self.vdim), **factory))
        in_bias = nn.Parameter(torch.zeros(parts * embed_dim, **factory)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.in_proj_bias: Tensor | None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        for weight in self._weights():
            nn.init.xavier_uniform_(weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, mechanism: MechanismLike = "softmax", **options: Any
    ) -> MultiheadAttention:
        """The same weights, copied, under another mechanism. What a tied mechanism has no use for, the keys', is left out."""
        if module.bias_k is not None or module.add_zero_attn:
            raise _refused("add_bias_kv or add_zero_attn", "tokens that are not in the input would join every sum")
        weight = module.out_proj.weight
        new = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=weight.device,
            dtype=weight.dtype,
            mechanism=mechanism,
            **options,
        )
        state = module.state_dict()
        if new.tied:
            state.pop("k_proj_weight", None)
            for name in ("in_proj_weight", "in_proj_bias"):
                if name in state:
                    q, _, v = state[name].chunk(3)
                    state[name] = torch.cat([q, v])
        own = {name: value for name, value in new.state_dict().items() if name.startswith("attention.")}
        new.load_state_dict({**own, **state})
        return new.train(module.training)

    def _weights(self) -> list[Tensor]:
        if self._one_width:
            return [self.in_proj_weight]
        return [self.q_proj_weight, *([] if self.tied else [self.k_proj_weight]), self.v_proj_weight]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As ``torch.nn.MultiheadAttention.forward``; see the class for what differs."""
        if need_weights:
            raise _refused("need_weights", "the weights of attention are never formed; leave it out")
        if self.tied and key is not query:
            raise _refused("cross-attention of a tied mechanism", "the keys are the queries; pass `query` as `key`")
        own = query is key
        if query.dim() == 2:
            padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            return self._attend(query, key, value, padding, attn_mask, is_causal, own).squeeze(0), None
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        out = self._attend(query, key, value, key_padding_mask, attn_mask, is_causal, own)
        return out if self.batch_first else out.transpose(0, 1), None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        own: bool,
    ) -> Tensor:
        bias = None
        if attn_mask is not None and not is_causal:
            is_causal, bias = _pairs(attn_mask, query.shape[0], query.shape[1], key.shape[1])
        keep = None if padding is None else _kept(padding)
        inputs = [query, value] if self.tied else [query, key, value]
        if self._one_width:
            weights = self.in_proj_weight.chunk(len(inputs))
        else:
            weights = tuple(self._weights())
        biases: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(len(inputs))
        heads = [self._split(functional.linear(x, w, b)) for x, w, b in zip(inputs, weights, biases)]
        q, v, k = heads[0], heads[-1], None if self.tied else heads[1]
        out = self.attention(q, k, v, keep, keep if own else None, causal=is_causal, bias=bias)
        merged: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)


def _kept(padding: Tensor) -> Tensor:
    """Which tokens a padding mask of ``torch.nn`` keeps: true, or minus infinity, leaves one out."""
    if padding.dtype == torch.bool:
        return ~padding
    keep = padding == 0
    if not bool((keep | (padding == -math.inf)).all()):
        raise _refused("a key_padding_mask of other numbers than 0 and -inf", "weights of tokens are no mask")
    return keep


def _pairs(mask: Tensor, batch: int, queries: int, keys: int) -> tuple[bool, Tensor | None]:
    """What a mask of ``torch.nn`` says: whether it is the causal one, or what is added to logits."""
    if not mask.requires_grad:
        hidden = mask if mask.dtype == torch.bool else mask == -math.inf
        if mask.dtype == torch.bool or bool((hidden | (mask == 0)).all()):
            if not bool(hidden.any()):
                return False, None
            later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
            if hidden.shape[-2:] == later.shape and bool((hidden == later).all()):
                return True, None
    added = ~mask if mask.dtype == torch.bool else mask
    # Batch and heads are one axis there.
    return False, added.reshape(batch, -1, *mask.shape[1:]) if mask.dim() == 3 and mask.shape[0] % batch == 0 else added
