"""Calls of the kernels on PyTorch tensors, without gradients and without the dispatcher."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from .. import _resolvent
from ..errors import not_dense
from ..mechanism import Mechanism
from ..threads import told


class Options(NamedTuple):
    """What a call has beside q, k, v and its parameters."""

    mechanism: Mechanism
    causal: bool = False
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    names: tuple[str, ...] = ()
    codebook: Tensor | None = None
    landmark_indices: Tensor | None = None
    dropout: tuple[str, float, int] | None = None


class Forward(NamedTuple):
    """What a forward pass returns, and what it leaves for the backward pass."""

    out: Tensor
    state: Tensor | None
    clusters: _resolvent.Clusters | None


def contiguous(x: Tensor, name: str) -> Tensor:
    """`x` in rows, itself where it is."""
    try:
        return x.contiguous()
    except RuntimeError as error:
        raise not_dense(name, error) from error


def call_of(
    options: Options, parameters: Sequence[Tensor], clusters: _resolvent.Clusters | None = None
) -> _resolvent.Call:
    threads = told()
    return _resolvent.Call(
        options.mechanism._core,
        threads=torch.get_num_threads() if threads is None else threads,
        causal=options.causal,
        key_mask=options.key_mask,
        query_mask=options.query_mask,
        parameters=list(zip(options.names, parameters)),
        codebook=options.codebook,
        landmark_indices=options.landmark_indices,
        clusters=clusters,
        dropout=options.dropout,
    )


def forward(
    options: Options,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    parameters: Sequence[Tensor],
    *,
    keep_state: bool = True,
    keep_clusters: bool = False,
) -> Forward:
    """The forward pass, with the state where a backward pass may follow. `keep_clusters` finds those of a clustered call apart,
    so that the backward pass need not."""
    q, k, v = contiguous(q, "q"), None if k is None else contiguous(k, "k"), contiguous(v, "v")
    call = call_of(options, parameters)
    clusters = None
    if keep_clusters and options.mechanism.clustered:
        clusters = call.plan_clusters(q, k, v)
        call = call_of(options, parameters, clusters)
    sizes, rows, statistics = call.lengths(q, k, v)
    out = torch.empty((*q.shape[:-2], rows, sizes[5]), dtype=q.dtype)
    state = torch.empty(statistics) if keep_state else None
    call.forward(q, k, v, out, state)
    return Forward(out, state, clusters)


def backward(
    options: Options,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    parameters: Sequence[Tensor],
    saved: Forward,
    dout: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of those parameters that are wanted."""
    q, k, v = contiguous(q, "q"), None if k is None else contiguous(k, "k"), contiguous(v, "v")
    call = call_of(options, parameters, saved.clusters)
    dq, dk, dv = torch.empty_like(q), None if k is None else torch.empty_like(k), torch.empty_like(v)
    gradients = [torch.empty_like(p) if want else None for p, want in zip(parameters, wanted)]
    buffers = [(name, buffer) for name, buffer in zip(options.names, gradients) if buffer is not None]
    call.backward(q, k, v, saved.out, saved.state, contiguous(dout, "dout"), dq, dk, dv, buffers)
    return dq, dk, dv, gradients
