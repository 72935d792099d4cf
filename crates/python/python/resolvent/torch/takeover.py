"""``scaled_dot_product_attention`` on CPU tensors answered by this package's softmax.

PyTorch computes it on a CPU by one operator and its backward pass. Both are replaced at the dispatcher, which models and
compiled graphs go through alike, and what is not done here is handed on to the kernels that were there before.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from types import TracebackType
from typing import Any, Callable, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import Error, UnsupportedError
from ..mechanism import Mechanism
from . import _kernels, masks
from ._kernels import Forward, Options

__all__ = ["Report", "accelerate"]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclasses.dataclass
class Report:
    """Calls since `accelerate`, forward and backward passes counted by themselves."""

    taken: int = 0
    handed_on: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """By the reason why PyTorch's kernel has answered."""

    def __str__(self) -> str:
        lines = [f"resolvent: {self.taken} calls taken, {sum(self.handed_on.values())} handed on"]
        lines += [f"  {count} {reason}" for reason, count in self.handed_on.most_common()]
        return "\n".join(lines)


class _Acceleration:
    """A takeover that is on, until `off`."""

    def __init__(self, show: bool) -> None:
        self.report = Report()
        self._show, self._on = show, True
        _Takeover.add(self.report)

    def off(self) -> None:
        """Gives ``scaled_dot_product_attention`` back, unless another takeover is on. May be called more than once."""
        if self._on:
            self._on = False
            _Takeover.drop(self.report)
            if self._show:
                print(self.report)

    #: What ``torch.nn.attention.restore_flash_attention_impl`` calls.
    remove = off

    def __enter__(self) -> _Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.off()


def accelerate(*, report: bool = False) -> _Acceleration:
    """Answers ``torch.nn.functional.scaled_dot_product_attention`` on CPU tensors, in inference and in training.

    On at once; off again with ``off()``, or at the end of a ``with`` statement. ``.report`` counts calls taken and handed on,
    with reasons; ``report=True`` prints it when the takeover ends.

    Taken are float32 calls without dropout and without a mask, causal ones of as many queries as keys, by ``is_causal`` or by a mask that
    says the same, and ones whose mask hides whole keys (padding), causal or not. Everything else goes to PyTorch's kernel unchanged,
    masks that differ between queries in another way among it: there it is faster. What PyTorch computes without its operator never
    comes here and is not counted: dropout, masks that require gradients, tensors of two axes, values of another width than the keys.

    Scores that are NaN are left out here, as if their keys were masked, where PyTorch makes NaN of the row: look for NaN in queries and
    keys themselves. Other threads may attend while this is turned on and off: what hands calls on stays, at 4 microseconds a call.
    """
    return _Acceleration(report)


class _Takeover:
    """The operators' replacements. Once installed they stay, and hand everything on while no report wants them: another thread may be in
    them when the last one leaves, and PyTorch frees what it is taken away.
    """

    lock = threading.Lock()
    reports: list[Report] = []
    library: torch.library.Library | None = None
    originals: dict[str, Any] = {}

    @classmethod
    def add(cls, report: Report) -> None:
        with cls.lock:
            if cls.library is None:
                cls.install()
            cls.reports = [*cls.reports, report]

    @classmethod
    def drop(cls, report: Report) -> None:
        with cls.lock:
            cls.reports = [other for other in cls.reports if other is not report]

    @classmethod
    def install(cls) -> None:
        if not hasattr(torch.library, "get_kernel"):
            remedy = "update PyTorch to 2.9 or newer"
            raise UnsupportedError(
                f"this version of PyTorch does not give out the kernels that calls are handed on to; {remedy}",
                code="unsupported",
                field="torch",
                remedy=remedy,
            )
        cls.originals = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in (_FORWARD, _BACKWARD)}
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl(_FORWARD, _forward, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
        library.impl(_BACKWARD, _backward, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
        cls.library = library

    @classmethod
    def is_on(cls) -> bool:
        return bool(cls.reports)

    @classmethod
    def count(cls, reason: str | None) -> None:
        for report in cls.reports:
            if reason is None:
                report.taken += 1
            else:
                report.handed_on[reason] += 1


# Models have few scales: one per width of their heads.
@functools.lru_cache(maxsize=64)
def _softmax(scale: float | None) -> Mechanism:
    return Mechanism("softmax", scale=scale)


class _Call(NamedTuple):
    """A call as one of ours."""

    options: Options
    kind: masks.Kind | None
    """What its mask is."""


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    kind: masks.Kind | None = None,
) -> _Call | str:
    """The call as one of ours, or the reason why it is none. `kind` is that of its mask, where it is known."""
    if q.dtype != torch.float32:
        return f"dtype {str(q.dtype).removeprefix('torch.')}"
    if dropout != 0.0:
        return "dropout"
    if causal and q.shape[2] != k.shape[2]:
        return "causal with queries that are not as many as the keys"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "empty tensors"
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        return "heads of keys that do not divide those of queries"
    keep = None
    if mask is not None:
        read = masks.read(mask, q.shape[0], q.shape[2], k.shape[2], kind)
        if isinstance(read, str):
            return read
        kind, found = read
        causal, keep = causal or found.causal, found.keep
    try:
        return _Call(Options(_softmax(scale), causal, keep), kind)
    except Error:
        return "scale out of range"


_Result = TypeVar("_Result")


def _answered(call: _Call | str, compute: Callable[[_Call], _Result]) -> _Result | str:
    """The result of a call that is one of ours, or why it is none."""
    if isinstance(call, str):
        return call
    try:
        return compute(call)
    except Error as error:
        return f"{error.code} of {error.tensor}"


def _as(x: Tensor, expected: Tensor) -> Tensor:
    """`x` in the layout that PyTorch's kernel gives it, which compiled graphs count on."""
    return x if expected.stride() == x.stride() else expected.copy_(x)


_MARK = torch.frombuffer(bytearray(b"resolvent: rests"), dtype=torch.int32)
"""Stands behind the rests of sums that PyTorch carries; see `_sums`."""


def _sums(state: Tensor, shape: torch.Size) -> Tensor:
    """The rows' log-sum-exps in PyTorch's layout, ``[batch, heads, rows]`` by row. Behind them, where nobody looks, lies what f32 leaves
    off each: where one key outweighs all others, gradients are as far off as the sums are."""
    batch, heads, rows = shape
    count = shape.numel()
    whole = torch.empty(2 * count + len(_MARK))
    whole[: 2 * count].view(2, batch, rows, heads).copy_(state[: 2 * count].view(2, batch, heads, rows).transpose(2, 3))
    whole[2 * count :].view(torch.int32).copy_(_MARK)
    return whole[:count].view(batch, rows, heads).transpose(1, 2)


def _state(logsumexp: Tensor) -> Tensor:
    """What `_sums` was made of; rests are zero where the sums are another's, or were copied on the way."""
    count = logsumexp.numel()
    state = torch.zeros(2 * count)
    state[:count].view(logsumexp.shape).copy_(logsumexp)
    length = 2 * count + len(_MARK)
    if logsumexp.untyped_storage().nbytes() == 4 * length and logsumexp.storage_offset() == 0:
        if torch.equal(logsumexp.as_strided((len(_MARK),), (1,), 2 * count).view(torch.int32), _MARK):
            rests = logsumexp.as_strided(logsumexp.shape, logsumexp.stride(), count)
            state[count:].view(logsumexp.shape).copy_(rests)
    return state


def _forward(
    keys: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    def compute(call: _Call) -> tuple[Tensor, Tensor]:
        expected = torch.empty_like(q)
        out = expected if expected.stride(-1) == 1 else None
        done = _kernels.forward(call.options, q, k, v, (), out=out)
        if attn_mask is not None and call.kind is not None:
            masks.remember(attn_mask, call.kind)
        assert done.state is not None  # kept by default
        sums = _sums(done.state, q.shape[:3])
        if call.options.key_mask is not None:
            # PyTorch's sum of a row without keys.
            sums.masked_fill_(sums == -math.inf, 0.0)
        return _as(done.out, expected), sums

    if _Takeover.is_on():
        answer = _answered(_call(q, k, v, dropout_p, is_causal, attn_mask, scale), compute)
        if not isinstance(answer, str):
            _Takeover.count(None)
            return answer
        _Takeover.count(answer)
    result: tuple[Tensor, Tensor] = _Takeover.originals[_FORWARD].call_boxed(
        keys, q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return result


def _backward(
    keys: Any,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    def compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
        saved = Forward(_kernels.in_rows(out, "out"), _state(logsumexp), None)
        # As gradients of PyTorch's kernel lie.
        dq, dk, dv, _ = _kernels.backward(call.options, q, k, v, (), saved, dout, (), within_tokens=True)
        assert dk is not None
        return dq, dk, dv

    if _Takeover.is_on():
        known = None if attn_mask is None else masks.recall(attn_mask)
        answer = _answered(_call(q, k, v, dropout_p, is_causal, attn_mask, scale, known), compute)
        if not isinstance(answer, str):
            _Takeover.count(None)
            return answer
        _Takeover.count(answer)
    result: tuple[Tensor, Tensor, Tensor] = _Takeover.originals[_BACKWARD].call_boxed(
        keys, dout, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return result


def _activate() -> _Acceleration:
    """What ``torch.nn.attention.activate_flash_attention_impl("resolvent")`` calls."""
    return accelerate()


if hasattr(torch.nn, "attention") and hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl("resolvent", register_fn=_activate)
