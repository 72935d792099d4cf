"""Clusters of all queries: every process finds those of the whole sequence, and computes the rows of its own queries by them.

Which tokens are clustered with which is a constant of the call, so that queries are sent round once and receive no gradient from elsewhere.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .. import _kernels
from .._kernels import Options
from ..functional import attend_eagerly, parameter_values
from .call import Call
from .collectives import Shards, gather

__all__ = ["clustered"]


def clustered(call: Call, shards: Shards) -> Tensor:
    """The rows of this process's queries, in the graph of the whole sequence."""
    begin, tokens = shards.offset, call.q.shape[-2]
    seen = [(0, end) for end in _ends(call, shards)]
    others = _whole(call.q.detach(), shards, seen)
    q = torch.cat((others[..., :begin, :], call.q, others[..., begin + tokens :, :]), -2)
    k, v = (_whole(x, shards, seen) for x in (call.keys, call.v))
    key_mask, query_mask = (_whole_mask(mask, shards) for mask in (call.key_mask, call.query_mask))
    names, values = parameter_values(call.parameters)
    options = Options(call.mechanism, call.causal, key_mask, query_mask, names)
    found = _kernels.call_of(options, values).plan_clusters(*(_kernels.in_rows(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))))
    own = torch.zeros((q.shape[0], shards.tokens), dtype=torch.bool)
    own[:, begin : begin + tokens] = True if call.query_mask is None else call.query_mask.bool()
    out = attend_eagerly(options._replace(query_mask=own, clusters=found), q, k, v, values)
    return out[..., begin : begin + tokens, :].float()


def _ends(call: Call, shards: Shards) -> list[int]:
    """How many tokens of the whole sequence the rows of every process depend on: in causal calls those up to its last one, or to the end of
    the block that this is in."""
    if not call.causal:
        return [shards.tokens] * shards.size
    structure = call.document.get("structure") or call.document
    size = structure["causal_clusters"].get("size", 1)
    ends = [sum(shards.lengths[: rank + 1]) for rank in range(shards.size)]
    return [min(-(-end // size) * size, shards.tokens) for end in ends]


def _whole(x: Tensor, shards: Shards, seen: Sequence[tuple[int, int]]) -> Tensor:
    """The tokens of all processes; zeros for those that nothing here depends on."""
    x = gather(x, shards, seen)
    return torch.nn.functional.pad(x, (0, 0, 0, shards.tokens - x.shape[-2]))


def _whole_mask(mask: Tensor | None, shards: Shards) -> Tensor | None:
    """The masks of all processes: how large clusters may be is told by the number of all tokens."""
    if mask is None:
        return None
    everywhere = [(0, shards.tokens)] * shards.size
    return gather(mask.to(torch.uint8)[..., None], shards, everywhere)[..., 0].bool().contiguous()
