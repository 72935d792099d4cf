"""Attention on NumPy arrays and on everything that speaks DLPack, forward and backward."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from . import _resolvent
from .errors import DTypeError, TensorError
from .mechanism import Mechanism, MechanismLike, with_bias_of
from .tensors import Tensors, cumulative, dense, is_torch
from .threads import number

__all__ = ["Gradients", "State", "attend", "attend_backward", "attend_varlen", "attend_varlen_backward", "clusters"]


@dataclasses.dataclass(frozen=True)
class State:
    """What a forward pass leaves for `attend_backward`, so that nothing is computed twice."""

    out: Any
    statistics: Any
    clusters: _resolvent.Clusters | None


class Gradients(NamedTuple):
    """What `attend_backward` returns."""

    q: Any
    k: Any
    """``None`` where the mechanism is tied: `q` holds both paths."""
    v: Any
    parameters: dict[str, Any]
    """Of the parameters that were asked for, float32."""


def attend(
    q: Any,
    k: Any,
    v: Any,
    mechanism: MechanismLike = "softmax",
    *,
    causal: bool = False,
    key_mask: Any = None,
    query_mask: Any = None,
    bias: Any = None,
    window: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    codebook: Any = None,
    landmark_indices: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
    precision: str = "full",
    threads: int | None = None,
    out: Any = None,
    return_state: bool = False,
) -> Any:
    """``A(q, k) v`` for a mechanism ``A``; the result is of the kind and type of ``q``.

    Args:
        q: ``[batch, heads, tokens, channels]``; leading axes may be missing. float32, float16 or bfloat16.
            Read in place if channels lie side by side, wherever rows and heads lie; others are copied once.
        k: The keys; ``None`` if and only if the mechanism is tied (the keys are ``q``). Keys and values may have fewer heads, which divide
            those of ``q``: each serves several of them in a row.
        v: The values.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping.
        causal: Query ``i`` sees key ``j`` if ``j <= i + keys - queries``.
        key_mask: ``[batch, keys]``, true = keep. A masked token is absent: its content, NaN included, changes no bit.
        query_mask: ``[batch, queries]``; the row of a masked query is zero.
        bias: Added to the logits of pairs, broadcast to ``[batch, heads, queries, keys]``; a pair at ``-inf`` is absent. Of booleans,
            true = keep. For mechanisms that form pairs.
        window: Queries see keys less than this many tokens away, for mechanisms that form all pairs.
        parameters: Values of the mechanism's `parameters`, float32, in place of configured ones.
        codebook: Fixed centroids ``[heads, clusters, channels]`` for mechanisms with clusters.
        landmark_indices: Tokens ``[batch, count]`` that are the landmarks, for ``soft`` with landmarks of kind ``random``.
        clusters: What `clusters` has returned, in place of finding them again.
        dropout: Probability by which each pair is left out, drawn from ``seed``: its weight (``dropout_kind="weights"``)
            or the pair itself (``"pairs"``). For ``softmax`` and ``fna``.
        strategy: ``auto``, ``fused`` or ``reference`` (naive and in float64, to check against).
        precision: ``full``, or ``bf16``: products of operands that are rounded to bfloat16, summed in float32, whatever the tensors are
            stored in. For ``softmax``, ``infsa``, ``fna``, dense compositions of products and ``performer``; refused by others. ``bf16x3``:
            three products of bfloat16 for each of float32, 16 bits of it; for the same but ``fna``, on processors with AMX.
        threads: See `set_num_threads`; the number of threads changes no bit.
        out: Where to write the result, with channels side by side.
        return_state: Return ``(out, state)``, of which `attend_backward` takes ``state``.
    """
    tensors = Tensors.read(q, k, v)
    mechanism, parameters = _composed(mechanism, tensors, bias, window, parameters)
    drawn = (dropout_kind, dropout, seed)
    given = (mechanism, causal, strategy, key_mask, query_mask, parameters, codebook, landmark_indices)
    options = _Options(*given, dropout=drawn, clusters=clusters, precision=precision, threads=threads)
    return _forward(tensors, options, out, return_state)


def _forward(tensors: Tensors, options: _Options, out: Any, return_state: bool) -> Any:
    if return_state:
        options.find_clusters(tensors)
    call = options.call(tensors)
    if is_torch(out) and out.is_neg():
        remedy = "pass one that is no view of other signs than its memory has"
        raise TensorError(f"tensor `out` cannot be written to; {remedy}", code="tensor", tensor="out", remedy=remedy)
    result, state = out, None
    if out is None or return_state:
        sizes, rows, statistics = call.lengths(*tensors.inputs)
        result = tensors.empty(tensors.shape(rows, sizes[5])) if out is None else out
        state = np.empty(statistics, np.float32) if return_state else None
    call.forward(*tensors.inputs, tensors.seen(result), state)
    shown = tensors.present(result) if out is None else out
    return (shown, State(result, state, options.clusters)) if return_state else shown


def attend_backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    mechanism: MechanismLike = "softmax",
    *,
    causal: bool = False,
    key_mask: Any = None,
    query_mask: Any = None,
    bias: Any = None,
    window: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    wrt: Sequence[str] | None = None,
    codebook: Any = None,
    landmark_indices: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
    precision: str = "full",
    threads: int | None = None,
    state: State | None = None,
) -> Gradients:
    """Gradients of ``<dout, attend(q, k, v, ...)>``.

    Pass what `attend` got. Without ``state``, which `attend` returns on demand, the forward pass is computed again.
    ``wrt`` names the parameters whose gradients are wanted: by default those that are given, a ``bias`` of numbers among them, which has
    four axes; others may be asked for and are then of the configured values.
    """
    tensors = Tensors.read(q, k, v)
    mechanism, parameters = _composed(mechanism, tensors, bias, window, parameters)
    drawn = (dropout_kind, dropout, seed)
    given = (mechanism, causal, strategy, key_mask, query_mask, parameters, codebook, landmark_indices)
    options = _Options(*given, dropout=drawn, clusters=clusters, precision=precision, threads=threads)
    return _backward(tensors, options, dout, wrt, state)


def _backward(tensors: Tensors, options: _Options, dout: Any, wrt: Sequence[str] | None, state: State | None) -> Gradients:
    dout = tensors.seen(dense(dout, "dout", rows=True))
    if state is not None:
        options.clusters = state.clusters
    options.find_clusters(tensors)
    call = options.call(tensors)
    sizes, rows, statistics = call.lengths(*tensors.inputs)
    if state is None:
        state = State(tensors.empty(tensors.shape(rows, sizes[5])), np.empty(statistics, np.float32), None)
        call.forward(*tensors.inputs, tensors.seen(state.out), state.statistics)
    gradients = [None if x is None else tensors.empty(tuple(tensors.order(x).shape)) for x in tensors.inputs]
    names = list(options.parameters) if wrt is None else list(wrt)
    wanted = {name: np.empty(options.mechanism.parameter_shape(name, sizes), np.float32) for name in names}
    dq, dk, dv = (None if x is None else tensors.seen(x) for x in gradients)
    call.backward(*tensors.inputs, tensors.seen(state.out), state.statistics, dout, dq, dk, dv, list(wanted.items()))
    dq, dk, dv = (None if x is None else tensors.present(x) for x in gradients)
    return Gradients(dq, dk, dv, {name: tensors.present(values) for name, values in wanted.items()})


def attend_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    mechanism: MechanismLike = "softmax",
    *,
    causal: bool = False,
    key_mask: Any = None,
    query_mask: Any = None,
    window: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    codebook: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
    precision: str = "full",
    threads: int | None = None,
    out: Any = None,
    return_state: bool = False,
) -> Any:
    """`attend` of sequences of any lengths that lie end to end, without padding: each attends to itself alone.

    Args:
        q: ``[tokens, heads, channels]``, the tokens of all sequences; k and v likewise, with as many heads or fewer that divide them.
        cu_seqlens_q: Cumulative lengths, from 0 to the number of tokens, each larger than the one before. Integers.
        cu_seqlens_k: The same of the keys, for cross-attention; by default the keys are the queries' tokens.
        key_mask: ``[tokens]``, true = keep; ``query_mask`` likewise.

    The others are those of `attend`. Sequence ``n`` draws its dropout by a seed of its own. Tensors of single tokens (a bias of pairs,
    landmark indices, given landmarks) have no place here.
    """
    tensors = Tensors.read(q, k, v, end_to_end=True)
    mechanism, parameters = _composed(mechanism, tensors, None, window, parameters)
    drawn, sequences = (dropout_kind, dropout, seed), _sequences(cu_seqlens_q, cu_seqlens_k)
    given = (mechanism, causal, strategy, key_mask, query_mask, parameters, codebook)
    options = _Options(*given, dropout=drawn, clusters=clusters, precision=precision, threads=threads, sequences=sequences)
    return _forward(tensors, options, out, return_state)


def attend_varlen_backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    mechanism: MechanismLike = "softmax",
    *,
    causal: bool = False,
    key_mask: Any = None,
    query_mask: Any = None,
    window: int | None = None,
    parameters: Mapping[str, Any] | None = None,
    wrt: Sequence[str] | None = None,
    codebook: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
    precision: str = "full",
    threads: int | None = None,
    state: State | None = None,
) -> Gradients:
    """Gradients of ``<dout, attend_varlen(q, k, v, ...)>``, as `attend_backward` has them.

    Those of parameters are of all sequences together.
    """
    tensors = Tensors.read(q, k, v, end_to_end=True)
    mechanism, parameters = _composed(mechanism, tensors, None, window, parameters)
    drawn, sequences = (dropout_kind, dropout, seed), _sequences(cu_seqlens_q, cu_seqlens_k)
    given = (mechanism, causal, strategy, key_mask, query_mask, parameters, codebook)
    options = _Options(*given, dropout=drawn, clusters=clusters, precision=precision, threads=threads, sequences=sequences)
    return _backward(tensors, options, dout, wrt, state)


def clusters(
    q: Any,
    k: Any,
    v: Any,
    mechanism: MechanismLike = "ssa",
    *,
    causal: bool = False,
    key_mask: Any = None,
    query_mask: Any = None,
    codebook: Any = None,
    strategy: str = "auto",
    threads: int | None = None,
) -> _resolvent.Clusters:
    """The clusters and sampled edges that a call of a clustered mechanism finds, to be used again."""
    mechanism = Mechanism.of(mechanism)
    tensors = Tensors.read(q, k, v)
    options = _Options(mechanism, causal, strategy, key_mask, query_mask, None, codebook, threads=threads)
    return options.call(tensors).plan_clusters(*tensors.inputs)


class _Options:
    """The arguments of a call beside q, k and v."""

    def __init__(
        self,
        mechanism: Mechanism,
        causal: bool,
        strategy: str,
        key_mask: Any,
        query_mask: Any,
        parameters: Mapping[str, Any] | None,
        codebook: Any,
        landmark_indices: Any = None,
        *,
        dropout: tuple[str, float, int] = ("weights", 0.0, 0),
        clusters: _resolvent.Clusters | None = None,
        precision: str = "full",
        threads: int | None = None,
        sequences: tuple[list[int], list[int] | None] | None = None,
    ) -> None:
        """``dropout`` is its kind, share and seed."""
        self.mechanism, self.causal, self.strategy = mechanism, bool(causal), strategy
        self.key_mask = None if key_mask is None else dense(key_mask, "key_mask")
        self.query_mask = None if query_mask is None else dense(query_mask, "query_mask")
        self.parameters = {name: dense(values, name) for name, values in (parameters or {}).items()}
        self.codebook = None if codebook is None else dense(codebook, "codebook")
        self.landmark_indices = None if landmark_indices is None else dense(landmark_indices, "landmark_indices")
        self.dropout = (*dropout[:2], number("seed", dropout[2], 0)) if dropout[1] else None
        self.threads = None if threads is None else number("threads", threads, 1, " or None")
        self.clusters, self.precision, self.sequences = clusters, precision, sequences

    def find_clusters(self, tensors: Tensors) -> None:
        """Finds the clusters, where a call has any and they are not known."""
        if self.mechanism.clustered and self.clusters is None:
            self.clusters = self.call(tensors).plan_clusters(*tensors.inputs)

    def call(self, tensors: Tensors) -> _resolvent.Call:
        return _resolvent.Call(
            self.mechanism._core,
            threads=tensors.threads() if self.threads is None else self.threads,
            causal=self.causal,
            strategy=self.strategy,
            key_mask=self.key_mask,
            query_mask=self.query_mask,
            parameters=list(self.parameters.items()),
            codebook=self.codebook,
            landmark_indices=self.landmark_indices,
            clusters=self.clusters,
            dropout=self.dropout,
            bf16_as_u16=tensors.is_bits,
            precision=self.precision,
            sequences=self.sequences,
        )


def _composed(
    mechanism: MechanismLike, tensors: Tensors, bias: Any, window: int | None, parameters: Mapping[str, Any] | None
) -> tuple[Mechanism, dict[str, Any]]:
    """The mechanism with a window and a bias of the tensor's axes, and the tensor among its parameters."""
    found, given = Mechanism.of(mechanism), dict(parameters or {})
    if window is not None:
        found = found.with_window(window)
    if bias is None:
        return found, given
    if "bias" in given:
        remedy = "pass it as `bias` or among the parameters"
        raise TensorError(f"tensor `bias` is given twice; {remedy}", code="tensor", tensor="bias", remedy=remedy)
    array = dense(bias, "bias")
    if is_torch(array):
        array = array.numpy() if array.dtype == sys.modules["torch"].bool else array.float().numpy()
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        remedy = "pass numbers to add, or booleans"
        raise DTypeError(f"tensor `bias` holds {array.dtype}; {remedy}", code="dtype", tensor="bias", remedy=remedy)
    array = np.where(array, np.float32(0), -np.float32(np.inf)) if array.dtype == bool else array.astype(np.float32)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    q, k, v = tensors.inputs
    whole = (*(1,) * (4 - q.ndim), *q.shape[:-1], v.shape[-2])
    if array.ndim != 4 or any(n not in (1, full) for n, full in zip(array.shape, whole)):
        remedy = "every axis must be 1 or that of [batch, heads, queries, keys]"
        message = f"tensor `bias` is {list(array.shape)} beside pairs {list(whole)}; {remedy}"
        raise TensorError(message, code="shape", tensor="bias", remedy=remedy)
    return Mechanism.from_json(with_bias_of(found.to_json(), array.shape)), {**given, "bias": array}


def _sequences(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[list[int], list[int] | None]:
    keys = None if cu_seqlens_k is None else cumulative(cu_seqlens_k, "cu_seqlens_k")
    return cumulative(cu_seqlens_q, "cu_seqlens_q"), keys
