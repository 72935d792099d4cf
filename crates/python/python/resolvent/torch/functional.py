"""Attention as a differentiable function of PyTorch tensors."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .._resolvent import __version__
from ..errors import TensorError, UnsupportedError
from ..fits import HeadMechanisms
from ..mechanism import Mechanism, MechanismLike, with_bias_of, with_window_of
from ..threads import number
from . import _kernels
from ._kernels import Forward, Options
from .guards import refuse_others, refuse_unreadable
from .heads import by_group
from .operators import attend_op, double_backward_refused, sequences_of

__all__ = ["attend", "attend_eagerly", "attend_varlen", "parameter_values"]


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mechanism: MechanismLike | HeadMechanisms = "softmax",
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    bias: Tensor | None = None,
    window: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    codebook: Tensor | None = None,
    landmark_indices: Tensor | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int | None = None,
    enable_gqa: bool = False,
    precision: str = "full",
) -> Tensor:
    """``A(q, k) v``, differentiable in q, k, v and the mechanism's parameters. CPU tensors.

    Args:
        q: ``[batch, heads, tokens, channels]``; leading axes may be missing. float32, float16 or bfloat16; under autocast
            all three are cast. Views are read where they lie if their channels lie side by side, as after a transposition of heads and tokens;
            the result then lies as q does. Others are copied once.
        k: The keys; ``None`` if and only if the mechanism is tied.
        v: The values.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping; or `HeadMechanisms`, where every group of heads is a call of its own,
            without parameters, codebook and landmark indices: `Attention` has these group by group. A tied group leaves k out.
        causal: Query ``i`` sees key ``j`` if ``j <= i + keys - queries``.
        key_mask: ``[batch, keys]``, true = keep.
        query_mask: ``[batch, queries]``; the row of a masked query is zero. Mechanisms that divide by sums over all rows
            need it beside ``key_mask`` for padding to change nothing.
        bias: Added to the logits of pairs, broadcast to ``[batch, heads, queries, keys]``; receives a gradient. A pair at ``-inf`` is
            absent. Of booleans, true = keep. For mechanisms that form pairs.
        window: Queries see keys less than this many tokens away, for mechanisms that form all pairs; time is proportional to it.
        parameters: Values of the mechanism's `parameters`, which receive gradients.
        codebook: Fixed centroids ``[heads, clusters, channels]`` for mechanisms with clusters; no gradients.
        landmark_indices: Tokens that are the landmarks, ``[batch, count]`` int64.
        dropout: Probability by which each pair is left out. For ``softmax`` and ``fna``.
        dropout_kind: ``weights``, as PyTorch does it, or ``pairs``, as a mask would.
        seed: Of the dropout; drawn from PyTorch's generator where it is not given.
        enable_gqa: k and v may have fewer heads, which divide those of q: each serves several of them in a row.
        precision: ``full``, or ``bf16``: products of operands that are rounded to bfloat16, summed in float32, whatever the tensors are
            stored in. For ``softmax``, ``infsa``, ``fna``, dense compositions of products and ``performer``; refused by others. ``bf16x3``:
            three products of bfloat16 for each of float32, 16 bits of it; for the same but ``fna``, on processors with AMX.
    """
    mechanism = mechanism if window is None else _within(mechanism, window)
    # Most calls have nothing beside q, k and v. Where these are small, looking through all that is not there takes longer than the kernels.
    unmasked = key_mask is None and query_mask is None and bias is None and not dropout
    constant = parameters is None and codebook is None and landmark_indices is None and precision == "full"
    if unmasked and constant and not enable_gqa and not isinstance(mechanism, HeadMechanisms) and _is_alone(q, k, v):
        return attend_eagerly(Options(Mechanism.of(mechanism), causal), q, k, v, ())
    return _attended(
        q,
        k,
        v,
        mechanism,
        causal=causal,
        key_mask=key_mask,
        query_mask=query_mask,
        bias=bias,
        parameters=parameters,
        codebook=codebook,
        landmark_indices=landmark_indices,
        dropout=dropout,
        dropout_kind=dropout_kind,
        seed=seed,
        enable_gqa=enable_gqa,
        precision=precision,
    )


def _is_alone(q: Tensor, k: Tensor | None, v: Tensor) -> bool:
    """Whether q, k and v are of one shape, and taken as they are."""
    if not _is_eager(q, k, v) or torch.is_autocast_enabled("cpu"):
        return False
    return k is not None and q.shape == k.shape and q.shape == v.shape


def attend_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mechanism: MechanismLike | HeadMechanisms = "softmax",
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    window: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    codebook: Tensor | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "weights",
    seed: int | None = None,
    enable_gqa: bool = False,
    precision: str = "full",
) -> Tensor:
    """`attend` of sequences of any lengths that lie end to end, without padding: each attends to itself alone.

    Args:
        q: ``[tokens, heads, channels]``, the tokens of all sequences; k and v likewise.
        cu_seqlens_q: Cumulative lengths, from 0 to the number of tokens, each larger than the one before; int32 or int64.
        cu_seqlens_k: The same of the keys, for cross-attention; by default the keys are the queries' tokens.
        key_mask: ``[tokens]``, true = keep; ``query_mask`` likewise.

    The others are those of `attend`. Sequence ``n`` draws its dropout by a seed of its own; gradients of parameters are of all sequences
    together. Tensors of single tokens (a bias of pairs, landmark indices, given landmarks) have no place here.
    """
    mechanism = mechanism if window is None else _within(mechanism, window)
    given = {"q": q, "v": v} if k is None else {"q": q, "k": k, "v": v}
    refuse_others(given)
    for name, x in given.items():
        if x.dim() != 3:
            remedy = "expected [tokens, heads, channels]"
            raise TensorError(f"tensor `{name}` has {x.dim()} axes; {remedy}", code="shape", tensor=name, remedy=remedy)
    q, k, v = q.transpose(0, 1), None if k is None else k.transpose(0, 1), v.transpose(0, 1)
    out = _attended(
        q,
        k,
        v,
        mechanism,
        causal=causal,
        key_mask=key_mask,
        query_mask=query_mask,
        parameters=parameters,
        codebook=codebook,
        dropout=dropout,
        dropout_kind=dropout_kind,
        seed=seed,
        enable_gqa=enable_gqa,
        precision=precision,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
    )
    return out.transpose(0, 1)


def _attended(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mechanism: MechanismLike | HeadMechanisms,
    *,
    causal: bool,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    parameters: Mapping[str, Tensor] | None,
    codebook: Tensor | None,
    dropout: float,
    dropout_kind: str,
    seed: int | None,
    enable_gqa: bool,
    precision: str,
    bias: Tensor | None = None,
    landmark_indices: Tensor | None = None,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    eager = _is_eager(q, k, v)
    constants = (key_mask, query_mask, codebook, landmark_indices, *cu_seqlens)
    if not eager or parameters or bias is not None or any(x is not None for x in constants):
        called = ("key_mask", "query_mask", "codebook", "landmark_indices", "cu_seqlens_q", "cu_seqlens_k")
        refuse_unreadable(q, k, v, {**dict(zip(called, constants)), "bias": bias, **(parameters or {})})
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), None if k is None else k.to(dtype), v.to(dtype)
    if not enable_gqa:
        if k is None or q.shape != k.shape or q.shape != v.shape:
            _refuse_fewer_heads(q, k, v)
    else:
        # The kernels read heads that are shared as one; where queries are keys, there are as many of these.
        whole = k is None or isinstance(mechanism, HeadMechanisms)
        k, v = None if k is None else _shared(k, q, "k", whole), _shared(v, q, "v", whole)
    if isinstance(mechanism, HeadMechanisms):
        _refuse_constants(parameters=parameters, codebook=codebook, landmark_indices=landmark_indices)
        others: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask, "dropout": dropout, "dropout_kind": dropout_kind}
        others |= {"precision": precision, "cu_seqlens": cu_seqlens}
        return _by_group(q, k, v, mechanism, bias, seed, causal=causal, **others)
    if bias is not None:
        mechanism, parameters = _with_bias(mechanism, bias, q, v, parameters)
    names, values = parameter_values(parameters)
    # Masks are small; a view of a larger one is common.
    masks = [None if mask is None else _whole(mask) for mask in (key_mask, query_mask)]
    fixed = [None if x is None else _whole(x.detach()) for x in (codebook, landmark_indices)]
    if eager and all(_is_plain(x) for x in values):
        drawn = (dropout_kind, dropout, _seed() if seed is None else number("seed", seed, 0)) if dropout else None
        sequences = sequences_of(*cu_seqlens)
        options = Options(
            Mechanism.of(mechanism), causal, masks[0], masks[1], names, fixed[0], fixed[1], drawn, precision, sequences
        )
        return attend_eagerly(options, q, k, v, values)
    seeds = _seeds(seed) if dropout else None
    rest = (masks[0], masks[1], fixed[0], fixed[1], _text(mechanism), causal, dropout_kind, dropout, seeds, precision, *cu_seqlens)
    traced: Tensor = attend_op(q, k, v, list(values), ",".join(names), *rest, __version__)[0]
    return traced


def attend_eagerly(options: Options, q: Tensor, k: Tensor | None, v: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The call without the dispatcher, recorded where gradients are."""
    recorded = q.requires_grad or v.requires_grad or k is not None and k.requires_grad
    if torch.is_grad_enabled() and (recorded or any(x.requires_grad for x in parameters)):
        result: Tensor = _Attend.apply(options, q, k, v, *parameters)
        return result
    return _kernels.forward(options, q, k, v, parameters, keep_state=False).out


def _by_group(
    q: Tensor, k: Tensor | None, v: Tensor, mechanisms: HeadMechanisms, bias: Tensor | None, seed: int | None, **options: Any
) -> Tensor:
    def call(n: int, q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None) -> Tensor:
        # One seed for all groups would leave out the same pairs of each group's first head.
        own = None if seed is None else (seed + n) % 2**63
        rest: dict[str, Any] = {"parameters": None, "codebook": None, "enable_gqa": False, **options}
        return _attended(q, k, v, mechanisms.groups[n].mechanism, bias=bias, seed=own, **rest)

    return by_group(mechanisms, q, k, v, bias, call)


def _refuse_constants(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            why = "every group of heads has its own; use resolvent.torch.Attention"
            raise UnsupportedError(
                f"`{name}` for heads with mechanisms of their own is not supported: {why}", code="unsupported", field=name, remedy=why
            )


def _with_bias(
    mechanism: MechanismLike, bias: Tensor, q: Tensor, v: Tensor, parameters: Mapping[str, Tensor] | None
) -> tuple[str, dict[str, Tensor]]:
    """The mechanism with a bias of the tensor's axes, and the tensor among its parameters."""
    if parameters and "bias" in parameters:
        raise TensorError(
            "tensor `bias` is given twice; pass it as `bias` or among the parameters",
            code="tensor",
            tensor="bias",
            remedy="pass it as `bias` or among the parameters",
        )
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, device=bias.device).masked_fill(~bias, -math.inf)
    whole = (*(1,) * (4 - q.dim()), *q.shape[:-1], v.shape[-2])
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)) if bias.dim() < 4 else bias
    if bias.dim() != 4 or any(n != 1 and n != full for n, full in zip(bias.shape, whole)):
        remedy = "every axis must be 1 or that of [batch, heads, queries, keys]"
        shape, full = list(bias.shape), list(whole)
        message = f"attend: bias {shape} does not fit the pairs {full}; {remedy}"
        raise TensorError(message, code="shape", tensor="bias", remedy=remedy)
    for axis, stride in enumerate(bias.stride()):
        if stride == 0 and bias.shape[axis] > 1:
            bias = bias.narrow(axis, 0, 1)
    return with_bias_of(_text(mechanism), bias.shape), {**(parameters or {}), "bias": bias.float().contiguous()}


class _Attend(torch.autograd.Function):
    """The call of eager mode: what the operator does, without the dispatcher's overhead."""

    @staticmethod
    def forward(ctx: Any, options: Options, q: Tensor, k: Tensor | None, v: Tensor, *parameters: Tensor) -> Tensor:
        done = _kernels.forward(options, q, k, v, parameters, keep_clusters=True)
        ctx.options, ctx.clusters = options, done.clusters
        constants = (options.key_mask, options.query_mask, options.codebook, options.landmark_indices)
        ctx.save_for_backward(q, k, v, done.out, done.state, *constants, *parameters)
        return done.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # With the constants comes the check that nobody has written to them since.
        q, k, v, out, state, key_mask, query_mask, codebook, indices, *parameters = ctx.saved_tensors
        constants = {"key_mask": key_mask, "query_mask": query_mask, "codebook": codebook, "landmark_indices": indices}
        options: Options = ctx.options._replace(**constants)
        if torch.is_grad_enabled():
            return _recorded(options, q, k, v, parameters, Forward(out, state, ctx.clusters), dout)
        saved, wanted = Forward(out, state, ctx.clusters), ctx.needs_input_grad[4:]
        dq, dk, dv, gradients = _kernels.backward(options, q, k, v, parameters, saved, dout, wanted)
        return (None, dq, dk, dv, *gradients)


def _recorded(
    options: Options, q: Tensor, k: Tensor | None, v: Tensor, parameters: Sequence[Tensor], saved: Forward, dout: Tensor
) -> tuple[Any, ...]:
    """The gradients as a node of the graph, which refuses to be differentiated."""
    return (None, *_Gradients.apply(options, saved, len(parameters), k is not None, dout, q, k, v, *parameters))


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, saved: Forward, count: int, has_k: bool, *tensors: Any) -> tuple[Any, ...]:
        dout, q, k, v, *parameters = tensors
        dq, dk, dv, gradients = _kernels.backward(options, q, k, v, parameters, saved, dout, [True] * count)
        return (dq, dk, dv, *gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise double_backward_refused()


def _is_eager(q: Tensor, k: Tensor | None, v: Tensor) -> bool:
    """Whether nothing traces, compiles or transforms the call, so that the dispatcher need not see it."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0 or torch._C._is_tracing():
        return False
    return _is_plain(q) and _is_plain(v) and (k is None or _is_plain(k))


def _is_plain(x: Tensor) -> bool:
    """Whether it is a tensor in the CPU's memory, of no other class, that looks like what it is."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu


def _text(mechanism: MechanismLike) -> str:
    """The mechanism as the operator takes it. Compilers trace this, and cannot follow what reads a configuration."""
    if isinstance(mechanism, str):
        return mechanism
    return mechanism._json if isinstance(mechanism, Mechanism) else Mechanism.of(mechanism).to_json()


def _within(mechanism: MechanismLike | HeadMechanisms, window: int) -> str | HeadMechanisms:
    """The mechanism with a window; of heads with mechanisms of their own every one."""
    if isinstance(mechanism, HeadMechanisms):
        return HeadMechanisms((group.heads, group.mechanism.with_window(window)) for group in mechanism.groups)
    text: str = _within_text(_text(mechanism), window)
    return text


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call, untyped-decorator, unused-ignore]
def _within_text(text: str, window: int) -> str:
    """As text, which compilers keep as it is: they cannot follow what reads a configuration."""
    return with_window_of(text, window)


def parameter_values(parameters: Mapping[str, Tensor] | None) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and values of a mechanism's parameters, as the kernels read them."""
    if not parameters:
        return (), ()
    refuse_others(parameters)
    # The kernels read them in float32, whatever the tokens are stored in.
    return tuple(parameters), tuple(_whole(values.to(torch.float32)) for values in parameters.values())


def _whole(x: Tensor) -> Tensor:
    """The numbers as they are read: in one piece, and with their own signs."""
    return x.resolve_neg().contiguous()


def _refuse_fewer_heads(q: Tensor, k: Tensor | None, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x is not None and q.dim() > 2 and x.dim() == q.dim() and x.shape[-3] != q.shape[-3]:
            remedy = "pass as many, or enable_gqa=True"
            message = f"tensor `{name}` has {x.shape[-3]} heads beside {q.shape[-3]} of q; {remedy}"
            raise TensorError(message, code="shape", tensor=name, remedy=remedy)


def _shared(x: Tensor, q: Tensor, name: str, repeated: bool) -> Tensor:
    if q.dim() < 3 or x.dim() != q.dim() or x.shape[-3] == q.shape[-3]:
        return x
    heads, own = q.shape[-3], x.shape[-3]
    if own == 0 or heads % own:
        remedy = "the heads of q must be a multiple of them"
        raise TensorError(f"tensor `{name}` has {own} heads beside {heads} of q; {remedy}", code="shape", tensor=name, remedy=remedy)
    return x.repeat_interleave(heads // own, -3) if repeated else x


def _seeds(seed: int | None) -> Tensor:
    if seed is not None:
        return torch.tensor([seed], dtype=torch.int64)
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")


def _seed() -> int:
    return int(_seeds(None))
