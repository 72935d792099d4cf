"""What an attention call of a model is given."""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import Tensor, nn

from ..torch.heads import of_heads

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

    def of_heads(self, heads: tuple[int, ...]) -> Given:
        """What these heads are given."""
        total = self.q.shape[1]
        q, k, v = (None if x is None else of_heads(x, heads, total) for x in (self.q, self.k, self.v))
        assert q is not None and v is not None  # only k may be missing
        pairs = self.pairs if self.pairs is None or self.pairs.dim() < 3 else of_heads(self.pairs, heads, total)
        return self._replace(q=q, k=k, v=v, pairs=pairs)
