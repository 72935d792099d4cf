"""Mechanisms whose shards exchange sums that are no longer than a row or a matrix of channels: `uniform`, `linear-infsa`, features."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor

from ..functional import attend
from .call import Call, divided, with_ones
from .collectives import Shards, largest, prefix_sum, total

__all__ = ["features", "linear_infsa", "uniform"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "gelu": torch.nn.functional.gelu,
}


def uniform(call: Call, shards: Shards) -> Tensor:
    """The mean of the values that a query sees: their sum and their number are exchanged."""
    v = call.v.float()
    summed = torch.cat((v, call.keys_kept(v)[..., None].expand(*v.shape[:-1], 1).to(v.dtype)), -1)
    if call.causal:
        summed = summed.double().cumsum(-2).float() + prefix_sum(summed.double().sum(-2, keepdim=True).float(), shards)
    else:
        summed = total(summed.double().sum(-2, keepdim=True).float(), shards).expand(*v.shape[:-2], call.q.shape[-2], -1)
    return call.queries_kept(divided(summed[..., :-1], summed[..., -1:]))


def linear_infsa(call: Call, shards: Shards) -> Tensor:
    """One weight per token, as "Infinite Self-Attention", eq. 16 to 21, has it: a row of channels and two sums per step are exchanged."""
    m, q, k = call.document, call.q.float(), call.keys.float()
    scale = q.shape[-1] ** -0.5 if m["scale"] is None else m["scale"]
    bias = _norm_bias(m["norm_bias"], q.shape[-1])
    of_q, of_k = (x.norm(dim=-1) for x in (q, k))
    u = _share(of_q * call.rows(q), m["eps"], shards)
    for _ in range(m["iterations"]):
        ahead = [(u[..., None] * q).sum(-2), (u * of_q).sum(-1, keepdim=True)]
        summed = total(torch.cat(ahead, -1), shards)
        logits = (k * summed[..., None, :-1]).sum(-1) + bias * of_k * summed[..., -1:]
        u = _share(_ACTIVATIONS[m["activation"]](scale * logits) * call.keys_kept(k), m["eps"], shards)
        # Where a further step follows, the tokens are queries too.
        u = u if m["iterations"] == 1 else u * call.rows(q)
    pooled = total((u[..., None] * call.v.float()).sum(-2, keepdim=True), shards)
    pooled = call.gamma() * pooled
    return call.queries_kept(pooled.expand(*q.shape[:-1], -1)) if m["broadcast"] else pooled


def _share(x: Tensor, eps: float, shards: Shards) -> Tensor:
    return divided(x, total(x.abs().sum(-1, keepdim=True), shards) + eps)


def _norm_bias(bias: Any, channels: int) -> float:
    if bias != "auto":
        return float(bias)
    # E|t| of a channel t of a unit vector: r(d) r(d + 1) = 2 / (pi d) with r(1) = 1.
    found = 1.0
    for d in range(1, channels):
        found = 2.0 / (math.pi * d) / found
    return found


def features(call: Call, shards: Shards) -> Tensor:
    """``phi(q) (phi(k)^T v)`` over the row's sum: a matrix of features by channels is exchanged, in causal calls the one so far."""
    phi_q, phi_k = _mapped(call, shards)
    v = call.v.float().to(phi_k.dtype)
    # A masked key has features of its own, those of zero.
    phi_k = phi_k * call.keys_kept(phi_k)[..., None]
    sums = phi_k.mT @ with_ones(v)
    if not call.causal:
        summed = phi_q @ total(sums, shards)
    else:
        # The pairs within the shard are the kernel's, which divides rows by the sums that are here multiplied again.
        own = attend(call.q.float(), call.keys.float(), call.v.float(), call.mechanism, causal=True, **call.rest())
        divisor = (phi_q * phi_k.cumsum(-2)).sum(-1, keepdim=True)
        summed = torch.cat((own.to(divisor.dtype) * divisor, divisor), -1) + phi_q @ prefix_sum(sums, shards)
    return call.queries_kept(divided(summed[..., :-1], summed[..., -1:]).float())


def _mapped(call: Call, shards: Shards) -> tuple[Tensor, Tensor]:
    """Features of queries and keys, each up to a factor that cancels: of a query its own, of keys one for all."""
    channels = call.q.shape[-1]
    root = call.parameter("scale", call.score.get("scale") or channels**-0.5).sqrt()
    directions = call.mechanism._core.feature_directions(channels)
    if directions is None:
        phi_q, phi_k = (torch.nn.functional.elu(root * x.float()) + 1.0 for x in (call.q, call.keys))
        return phi_q, phi_k
    w = torch.tensor(directions, dtype=torch.float64).reshape(-1, channels)
    # In float64, whose exponents leave room for what the largest of all keys takes away from the others.
    q, k, root = call.q.double(), call.keys.double(), root.double()
    of_q, of_k = (root * (x @ w.mT) - 0.5 * root**2 * x.square().sum(-1, keepdim=True) for x in (q, k))
    kept = of_k.detach().masked_fill(~call.keys_kept(of_k)[..., None].bool(), -torch.inf)
    most = largest(kept.amax((-2, -1), keepdim=True), shards)
    most = torch.where(most.isfinite(), most, 0.0)
    return (of_q - of_q.detach().amax(-1, keepdim=True)).exp(), (of_k - most).exp()
