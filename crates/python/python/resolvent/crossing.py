"""Which layers of transformers' models attend to other tokens than their own."""

from __future__ import annotations

from torch import nn

__all__ = ["crosses", "writes"]


def crosses(module: nn.Module) -> bool:
    """Whether the layer is one of cross-attention, by what it says of itself: a layer of a decoder that is not causal is one."""
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    return bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)


def writes(module: nn.Module) -> bool:
    """Whether the layer is of a model of texts, whose decoders write tokens one after the other."""
    return hasattr(getattr(module, "config", None), "vocab_size")
