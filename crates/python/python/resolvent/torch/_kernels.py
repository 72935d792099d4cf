"""Calls of the kernels on PyTorch tensors, without gradients and without the dispatcher."""

from __future__ import annotations

import functools
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
    precision: str = "full"
    sequences: tuple[list[int], list[int] | None] | None = None
    """Cumulative lengths of sequences that lie end to end, of queries and of keys."""
    clusters: _resolvent.Clusters | None = None
    """Those of a clustered call, where they have been found."""


class Forward(NamedTuple):
    """What a forward pass returns, and what it leaves for the backward pass."""

    out: Tensor
    state: Tensor | None
    clusters: _resolvent.Clusters | None


def in_rows(x: Tensor, name: str) -> Tensor:
    """`x` with channels side by side, itself where they are: the kernels read rows wherever these lie."""
    if x.is_neg():
        x = x.resolve_neg()  # a view whose numbers have other signs than its memory
    try:
        return x if x.is_contiguous() or x.shape[-1:] == (1,) or x.stride()[-1:] == (1,) else x.contiguous()
    except RuntimeError as error:
        raise not_dense(name, error) from error


def empty_rows(q: Tensor, rows: int, channels: int, within_tokens: bool = False) -> Tensor:
    """An empty result ``[.., rows, channels]``, heads `within_tokens` or where those of `q` are: PyTorch's kernels lay it out so, and
    nothing is copied where heads are merged."""
    if not within_tokens and q.is_contiguous() and q.shape[-2:] == (rows, channels):
        return torch.empty_like(q)
    leading = q.shape[:-2]
    if q.dim() >= 3 and (within_tokens or not q.is_contiguous() and q.stride(-3) < q.stride(-2)):
        return torch.empty((*leading[:-1], rows, leading[-1], channels), dtype=q.dtype).transpose(-3, -2)
    return torch.empty((*leading, rows, channels), dtype=q.dtype)


#: What the options of most calls are beside the mechanism and causality.
_ALONE = Options(Mechanism("softmax"))[2:]


# A model has few; they hold no tensor.
@functools.lru_cache(maxsize=256)
def _call_alone(mechanism: Mechanism, causal: bool, threads: int) -> _resolvent.Call:
    return _resolvent.Call(mechanism._core, threads=threads, causal=causal)


def call_of(
    options: Options, parameters: Sequence[Tensor], clusters: _resolvent.Clusters | None = None
) -> _resolvent.Call:
    threads = told() or torch.get_num_threads()
    if clusters is None and options[2:] == _ALONE:
        return _call_alone(options.mechanism, options.causal, threads)
    return _resolvent.Call(
        options.mechanism._core,
        threads=threads,
        causal=options.causal,
        key_mask=options.key_mask,
        query_mask=options.query_mask,
        parameters=list(zip(options.names, parameters)),
        codebook=options.codebook,
        landmark_indices=options.landmark_indices,
        clusters=options.clusters if clusters is None else clusters,
        dropout=options.dropout,
        precision=options.precision,
        sequences=options.sequences,
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
    out: Tensor | None = None,
) -> Forward:
    """The forward pass, with the state where a backward pass may follow. `keep_clusters` finds those of a clustered call apart,
    so that the backward pass need not. The result is written to `out`, where it is given, or lies as `q` does."""
    q, k, v = in_rows(q, "q"), None if k is None else in_rows(k, "k"), in_rows(v, "v")
    call = call_of(options, parameters)
    clusters = options.clusters
    if keep_clusters and options.mechanism.clustered and clusters is None:
        clusters = call.plan_clusters(q, k, v)
        call = call_of(options, parameters, clusters)
    sizes, rows, statistics = call.lengths(q, k, v)
    out = empty_rows(q, rows, sizes[5]) if out is None else out
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
    *,
    within_tokens: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of those parameters that are wanted; the first lie as their tensors do, or heads `within_tokens`."""
    q, k, v = in_rows(q, "q"), None if k is None else in_rows(k, "k"), in_rows(v, "v")
    call = call_of(options, parameters, saved.clusters)
    dq, dk, dv = (None if x is None else empty_rows(x, x.shape[-2], x.shape[-1], within_tokens) for x in (q, k, v))
    assert dq is not None and dv is not None
    gradients = [torch.empty_like(p) if want else None for p, want in zip(parameters, wanted)]
    buffers = [(name, buffer) for name, buffer in zip(options.names, gradients) if buffer is not None]
    call.backward(q, k, v, saved.out, saved.state, in_rows(dout, "dout"), dq, dk, dv, buffers)
    return dq, dk, dv, gradients
