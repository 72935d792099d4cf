"""``scaled_dot_product_attention`` on CPU tensors answered by this package's softmax.

PyTorch computes it on a CPU by one operator and its backward pass. Both are replaced at the dispatcher, which models and
compiled graphs go through alike, and what is not done here is handed on to the kernels that were there before.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import Error, UnsupportedError
from ..mechanism import Mechanism
from . import _kernels
from ._kernels import Forward, Options

__all__ = ["Report", "accelerate"]

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
#: Additive masks hide by minus infinity or by the most negative number of a type.
_HIDDEN = -1e9


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

    Taken are float32 calls without dropout and without a mask, causal ones of as many queries as keys, and ones whose mask
    hides whole keys (padding). Everything else goes to PyTorch's kernel unchanged.
    """
    return _Acceleration(report)


class _Takeover:
    """The operators' replacements, installed while a report wants them."""

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
            if not cls.reports and cls.library is not None:
                cls.library._destroy()  # type: ignore[no-untyped-call]
                cls.library = None

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
    def count(cls, reason: str | None) -> None:
        for report in cls.reports:
            if reason is None:
                report.taken += 1
            else:
                report.handed_on[reason] += 1


_SOFTMAX: dict[float | None, Mechanism] = {}


def _softmax(scale: float | None) -> Mechanism:
    """Models have few scales: one per width of their heads."""
    if scale not in _SOFTMAX:
        if len(_SOFTMAX) >= 64:
            _SOFTMAX.clear()
        _SOFTMAX[scale] = Mechanism("softmax", scale=scale)
    return _SOFTMAX[scale]


def _options(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, mask: Tensor | None, scale: float | None
) -> Options | str:
    """The call as one of ours, or the reason why it is none."""
    if q.dtype != torch.float32:
        return f"dtype {str(q.dtype).removeprefix('torch.')}"
    if dropout != 0.0:
        return "dropout"
    if causal and q.shape[2] != k.shape[2]:
        return "causal with queries that are not as many as the keys"
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "empty tensors"
    if k.shape[1] != q.shape[1] or v.shape[1] != q.shape[1]:
        return "fewer heads of keys than of queries"
    keep = None if mask is None else _key_mask(mask, q.shape[0], k.shape[2])
    if isinstance(keep, str):
        return keep
    try:
        mechanism = _softmax(scale)
    except Error:
        return "scale out of range"
    return Options(mechanism, causal, keep)


def _key_mask(mask: Tensor, batch: int, keys: int) -> Tensor | str:
    """Which keys an additive mask ``[batch, heads, queries, keys]`` keeps, where these are the same for all queries and heads."""
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.dim() != 4:
        return "attn_mask of another rank"
    for axis, what in ((1, "heads"), (2, "queries")):
        if mask.shape[axis] > 1 and mask.stride(axis) != 0:
            first = mask.narrow(axis, 0, 1)
            # The last differs from the first in causal masks: most are told apart at the cost of one row.
            last = mask.narrow(axis, mask.shape[axis] - 1, 1)
            if not torch.equal(first, last) or not bool((mask == first).all()):
                return f"attn_mask that differs between {what}"
    row = mask[:, 0, 0, :]
    keep = row if row.dtype == torch.bool else row == 0
    if row.dtype != torch.bool and not bool((keep | (row <= _HIDDEN)).all()):
        return "attn_mask that weighs keys"
    if not bool(keep.any(-1).all()):
        return "attn_mask that hides all keys"
    return keep.expand(batch, keys).contiguous()


def _as(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the layout that PyTorch's kernel gives it, which compiled graphs count on."""
    expected = torch.empty_like(like)
    return x if expected.stride() == x.stride() else expected.copy_(x)


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
    options = _options(q, k, v, dropout_p, is_causal, attn_mask, scale)
    if not isinstance(options, str):
        try:
            done = _kernels.forward(options, q, k, v, ())
        except Error as error:
            options = f"{error.code} of {error.tensor}"
        else:
            _Takeover.count(None)
            rows = q.shape[:3]
            assert done.state is not None  # kept by default
            sums = done.state[: rows.numel()].view(rows)
            return _as(done.out, q), sums.transpose(1, 2).contiguous().transpose(1, 2)
    _Takeover.count(options)
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
    options = _options(q, k, v, dropout_p, is_causal, attn_mask, scale)
    if not isinstance(options, str):
        # What rounding has left out of the sums is not carried through PyTorch's operator.
        state = torch.zeros(2 * logsumexp.numel())
        state[: logsumexp.numel()].view(logsumexp.shape).copy_(logsumexp)
        try:
            saved = Forward(out.contiguous(), state, None)
            gradients = _kernels.backward(options, q, k, v, (), saved, dout, ())[:3]
        except Error as error:
            options = f"{error.code} of {error.tensor}"
        else:
            _Takeover.count(None)
            dq, dk, dv = (_permuted(x) for x in gradients if x is not None)
            return dq, dk, dv
    _Takeover.count(options)
    result: tuple[Tensor, Tensor, Tensor] = _Takeover.originals[_BACKWARD].call_boxed(
        keys, dout, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return result


def _permuted(x: Tensor) -> Tensor:
    """In the layout of gradients of PyTorch's kernel: heads within tokens."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _activate() -> _Acceleration:
    """What ``torch.nn.attention.activate_flash_attention_impl("resolvent")`` calls."""
    return accelerate()


if hasattr(torch.nn, "attention") and hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl("resolvent", register_fn=_activate)
