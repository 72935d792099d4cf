"""Pairs of tokens of different shards: blocks of keys and values pass all processes, and what each block leaves is merged.

"Ring Attention with Blockwise Transformers for Near-Infinite Context": a process holds two blocks at a time, the one that it computes
with and the one that is coming. In a causal call a block goes on to later processes alone. The backward pass sends blocks round again,
and the gradients of a block straight back to where it is from, in a fixed order.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from .. import _kernels
from .._kernels import Forward, Options
from .collectives import Shards, Shift, refuse_second_derivatives

__all__ = ["Part", "Rows", "ring"]


class Part(NamedTuple):
    """What is computed of every block."""

    options: Options
    parameters: tuple[Tensor, ...]
    counts: bool = False
    """Whether the values are ones, so that a row is the sum of its affinities."""
    means: bool = False
    """Whether rows are means, to be merged by the logarithms of their sums, and not sums."""


class _Block(NamedTuple):
    """Keys and values of one shard, and which of them are kept."""

    source: int
    k: Tensor
    v: Tensor
    keep: Tensor

    def forward(self, part: Part, shards: Shards, q: Tensor) -> Forward:
        return _kernels.forward(self._options(part, shards), q, self.k.float(), self._values(part), part.parameters)

    def backward(self, part: Part, shards: Shards, q: Tensor, saved: Forward, dout: Tensor) -> tuple[Any, ...]:
        options, wanted = self._options(part, shards), [True] * len(part.parameters)
        return _kernels.backward(options, q, self.k.float(), self._values(part), part.parameters, saved, dout, wanted)

    def _options(self, part: Part, shards: Shards) -> Options:
        # Blocks before its own a process sees in whole.
        causal = part.options.causal and self.source == shards.rank
        return part.options._replace(causal=causal, key_mask=self.keep)

    def _values(self, part: Part) -> Tensor:
        return torch.ones((*self.k.shape[:-1], 1)) if part.counts else self.v.float()


def _passing(own: _Block, shards: Shards, causal: bool) -> Iterator[_Block | None]:
    """The blocks in the order in which they come by, one per step; ``None`` where a causal call has no more for this process. The next is
    on its way while one is computed with."""
    rank, size, block = shards.rank, shards.size, own
    for step in range(size):
        here = not causal or rank >= step
        further = step + 1 < size and here and (not causal or rank + 1 < size)
        more = step + 1 < size and (not causal or rank > step)
        source = (rank - step - 1) % size
        sent = [block.k, block.v, block.keep.to(torch.uint8)]
        found = [_buffer(x, axis, shards.lengths[source]) for x, axis in zip(sent, (-2, -2, -1))] if more else []
        moving = Shift(sent, (rank + 1) % size if further else None, found, (rank - 1) % size if more else None, shards)
        yield block if here else None
        moving.wait()
        if more:
            block = _Block(source, found[0], found[1], found[2].to(torch.bool))


def _buffer(x: Tensor, axis: int, tokens: int) -> Tensor:
    """Memory for the same tensor of a shard with so many tokens."""
    shape = list(x.shape)
    shape[axis] = tokens
    return x.new_empty(shape)


class Rows:
    """What all blocks so far have left of a part: sums, or means with the logarithms of what they were divided by."""

    def __init__(self, means: bool) -> None:
        self.means = means
        self.out = self.state = self.logs = torch.empty(0)

    def add(self, done: Forward) -> None:
        assert done.state is not None  # kept by default
        first = self.out.numel() == 0
        if not self.means:
            self.out, self.state = (done.out if first else self.out + done.out), done.state
            return
        logs = self._logs(done.state, done.out)
        if first:
            self.out, self.logs, self.state = done.out, logs, done.state
            return
        both = torch.logaddexp(self.logs, logs)
        mine, theirs = (torch.where(both == -torch.inf, 0.0, (x - both).exp()).float()[..., None] for x in (self.logs, logs))
        self.out, self.logs = self.out * mine + done.out * theirs, both

    @staticmethod
    def _logs(state: Tensor, out: Tensor) -> Tensor:
        """The logarithms, which are saved in two parts."""
        rows = out.numel() // out.shape[-1]
        logs, rests = state[:rows].double(), state[rows : 2 * rows].double()
        return torch.where(logs == -torch.inf, logs, logs + rests).reshape(out.shape[:-1])

    def result(self) -> Forward:
        """As one call over all blocks would have left it."""
        if not self.means:
            return Forward(self.out, self.state, None)
        rows, state, logs = self.logs.numel(), self.state.clone(), self.logs.flatten()
        state[:rows] = logs.float()
        state[rows : 2 * rows] = torch.where(logs == -torch.inf, 0.0, logs - logs.float().double()).float()
        return Forward(self.out, state, None)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Part], shards: Shards, keep: Tensor, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        queries, rows = q.float().contiguous(), [Rows(part.means) for part in parts]
        for block in _passing(_Block(shards.rank, k.contiguous(), v.contiguous(), keep), shards, parts[0].options.causal):
            for part, into in zip(parts, rows if block is not None else []):
                into.add(block.forward(part, shards, queries))  # type: ignore[union-attr]
        results = [into.result() for into in rows]
        ctx.parts, ctx.shards = parts, shards
        ctx.save_for_backward(keep, q, k, v, *(x.out for x in results), *(x.state for x in results))
        return tuple(x.out for x in results)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        parts, shards = ctx.parts, ctx.shards
        keep, q, k, v, *saved = ctx.saved_tensors
        queries, count = q.float().contiguous(), len(parts)
        rows = [Forward(out, state, None) for out, state in zip(saved[:count], saved[count:])]
        causal, rank, size = parts[0].options.causal, shards.rank, shards.size
        dq, home = torch.zeros_like(queries), [torch.zeros(x.shape) for x in (k, v)]
        of_parameters = [torch.zeros_like(p) for part in parts for p in part.parameters]
        for step, block in enumerate(_passing(_Block(rank, k.contiguous(), v.contiguous(), keep), shards, causal)):
            sent = [] if block is None else [torch.zeros(x.shape) for x in (block.k, block.v)]
            at = 0
            for part, done, dout in zip(parts, rows, douts):
                if block is not None:
                    of_q, of_k, of_v, more = block.backward(part, shards, queries, done, dout)
                    dq += of_q
                    sent[0] += of_k
                    if not part.counts:
                        sent[1] += of_v
                    for n, x in enumerate(more):
                        of_parameters[at + n] += x
                at += len(part.parameters)
            back = (rank + step) % size if step and (not causal or rank + step < size) else None
            found = sent if step == 0 else [torch.empty(x.shape) for x in home] if back is not None else []
            if step:
                to = None if block is None else block.source
                found = Shift(sent, to, found, back, shards).wait()
            for into, x in zip(home, found):
                into += x
        return (None, None, None, dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), *of_parameters)


def ring(parts: Sequence[Part], shards: Shards, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> list[Tensor]:
    """Rows ``[batch, heads, tokens, ...]`` of float32 for every part, over the keys of all shards."""
    if keep is None:
        keep = torch.ones((q.shape[0], k.shape[-2]), dtype=torch.bool)
    parameters = [p for part in parts for p in part.parameters]
    results: tuple[Tensor, ...] = _Ring.apply(tuple(parts), shards, keep.to(torch.bool).contiguous(), q, k, v, *parameters)
    return list(results)
