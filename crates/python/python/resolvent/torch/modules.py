"""Multi-head attention with the signature of ``torch.nn``'s."""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError
from ..fits import HeadMechanisms
from ..mechanism import MechanismLike
from .attention import Attention, HeadAttention, _refused, parts_of
from .guards import refuse_others
from .pairs import Pairs, hides_later, is_row_local, kept, pairs_of

__all__ = ["Attention", "MultiheadAttention"]


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` with another mechanism: its arguments, its weights by its names, its results.

    Two lines differ. Weights of attention are never formed, so that ``need_weights`` is false by default and true is refused.
    ``attn_mask`` is added to the logits, or hides where it is true, for mechanisms that form pairs; the causal mask is for all that have
    a causal form. What hides single tokens is ``key_padding_mask``. In self-attention, where
    ``query`` and ``key`` are one tensor, a padded token is no query either: its output is the bias of the last projection.

    A tied mechanism has no projection of keys: the weights of ``in_proj`` are those of queries and values. `HeadMechanisms` give heads
    mechanisms of their own.
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
        mechanism: MechanismLike | HeadMechanisms = "softmax",
        learned: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise _refused("add_bias_kv or add_zero_attn", "tokens that are not in the input would join every sum")
        if embed_dim < 1:
            remedy = "must be at least 1"
            raise ConfigurationError(f"argument `embed_dim` is {embed_dim}; {remedy}", code="argument", field="embed_dim", remedy=remedy)
        if num_heads < 1 or embed_dim % num_heads:
            remedy = "embed_dim must be a multiple of num_heads"
            message = f"argument `num_heads` is {num_heads} beside embed_dim {embed_dim}; {remedy}"
            raise ConfigurationError(message, code="argument", field="num_heads", remedy=remedy)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"learned": learned, "dropout": dropout, **factory}
        self.attention: Attention | HeadAttention
        if isinstance(mechanism, HeadMechanisms):
            self.attention = HeadAttention(num_heads, self.head_dim, mechanism, **options)
        else:
            self.attention = Attention(num_heads, self.head_dim, mechanism, **options)
        self.tied = self.attention.mechanism.tied
        self._has_tied = any(part.mechanism.tied for _, part in parts_of(self.attention))
        self._one_width = self.kdim == self.vdim == embed_dim
        # Encoder layers of `torch.nn` read this: it keeps them, in evaluation, off their own path of softmax.
        self._qkv_same_embed_dim = False
        if self._has_tied and self.kdim != embed_dim:
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
        cls, module: nn.MultiheadAttention, mechanism: MechanismLike | HeadMechanisms = "softmax", **options: Any
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
        refuse_others({"query": query, "key": key, "value": value})
        if need_weights:
            raise _refused("need_weights", "the weights of attention are never formed; leave it out")
        if self._has_tied and key is not query:
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
        pairs = pairs_of(attn_mask, is_causal, query.shape[0], query.shape[1], key.shape[1])
        self._refuse_leaks(pairs)
        keep = None if padding is None else kept(padding)
        queries_keep = keep if own else None
        if pairs.keys < key.shape[1]:
            key, value = key[:, : pairs.keys], value[:, : pairs.keys]
            keep = None if keep is None else keep[:, : pairs.keys]
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
        out = self.attention(q, k, v, keep, queries_keep, causal=pairs.causal, bias=pairs.bias)
        merged: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _refuse_leaks(self, pairs: Pairs) -> None:
        """Refuses a causal mask that comes as pairs where rows depend on other rows, which these pairs do not hide."""
        if pairs.bias is None:
            return
        others = [str(part.mechanism) for _, part in parts_of(self.attention) if not is_row_local(part.mechanism)]
        if not others:
            return
        what, why = f"a mask of pairs with `{others[0]}`", "its rows depend on other rows, which such a mask does not hide"
        if torch.compiler.is_compiling():
            raise _refused(f"{what} while compiling", f"{why}, if it is causal; pass is_causal=True where it is")
        if hides_later(pairs.bias):
            raise _refused(f"a causal mask of pairs with `{others[0]}`", f"{why}; pass the causal mask, and padding by key_padding_mask")

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)
