"""The inverse of the matrix between landmarks ``[..., landmarks, landmarks]`` in float64, with the gradients that mechanisms define."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collectives import refuse_second_derivatives

__all__ = ["inverse", "pseudo_inverse"]


class _Implicit(torch.autograd.Function):
    """Steps whose result is differentiated as the inverse itself: ``dA = -Y^T dY Y^T``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        (y,) = ctx.saved_tensors
        return -(y.mT @ dy @ y.mT), None


def inverse(a: Tensor, method: str, ridge: float, steps: int, start: str | None, implicit: bool) -> Tensor:
    """``(a + ridge I)^-1``, exactly or by so many steps of Newton and Schulz."""
    m = a + ridge * torch.eye(a.shape[-1], dtype=a.dtype)
    if method != "newton-schulz":
        exact: Tensor = torch.linalg.inv(m)
        return exact
    found = _newton_schulz(a.detach(), m.detach() if implicit else m, steps, start)
    result: Tensor = _Implicit.apply(a, found) if implicit else found
    return result


def _norm(a: Tensor) -> Tensor:
    """The largest absolute sum of a column."""
    return a.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)


def _newton_schulz(a: Tensor, m: Tensor, steps: int, start: str | None) -> Tensor:
    norm = _norm(m.detach())
    if start is None or start == "identity":
        x = (1.0 if start is None else 1.8) / norm * torch.eye(m.shape[-1], dtype=m.dtype)
    else:
        x = {"scaled": 1.8 / norm**2, "paper": 2.0 / norm**2, "official": 1.8 / _norm(a) ** 2}[start] * m
    for _ in range(steps):
        x = 2.0 * x - x @ m @ x
    return x


def pseudo_inverse(a: Tensor, steps: int) -> Tensor:
    """By so many steps from ``1.8 a^T / (|a|_1 |a|_inf)``, differentiated step by step."""
    norms = _norm(a) * _norm(a.mT)
    z = 1.8 / torch.where(norms == 0, 1.0, norms) * a.mT
    for _ in range(steps):
        next_ = 2.0 * z - z @ a @ z
        # Further steps would double what rounding leaves in the null space.
        moved = (next_ - z).detach().abs().amax((-2, -1), keepdim=True)
        still = moved <= 1e-13 * z.detach().abs().amax((-2, -1), keepdim=True)
        z = torch.where(still, z, next_)
        if bool(still.all()):
            break
    return z
