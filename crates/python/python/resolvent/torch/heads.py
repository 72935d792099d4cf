"""Heads with mechanisms of their own: which tokens' heads each call gets, and the outputs in their order."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import Tensor

from ..errors import TensorError
from ..fits import HeadMechanisms

__all__ = ["by_group", "of_heads"]


def of_heads(x: Tensor, heads: Sequence[int], total: int, axis: int = -3) -> Tensor:
    """What the heads of q that are named, in ascending order, of `total`, have of a tensor. A head that several share is there as often as
    they use it; what has one entry for all heads stays as it is."""
    own = x.shape[axis]
    if own == 1 or len(heads) == total:
        return x
    if own == 0 or total % own:
        remedy = "the heads of q must be a multiple of them"
        raise TensorError(f"a tensor has {own} heads beside {total} of q; {remedy}", code="shape", remedy=remedy)
    return x.index_select(axis, torch.tensor([head * own // total for head in heads], device=x.device))


def by_group(
    mechanisms: HeadMechanisms,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    call: Callable[[int, Tensor, Tensor | None, Tensor, Tensor | None], Tensor],
    *,
    shared: bool = False,
    whole: bool = False,
    axis: int = -3,
) -> Tensor:
    """The outputs of all heads, in their order. `call` computes a group by its number, of its heads of q, k, v and bias; tied groups get no
    k. The heads of the output are at `axis`, the third of its axes or the second but last; those of k and v may be `shared`. All groups get
    all heads of k and v if `whole`."""
    total = q.shape[-3] if q.dim() >= 3 else 1
    if total != mechanisms.heads:
        raise _other_heads("q", f"{total} heads beside {mechanisms.heads} with mechanisms", "pass as many heads as have mechanisms")
    for name, x in (("k", k), ("v", v)):
        if not shared and x is not None and x.dim() == q.dim() and x.shape[-3] != total:
            raise _other_heads(name, f"{x.shape[-3]} heads beside {total} of q", "pass as many, or enable_gqa where a call has it")
    made = []
    for n, (heads, mechanism) in enumerate((group.heads, group.mechanism) for group in mechanisms.groups):
        own_k = None if k is None or mechanism.tied and not mechanisms.tied else k if whole else of_heads(k, heads, total)
        own_bias = bias if bias is None or bias.dim() < 3 else of_heads(bias, heads, total)
        made.append(call(n, of_heads(q, heads, total), own_k, v if whole else of_heads(v, heads, total), own_bias))
    if len(made) == 1:
        return made[0]
    # Some mechanisms have one row for all tokens.
    tokens = -5 - axis
    rows = max(out.shape[tokens] for out in made)
    made = [out if out.shape[tokens] == rows else out.repeat_interleave(rows, tokens) for out in made]
    return torch.cat(made, axis).index_select(axis, torch.tensor(mechanisms.order, device=q.device))


def _other_heads(name: str, what: str, remedy: str) -> TensorError:
    return TensorError(f"tensor `{name}` has {what}; {remedy}", code="shape", tensor=name, remedy=remedy)
