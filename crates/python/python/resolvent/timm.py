"""Mechanisms as attention layers of timm's vision transformers.

    model = timm.create_model("vit_tiny_patch16_224", attn_layer=resolvent.timm.attention_layer("infsa"))

Without another mechanism nothing of this is needed: timm's layers call ``scaled_dot_product_attention``, which
`resolvent.torch.accelerate` answers.
"""

from __future__ import annotations

import functools
from typing import Any

from timm.layers.attention import Attention as TimmAttention
from torch import Tensor

from .fits import HeadMechanisms
from .mechanism import Mechanism, MechanismLike
from .torch import Attention, HeadAttention

__all__ = ["attention_layer"]


class _Attention(TimmAttention):
    """timm's layer, its weights and arguments, with a mechanism in place of softmax. What the mechanism learns is in ``mechanism``."""

    made_of: Mechanism | HeadMechanisms

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        make: Any = HeadAttention if isinstance(self.made_of, HeadMechanisms) else Attention
        kind = {name: options.get(name) for name in ("device", "dtype")}
        self.mechanism = make(self.num_heads, self.head_dim, self.made_of, dropout=self.attn_drop.p, **kind)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made for the mechanism, and has no name of its own.
        return _empty, (self.made_of,), self.__dict__

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``[batch, tokens, channels]``; a mask is of pairs, as timm's."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        tied = not isinstance(self.mechanism, HeadAttention) and self.mechanism.mechanism.tied
        out = self.mechanism(q, None if tied else k, v, causal=is_causal, bias=None if is_causal else attn_mask)
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        result: Tensor = self.proj_drop(self.proj(out))
        return result


@functools.lru_cache(maxsize=256)
def _layer(made_of: Mechanism | HeadMechanisms) -> type[_Attention]:
    return type("Attention", (_Attention,), {"made_of": made_of, "__module__": __name__})


def _empty(made_of: Mechanism | HeadMechanisms) -> _Attention:
    """A layer without its state, which comes after."""
    layer = _layer(made_of)
    return layer.__new__(layer)


def attention_layer(mechanism: MechanismLike | HeadMechanisms) -> Any:
    """What timm's models take as ``attn_layer``: its own layer with a mechanism, `HeadMechanisms` among them.

    The weights have timm's names, so that checkpoints of its models load with ``strict=False``; the missing keys are what the mechanism
    has brought. Tied mechanisms leave the keys out.
    """
    return _layer(mechanism if isinstance(mechanism, HeadMechanisms) else Mechanism.of(mechanism))
