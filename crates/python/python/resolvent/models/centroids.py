"""Fixed centroids for mechanisms with clusters, found among the tokens of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..mechanism import Mechanism
from .given import Given

__all__ = ["centroids"]

_ITERATIONS = 20
#: Tokens of a head that are looked at; of more, evenly spread ones.
_TOKENS = 8192


def centroids(mechanism: Mechanism, calls: list[Given]) -> Tensor:
    """Means of as many clusters as the mechanism has, ``[heads, clusters, channels]``, of queries or of keys as it clusters them."""
    document = mechanism.to_dict()
    structure = document.get("structure") or document
    count = structure.get("clusters") if mechanism.clustered else None
    if count is None or structure.get("cluster_on") == "dual":
        remedy = "name a mechanism with a number of clusters, of queries or of keys"
        message = f"argument `codebook` is for clusters, and `{mechanism}` has no number of them; {remedy}"
        raise ConfigurationError(message, code="argument", field="codebook", remedy=remedy)
    tokens = torch.cat([_tokens(call, structure.get("cluster_on") == "keys") for call in calls], 1)
    if tokens.shape[1] < count:
        remedy = "show more tokens, or ask for fewer clusters"
        message = f"the samples have {tokens.shape[1]} tokens for {count} clusters; {remedy}"
        raise ConfigurationError(message, code="argument", field="samples", remedy=remedy)
    chosen = torch.linspace(0, tokens.shape[1] - 1, min(tokens.shape[1], _TOKENS)).long()
    generator = torch.Generator().manual_seed(structure.get("seed", 0))
    return torch.stack([_means(head, count, generator) for head in tokens[:, chosen]])


def _tokens(call: Given, of_keys: bool) -> Tensor:
    """The tokens that there are, ``[heads, tokens, channels]``."""
    x = call.k if of_keys and call.k is not None else call.q
    if x.shape[1] < call.q.shape[1]:
        x = x.repeat_interleave(call.q.shape[1] // x.shape[1], 1)
    x = x.detach().float()
    if call.keep is None or call.keep.shape[1] != x.shape[2]:
        return x.transpose(0, 1).flatten(1, 2)
    return x.transpose(1, 2)[call.keep.to(torch.bool)].transpose(0, 1)


def _means(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Lloyd's iterations from tokens drawn at random; a cluster that loses all tokens stays where it is."""
    means = tokens[torch.randperm(len(tokens), generator=generator)[:count]].clone()
    for _ in range(_ITERATIONS):
        labels = torch.cdist(tokens, means).argmin(1)
        sizes = torch.bincount(labels, minlength=count)
        sums = torch.zeros_like(means).index_add_(0, labels, tokens)
        filled = sizes > 0
        means[filled] = sums[filled] / sizes[filled, None]
    return means
