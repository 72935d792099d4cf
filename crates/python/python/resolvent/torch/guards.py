"""What calls of tensors refuse before anything reads them, as it would be read wrongly."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import DeviceError, DTypeError, UnsupportedError

__all__ = ["refuse_others", "refuse_unreadable"]


def refuse_unreadable(q: Tensor, k: Tensor | None, v: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Refuses what is no tensor, tensors elsewhere than in the CPU's memory (all of them may be meta tensors, which have shapes alone),
    tensors with tangents, and tracing."""
    refuse_others({"q": q, "v": v})
    given = {name: x for name, x in {"q": q, "k": k, "v": v, **others}.items() if x is not None}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if not isinstance(given.get(name), Tensor):
            given.pop(name, None)  # any sequence of integers
    refuse_others(given)
    if not all(x.is_meta for x in given.values()):
        for name, x in given.items():
            if x.device.type != "cpu":
                remedy = "move it there first"
                message = f"tensor `{name}` is on {x.device}, and not in the CPU's memory; {remedy}"
                raise DeviceError(message, code="device", tensor=name, remedy=remedy)
    _refuse_forward_mode(given.values())
    if torch._C._is_tracing():
        # It sees the memory of the result, and not who writes to it.
        remedy = "use torch.export or torch.compile, which know the operator"
        raise UnsupportedError(f"torch.jit.trace is not supported; {remedy}", code="unsupported", field="torch.jit.trace", remedy=remedy)


def refuse_others(named: Mapping[str, Any]) -> None:
    """Refuses what is no tensor."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            remedy = "pass a torch.Tensor"
            raise DTypeError(f"tensor `{name}` is {type(x).__name__}; {remedy}", code="type", tensor=name, remedy=remedy)


def _refuse_forward_mode(tensors: Iterable[Tensor]) -> None:
    """Refuses tensors with tangents, as `torch.func.jvp` and `torch.autograd.forward_ad` make them: they would be lost."""
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in tensors):
        remedy = "take gradients by backward() or torch.autograd.grad, or use a mechanism of PyTorch operations"
        raise UnsupportedError(
            f"resolvent.torch has no derivatives in forward mode (jvp, jacfwd, linearize); {remedy}",
            code="forward-mode",
            field="jvp",
            remedy=remedy,
        )
