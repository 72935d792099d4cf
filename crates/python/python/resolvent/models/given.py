"""What an attention call of a model is given."""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import Tensor, nn

__all__ = ["Given"]


class Given(NamedTuple):
    """Queries, keys and values, ``[batch, heads, tokens, channels]``, and what says which pairs meet."""

    module: nn.Module
    q: Tensor
    k: Optional[Tensor]
    v: Tensor
    keep: Optional[Tensor] = None
    """Keys that are kept, ``[batch, keys]``."""
    causal: bool = False
    pairs: Optional[Tensor] = None
    """What is added to logits, or hides where it is false."""
    window: Optional[int] = None
    scale: Optional[float] = None
    """Of the products; ``None`` for the inverse root of the channels."""
    options: tuple[str, ...] = ()
    """What else the model asks for: a softcap, a bias of positions, sinks."""
