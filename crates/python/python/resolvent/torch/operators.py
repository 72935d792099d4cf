"""The calls as operators of ``torch.library``, which tracers and compilers see as one node with known shapes."""

from __future__ import annotations

import functools
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ..errors import Error, UnsupportedError
from ..mechanism import Mechanism
from ..tensors import cumulative
from . import _kernels
from ._kernels import Forward, Options

_Size = Union[int, torch.SymInt]


def double_backward_refused() -> UnsupportedError:
    remedy = "differentiate once, or use a mechanism of PyTorch operations where second derivatives are needed"
    return UnsupportedError(
        f"resolvent.torch has no second derivatives; {remedy}", code="double-backward", field="create_graph", remedy=remedy
    )


def sequences_of(cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor]) -> Optional[Tuple[List[int], Optional[List[int]]]]:
    """The lengths as the kernels take them."""
    if cu_seqlens_q is None:
        return None
    queries = cumulative(cu_seqlens_q, "cu_seqlens_q")
    return queries, None if cu_seqlens_k is None else cumulative(cu_seqlens_k, "cu_seqlens_k")


def _options(
    parameters: Sequence[Tensor],
    names: str,
    key_mask: Optional[Tensor],
    query_mask: Optional[Tensor],
    codebook: Optional[Tensor],
    landmark_indices: Optional[Tensor],
    mechanism: str,
    causal: bool,
    dropout_kind: str,
    dropout: float,
    seed: Optional[Tensor],
    precision: str,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
) -> Options:
    drawn = (dropout_kind, dropout, 0 if seed is None else int(seed)) if dropout else None
    listed = tuple(names.split(",")) if names else ()
    found = Mechanism.of(mechanism)
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k)
    return Options(found, causal, key_mask, query_mask, listed, codebook, landmark_indices, drawn, precision, sequences)


# The arguments of both operators are written out: PyTorch reads their schemas off the signatures.
@torch.library.custom_op("resolvent::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Optional[Tensor],
    v: Tensor,
    parameters: Sequence[Tensor],
    names: str,
    key_mask: Optional[Tensor],
    query_mask: Optional[Tensor],
    codebook: Optional[Tensor],
    landmark_indices: Optional[Tensor],
    mechanism: str,
    causal: bool,
    dropout_kind: str,
    dropout: float,
    seed: Optional[Tensor],
    precision: str,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    version: str,
) -> Tuple[Tensor, Tensor]:
    """The output, and the state that the backward pass needs.

    `version` is this package's. How long the state is depends on it, and compilers keep what they have made of a graph on disk: a graph
    of another version must be another graph.
    """
    rest = (key_mask, query_mask, codebook, landmark_indices, mechanism, causal, dropout_kind, dropout, seed)
    options = _options(parameters, names, *rest, precision, cu_seqlens_q, cu_seqlens_k)
    # In one piece, as compilers are told below.
    done = _kernels.forward(options, q, k, v, [p.contiguous() for p in parameters])
    assert done.state is not None  # kept by default
    return done.out.contiguous(), done.state


@torch.library.custom_op("resolvent::attend_backward", mutates_args=())
def attend_backward_op(
    dout: Tensor,
    out: Tensor,
    state: Tensor,
    q: Tensor,
    k: Optional[Tensor],
    v: Tensor,
    parameters: Sequence[Tensor],
    names: str,
    key_mask: Optional[Tensor],
    query_mask: Optional[Tensor],
    codebook: Optional[Tensor],
    landmark_indices: Optional[Tensor],
    mechanism: str,
    causal: bool,
    dropout_kind: str,
    dropout: float,
    seed: Optional[Tensor],
    precision: str,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
) -> List[Tensor]:
    """Gradients of q, of k unless the mechanism is tied, of v and of the parameters."""
    rest = (key_mask, query_mask, codebook, landmark_indices, mechanism, causal, dropout_kind, dropout, seed)
    options = _options(parameters, names, *rest, precision, cu_seqlens_q, cu_seqlens_k)
    values = [p.contiguous() for p in parameters]
    saved = Forward(_kernels.in_rows(out, "out"), state.contiguous(), None)
    dq, dk, dv, gradients = _kernels.backward(options, q, k, v, values, saved, dout, [True] * len(values))
    return [x.contiguous() for x in (dq, dk, dv, *gradients) if x is not None]


@attend_op.register_fake
def _(q, k, v, parameters, names, key_mask, query_mask, codebook, indices, mechanism, causal, *rest):  # type: ignore[no-untyped-def]
    found, (cu_seqlens_q, cu_seqlens_k) = Mechanism.of(mechanism), rest[-3:-1]
    given = [p.shape[-2] for name, p in zip(names.split(","), parameters) if name == "given_landmarks"]
    if cu_seqlens_q is None:
        length = _state_length(found, _sizes(q, v), causal, int(given[0]) if given else None)
    else:
        length = _state_length_of_sequences(found, _sizes(q, v), causal, cu_seqlens_q.shape[0] - 1, cu_seqlens_k is None)
    rows = 1 if _is_pooled_once(found) else q.shape[-2]
    return q.new_empty((*q.shape[:-2], rows, v.shape[-1])), q.new_empty((length,), dtype=torch.float32)


@attend_backward_op.register_fake
def _(dout, out, state, q, k, v, parameters, *rest):  # type: ignore[no-untyped-def]
    inputs = [x for x in (q, k, v, *parameters) if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, parameters, ctx.names, *rest = inputs
    constants, ctx.rest, (seed, ctx.precision, *lengths) = rest[:4], rest[4:8], rest[8:-1]
    ctx.save_for_backward(q, k, v, *constants, seed, *lengths, *output, *parameters)
    # What the state is made of enters the output alone.
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, *constants, seed, cu_seqlens_q, cu_seqlens_k, out, state = ctx.saved_tensors[:12]
    parameters = list(ctx.saved_tensors[12:])
    rest = (*constants, *ctx.rest, seed, ctx.precision, cu_seqlens_q, cu_seqlens_k)
    gradients = attend_backward_op(dout, out, state, q, k, v, parameters, ctx.names, *rest)
    dq, *others = gradients
    dk = None if k is None else others.pop(0)
    dv, *of_parameters = others
    return (dq, dk, dv, of_parameters) + (None,) * 14


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise double_backward_refused()


torch.library.register_autograd("resolvent::attend", _backward, setup_context=_setup_context)
torch.library.register_autograd("resolvent::attend_backward", _refuse)


def _sizes(q: Tensor, v: Tensor) -> tuple[_Size, ...]:
    leading = (1,) * (4 - q.dim()) + tuple(q.shape[:-2])
    return (*leading, q.shape[-2], v.shape[-2], q.shape[-1], v.shape[-1])


@functools.lru_cache(maxsize=256)
def _is_pooled_once(mechanism: Mechanism) -> bool:
    """Whether a head has one row of output, for all queries."""
    return mechanism.id == "linear-infsa" and not mechanism.to_dict()["broadcast"]


def _state_length(mechanism: Mechanism, sizes: tuple[_Size, ...], causal: bool, given: int | None) -> _Size:
    """Elements of the state. Where a size is symbolic, as a formula of it if there is one, which spares recompilations."""
    if all(isinstance(size, int) for size in sizes):
        return mechanism._core.lengths(sizes, causal, "auto", given)[1]  # type: ignore[arg-type]
    batch, heads, seq_q, seq_kv, head_dim, value_dim = sizes
    fixed = (int(heads), int(head_dim), int(value_dim))
    square = seq_q is seq_kv or (isinstance(seq_q, torch.SymInt) and str(seq_q) == str(seq_kv))
    formula = _formula(mechanism, fixed, causal, given, square)
    if formula is not None:
        constant, per_query, per_key = formula
        return batch * (constant + per_query * seq_q + per_key * seq_kv)
    known = (int(batch), fixed[0], int(seq_q), int(seq_kv), *fixed[1:])
    return mechanism._core.lengths(known, causal, "auto", given)[1]


def _state_length_of_sequences(mechanism: Mechanism, sizes: tuple[_Size, ...], causal: bool, count: _Size, square: bool) -> _Size:
    """The same of `count` sequences end to end, whose lengths nobody knows before the call."""
    _, heads, seq_q, seq_kv, head_dim, value_dim = sizes
    formula = _formula(mechanism, (int(heads), int(head_dim), int(value_dim)), causal, None, square)
    if formula is None:
        remedy = "call it outside of what is compiled or exported"
        raise UnsupportedError(
            f"sequences end to end with `{mechanism}` while compiling are not supported: its state depends on each length; {remedy}",
            code="unsupported",
            field="cu_seqlens_q",
            remedy=remedy,
        )
    constant, per_query, per_key = formula
    return count * constant + per_query * seq_q + per_key * seq_kv


@functools.lru_cache(maxsize=256)
def _formula(
    mechanism: Mechanism, fixed: tuple[int, int, int], causal: bool, given: int | None, square: bool
) -> tuple[int, int, int] | None:
    """``(a, b, c)`` if the state has ``batch (a + b queries + c keys)`` elements, whatever their numbers."""
    heads, head_dim, value_dim = fixed

    def length(batch: int, seq_q: int, seq_kv: int) -> int:
        sizes = (batch, heads, seq_q, seq_kv, head_dim, value_dim)
        return mechanism._core.lengths(sizes, causal, "auto", given)[1]

    try:
        origin, step = length(1, 512, 512), length(1, 513, 513)
        per_query = step - origin
        per_key = 0 if square else length(1, 512, 513) - origin
        per_query -= per_key
        constant = origin - 512 * (per_query + per_key)
        tokens = (1, 2, 3, 7, 64, 77, 100, 255, 1000, 4097)
        pairs = [(n, n) for n in tokens] + ([] if square else list(zip(tokens[3:], tokens)))
        for batch in (1, 3):
            for seq_q, seq_kv in pairs:
                if length(batch, seq_q, seq_kv) != batch * (constant + per_query * seq_q + per_key * seq_kv):
                    return None
    except Error:
        return None
    return constant, per_query, per_key
