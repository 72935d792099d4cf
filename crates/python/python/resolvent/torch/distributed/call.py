"""One call of a shard: its tensors, its masks and what its mechanism is made of."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...mechanism import Mechanism

__all__ = ["Call", "divided", "refused", "with_ones"]


def refused(what: str, why: str) -> UnsupportedError:
    """What cannot be computed in shards."""
    return UnsupportedError(f"{what} is not supported in shards: {why}", code="unsupported", field="mechanism", remedy=why)


def divided(x: Tensor, by: Tensor) -> Tensor:
    """The quotient, 0 where the divisor is."""
    empty = by == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, by))


def with_ones(v: Tensor) -> Tensor:
    """Values with a channel of ones, whose weighted sum is that of the weights."""
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


class Call:
    """Queries, keys and values ``[batch, heads, tokens, channels]`` of a shard, and what goes with them. The keys of a tied mechanism are
    its queries."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        mechanism: Mechanism,
        causal: bool,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        parameters: Mapping[str, Tensor],
    ) -> None:
        # Whatever a masked token holds, NaN included, enters no sum.
        self.q, self.keys, self.v = _cleared(q, query_mask), _cleared(q if k is None else k, key_mask), _cleared(v, key_mask)
        self.mechanism, self.causal = mechanism, causal
        # A process's columns of a mask lie apart.
        self.key_mask, self.query_mask = (None if mask is None else mask.contiguous() for mask in (key_mask, query_mask))
        self.parameters = dict(parameters)
        self.document: dict[str, Any] = mechanism.to_dict()
        self.score: dict[str, Any] = self.document.get("score") or {}

    def keys_kept(self, like: Tensor) -> Tensor:
        """1 for the keys that are kept, ``[batch, 1, keys]``, else 0."""
        return _kept(self.key_mask, self.v, like)

    def rows(self, like: Tensor) -> Tensor:
        """The same of the queries."""
        return _kept(self.query_mask, self.q, like)

    def queries_kept(self, out: Tensor) -> Tensor:
        """Rows of masked queries set to 0."""
        return _cleared(out, self.query_mask)

    def parameter(self, name: str, configured: float) -> Tensor:
        """A number per head, as it is broadcast over batch, tokens and channels."""
        given = self.parameters.get(name)
        return torch.tensor(float(configured)) if given is None else given.float().reshape(-1, 1, 1)

    def gamma(self) -> Tensor:
        """The decay."""
        return self.parameter("gamma", self.document["gamma"])

    def rest(self) -> dict[str, Any]:
        """The arguments of a local call beside the tokens and causality."""
        return {"key_mask": self.key_mask, "query_mask": self.query_mask, "parameters": self.parameters}


def _kept(mask: Tensor | None, tokens: Tensor, like: Tensor) -> Tensor:
    if mask is None:
        return torch.ones((1, 1, tokens.shape[-2]), dtype=like.dtype)
    return mask.bool()[:, None, :].to(like.dtype)


def _cleared(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask.bool()[:, None, :, None], x, 0.0)
