"""Attention on NumPy arrays and on everything that speaks DLPack, forward and backward."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from . import _resolvent
from .errors import DTypeError, TensorError, not_dense
from .mechanism import Mechanism, MechanismLike
from .threads import get_num_threads, told

__all__ = ["Gradients", "State", "attend", "attend_backward", "clusters"]


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
    parameters: Mapping[str, Any] | None = None,
    codebook: Any = None,
    landmark_indices: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
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
        parameters: Values of the mechanism's `parameters`, float32, in place of configured ones.
        codebook: Fixed centroids ``[heads, clusters, channels]`` for mechanisms with clusters.
        landmark_indices: Tokens ``[batch, count]`` that are the landmarks, for ``soft`` with landmarks of kind ``random``.
        clusters: What `clusters` has returned, in place of finding them again.
        dropout: Probability by which each pair is left out, drawn from ``seed``: its weight (``dropout_kind="weights"``)
            or the pair itself (``"pairs"``). For ``softmax`` and ``fna``.
        strategy: ``auto``, ``fused`` or ``reference`` (naive and in float64, to check against).
        threads: See `set_num_threads`; the number of threads changes no bit.
        out: Where to write the result, with channels side by side.
        return_state: Return ``(out, state)``, of which `attend_backward` takes ``state``.
    """
    mechanism = Mechanism.of(mechanism)
    tensors = _Tensors.read(q, k, v)
    options = _Options(mechanism, causal, strategy, key_mask, query_mask, parameters, codebook, landmark_indices)
    options.dropout = (dropout_kind, dropout, seed) if dropout else None
    options.clusters, options.threads = clusters, threads
    if mechanism.clustered and clusters is None and return_state:
        options.clusters = options.call(tensors).plan_clusters(*tensors.inputs)
    call = options.call(tensors)
    sizes, rows, statistics = call.lengths(*tensors.inputs)
    shape = (*tensors.leading, rows, sizes[5])
    result = tensors.empty(shape) if out is None else out
    state = np.empty(statistics, np.float32) if return_state else None
    call.forward(*tensors.inputs, tensors.bits(result), state)
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
    parameters: Mapping[str, Any] | None = None,
    wrt: Sequence[str] | None = None,
    codebook: Any = None,
    landmark_indices: Any = None,
    clusters: _resolvent.Clusters | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int = 0,
    strategy: str = "auto",
    threads: int | None = None,
    state: State | None = None,
) -> Gradients:
    """Gradients of ``<dout, attend(q, k, v, ...)>``.

    Pass what `attend` got. Without ``state``, which `attend` returns on demand, the forward pass is computed again.
    ``wrt`` names the parameters whose gradients are wanted: by default those that are given; others may be asked for and
    are then of the configured values.
    """
    mechanism = Mechanism.of(mechanism)
    tensors = _Tensors.read(q, k, v)
    dout = tensors.like(dout, "dout")
    options = _Options(mechanism, causal, strategy, key_mask, query_mask, parameters, codebook, landmark_indices)
    options.dropout = (dropout_kind, dropout, seed) if dropout else None
    options.clusters, options.threads = clusters if state is None else state.clusters, threads
    if mechanism.clustered and options.clusters is None:
        options.clusters = options.call(tensors).plan_clusters(*tensors.inputs)
    call = options.call(tensors)
    sizes, rows, statistics = call.lengths(*tensors.inputs)
    if state is None:
        state = State(tensors.empty((*tensors.leading, rows, sizes[5])), np.empty(statistics, np.float32), None)
        call.forward(*tensors.inputs, tensors.bits(state.out), state.statistics)
    gradients = [None if x is None else tensors.empty(tuple(x.shape)) for x in tensors.inputs]
    names = list(options.parameters) if wrt is None else list(wrt)
    wanted = {name: np.empty(mechanism.parameter_shape(name, sizes), np.float32) for name in names}
    dq, dk, dv = (None if x is None else tensors.bits(x) for x in gradients)
    out = tensors.bits(state.out)
    call.backward(*tensors.inputs, out, state.statistics, dout, dq, dk, dv, list(wanted.items()))
    dq, dk, dv = (None if x is None else tensors.present(x) for x in gradients)
    return Gradients(dq, dk, dv, {name: tensors.present(values) for name, values in wanted.items()})


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
    tensors = _Tensors.read(q, k, v)
    options = _Options(mechanism, causal, strategy, key_mask, query_mask, None, codebook, None)
    options.threads = threads
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
        landmark_indices: Any,
    ) -> None:
        self.mechanism, self.causal, self.strategy = mechanism, bool(causal), strategy
        self.key_mask = None if key_mask is None else _dense(key_mask, "key_mask")
        self.query_mask = None if query_mask is None else _dense(query_mask, "query_mask")
        self.parameters = {name: _dense(values, name) for name, values in (parameters or {}).items()}
        self.codebook = None if codebook is None else _dense(codebook, "codebook")
        self.landmark_indices = None if landmark_indices is None else _dense(landmark_indices, "landmark_indices")
        self.clusters: _resolvent.Clusters | None = None
        self.dropout: tuple[str, float, int] | None = None
        self.threads: int | None = None

    def call(self, tensors: _Tensors) -> _resolvent.Call:
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
        )


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_bfloat16(x: Any) -> bool:
    # NumPy knows bfloat16 through packages alone, whose types DLPack does not carry.
    return isinstance(x, np.ndarray) and x.dtype.name == "bfloat16"


def _in_rows(x: np.ndarray[Any, Any]) -> bool:
    """Whether the kernels read the array where it lies."""
    steps = [stride // x.itemsize for stride, size in zip(x.strides, x.shape) if size > 1]
    whole = x.flags.aligned and all(stride >= 0 and stride % x.itemsize == 0 for stride in x.strides)
    return whole and (x.ndim == 0 or x.shape[-1] < 2 or steps[-1] == 1)


def _dense(x: Any, name: str, rows: bool = False) -> Any:
    """A tensor with the elements of `x`, contiguous, or, for `rows`, with channels side by side: itself where it is one."""
    if isinstance(x, np.ndarray):
        return x if rows and _in_rows(x) else np.require(x, requirements=["C", "A"])
    if _is_torch(x):
        if x.requires_grad:
            raise TensorError(
                f"tensor `{name}` requires gradients, which this function does not record; call resolvent.torch.attend, or "
                "detach it",
                code="tensor",
                tensor=name,
                remedy="call resolvent.torch.attend, or detach it",
            )
        try:
            return x if rows and (x.shape[-1:] == (1,) or x.stride()[-1:] == (1,)) else x.contiguous()
        except RuntimeError as error:
            raise not_dense(name, error) from error
    if not hasattr(x, "__dlpack__"):
        raise DTypeError(
            f"tensor `{name}` is {type(x).__name__}, which is no tensor; pass a NumPy array or anything that speaks DLPack",
            code="type",
            tensor=name,
            remedy="pass a NumPy array or anything that speaks DLPack",
        )
    if tuple(x.__dlpack_device__())[0] != 1:
        return x  # refused with its device named
    return _dense(np.from_dlpack(x), name, rows)


class _Tensors:
    """q, k and v as they are read, and how results of their kind are made."""

    def __init__(self, source: Any, q: Any, k: Any, v: Any) -> None:
        self.source, self.like_q = source, q
        self.is_bits = _is_bfloat16(q)
        self.inputs = (self.bits(q), None if k is None else self.bits(k), self.bits(v))
        self.leading = tuple(q.shape[:-2])

    @classmethod
    def read(cls, q: Any, k: Any, v: Any) -> _Tensors:
        k = None if k is None else _dense(k, "k", rows=True)
        return cls(q, _dense(q, "q", rows=True), k, _dense(v, "v", rows=True))

    def bits(self, x: Any) -> Any:
        return x.view(np.uint16) if self.is_bits and _is_bfloat16(x) else x

    def like(self, x: Any, name: str) -> Any:
        return self.bits(_dense(x, name, rows=True))

    def empty(self, shape: tuple[int, ...]) -> Any:
        if _is_torch(self.like_q):
            return sys.modules["torch"].empty(shape, dtype=self.like_q.dtype)
        return np.empty(shape, self.like_q.dtype)

    def present(self, x: Any) -> Any:
        """A result as one of the library that `q` came from."""
        if isinstance(self.source, np.ndarray) or not isinstance(x, np.ndarray):
            return x
        if _is_torch(self.source):
            return sys.modules["torch"].from_numpy(x)
        namespace = getattr(self.source, "__array_namespace__", None)
        return x if namespace is None else namespace().from_dlpack(x)

    def threads(self) -> int:
        if told() is None and _is_torch(self.source):
            threads: int = sys.modules["torch"].get_num_threads()
            return threads
        return get_num_threads()
