"""What the shards of a sequence tell each other: sums, prefix sums and blocks, differentiable, with the bytes counted.

Every process differentiates the sum of all processes' losses: what one of them has received sends its gradient back to where it came
from. So each collective of a forward pass has one in the backward pass, in the opposite order, and all processes have to run both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigurationError, TensorError
from ..operators import double_backward_refused

__all__ = ["Shards", "Shift", "Traffic", "gather", "largest", "prefix_sum", "reduced", "refuse_second_derivatives", "total", "traffic"]


@dataclasses.dataclass
class Traffic:
    """Bytes that this process has sent, by what they were: ``sums``, ``prefixes``, ``blocks`` and ``lengths``.

    Blocks and prefixes are counted message by message. A sum of ``n`` bytes over ``p`` processes counts as ``2 n (p - 1) / p``, which
    is what each process sends of a ring of reduce-scatter and all-gather.
    """

    sums: int = 0
    prefixes: int = 0
    blocks: int = 0
    lengths: int = 0
    messages: int = 0
    """Rounds of messages that this process has taken part in."""

    @property
    def bytes(self) -> int:
        """All bytes that were sent."""
        return self.sums + self.prefixes + self.blocks + self.lengths

    def add(self, kind: str, sent: int, rounds: int) -> None:
        """Counts bytes of a kind."""
        setattr(self, kind, getattr(self, kind) + sent)
        self.messages += rounds


#: Kept for the whole process: backward passes run on threads of PyTorch's own.
_OPEN: list[Traffic] = []


@contextlib.contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what this process sends within the ``with``, forward and backward."""
    counted = Traffic()
    _OPEN.append(counted)
    try:
        yield counted
    finally:
        _OPEN.remove(counted)


def _count(kind: str, sent: int, rounds: int = 1) -> None:
    for counted in _OPEN:
        counted.add(kind, sent, rounds)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Who has which part of a sequence: process ``n`` of the group has ``lengths[n]`` tokens, after those of the ones before it."""

    group: Any
    rank: int
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, tokens: int, group: Any = None, lengths: Sequence[int] | None = None) -> Shards:
        """Those of a group, each of which calls this with its number of tokens. ``lengths``, where they are known, spare a message."""
        if not dist.is_available() or not dist.is_initialized():
            remedy = "call torch.distributed.init_process_group"
            raise ConfigurationError(f"there is no process group; {remedy}", code="argument", field="group", remedy=remedy)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            remedy = "call it in the processes of the group alone"
            raise ConfigurationError(f"this process is not in the group; {remedy}", code="argument", field="group", remedy=remedy)
        if lengths is None:
            own = torch.tensor([tokens], dtype=torch.int64)
            found = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(found, own, group=group)
            _count("lengths", 8 * (size - 1))
            lengths = [int(n) for n in found]
        shards = cls(group, rank, tuple(int(n) for n in lengths))
        if len(shards.lengths) != size or shards.lengths[rank] != tokens:
            remedy = "give the tokens of every process of the group, in their order"
            message = f"argument `lengths` is {list(shards.lengths)} beside {size} processes and {tokens} tokens here; {remedy}"
            raise ConfigurationError(message, code="argument", field="lengths", remedy=remedy)
        if min(shards.lengths) == 0:
            remedy = "give every process at least one"
            message = f"process {shards.lengths.index(0)} has no tokens; {remedy}"
            raise TensorError(message, code="shape", tensor="q", remedy=remedy)
        return shards

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.lengths)

    @property
    def offset(self) -> int:
        """Tokens before this shard."""
        return sum(self.lengths[: self.rank])

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    def peer(self, rank: int) -> int:
        """The number by which PyTorch knows a process of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def refuse_second_derivatives() -> None:
    """Refuses a backward pass that is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise double_backward_refused()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _sent(x: Tensor, to: int, shards: Shards, kind: str) -> Any:
    _count(kind, _bytes(x))
    return dist.isend(x, shards.peer(to), group=shards.group)


def _received(x: Tensor, of: int, shards: Shards) -> Any:
    return dist.irecv(x, shards.peer(of), group=shards.group)


def reduced(x: Tensor, shards: Shards) -> Tensor:
    """The sum over all processes, without gradients."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=shards.group)
    _count("sums", 2 * _bytes(x) * (shards.size - 1) // shards.size, 2 * (shards.size - 1))
    return x


def largest(x: Tensor, shards: Shards) -> Tensor:
    """The largest of all processes, without gradients."""
    x = x.detach().contiguous().clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=shards.group)
    _count("sums", 2 * _bytes(x) * (shards.size - 1) // shards.size, 2 * (shards.size - 1))
    return x


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return reduced(x, shards)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        return reduced(dout, ctx.shards), None


def total(x: Tensor, shards: Shards) -> Tensor:
    """The sum over all processes, in each of them."""
    result: Tensor = _Total.apply(x, shards)
    return result


def _scanned(x: Tensor, shards: Shards, step: int) -> Tensor:
    """The sum of the processes before this one, or, with a `step` of -1, behind it: in as many rounds as the logarithm of their number."""
    running, stride = torch.zeros_like(x), 1
    _across(x.contiguous(), shards, step, running)
    while stride < shards.size - 1:
        _across(running.clone(), shards, step * stride, running)
        stride *= 2
    return running


def _across(x: Tensor, shards: Shards, distance: int, into: Tensor) -> None:
    """Sends `x` to the process `distance` further on, where there is one, and adds what has come from as far to `into`."""
    to, of, work = shards.rank + distance, shards.rank - distance, []
    found = torch.empty_like(x)
    if 0 <= to < shards.size:
        work.append(_sent(x, to, shards, "prefixes"))
    if 0 <= of < shards.size:
        work.append(_received(found, of, shards))
    for one in work:
        one.wait()
    if 0 <= of < shards.size:
        into += found


class _PrefixSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return _scanned(x, shards, 1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        return _scanned(dout, ctx.shards, -1), None


def prefix_sum(x: Tensor, shards: Shards) -> Tensor:
    """The sum over the processes before this one."""
    result: Tensor = _PrefixSum.apply(x, shards)
    return result


class Shift:
    """Tensors on their way to one process, and those that come from another. Either process may be missing."""

    def __init__(self, sent: Sequence[Tensor], to: int | None, found: Sequence[Tensor], of: int | None, shards: Shards) -> None:
        # Sent before anything is waited for, and kept until it has arrived.
        self.sent, self.found = [x.contiguous() for x in sent] if to is not None else [], list(found)
        self.work = [] if to is None else [_sent(x, to, shards, "blocks") for x in self.sent]
        self.work += [] if of is None else [_received(x, of, shards) for x in self.found]

    def wait(self) -> list[Tensor]:
        """What has come."""
        for one in self.work:
            one.wait()
        return self.found


class _Gather(torch.autograd.Function):
    """The tokens of the whole sequence that a process needs, of those that have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, needed: Sequence[tuple[int, int]]) -> Tensor:
        ctx.shards, ctx.needed, rank = shards, needed, shards.rank
        parts = [x[..., slice(*_overlap(shards, rank, needed[n])), :].contiguous() for n in range(shards.size)]
        spans = [_overlap(shards, n, needed[rank]) for n in range(shards.size)]
        found = [parts[n] if n == rank else x.new_empty((*x.shape[:-2], end - begin, x.shape[-1])) for n, (begin, end) in enumerate(spans)]
        _traded(parts, found, shards)
        return torch.cat(found, -2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        shards, needed, rank = ctx.shards, ctx.needed, ctx.shards.rank
        spans = [_overlap(shards, n, needed[rank]) for n in range(shards.size)]
        parts = [part.contiguous() for part in torch.split(dout, [end - begin for begin, end in spans], -2)]
        own = [_overlap(shards, rank, needed[n]) for n in range(shards.size)]
        found = [parts[n] if n == rank else dout.new_empty((*dout.shape[:-2], e - b, dout.shape[-1])) for n, (b, e) in enumerate(own)]
        _traded(parts, found, shards)
        result = dout.new_zeros((*dout.shape[:-2], shards.lengths[rank], dout.shape[-1]))
        # In the order of the processes, so that each run has the same bits.
        for (begin, end), part in zip(own, found):
            result[..., begin:end, :] += part
        return result, None, None


def _overlap(shards: Shards, rank: int, needed: tuple[int, int]) -> tuple[int, int]:
    """Which tokens of a shard lie in a range of the whole sequence, counted from the shard's first."""
    begin, length = sum(shards.lengths[:rank]), shards.lengths[rank]
    low, high = (min(max(at - begin, 0), length) for at in needed)
    return low, max(low, high)


def _traded(parts: Sequence[Tensor], found: Sequence[Tensor], shards: Shards) -> None:
    """Sends every process its part and receives what it has, where there is any."""
    others = [n for n in range(shards.size) if n != shards.rank]
    work = [_sent(parts[n], n, shards, "blocks") for n in others if parts[n].numel()]
    work += [_received(found[n], n, shards) for n in others if found[n].numel()]
    for one in work:
        one.wait()


def gather(x: Tensor, shards: Shards, needed: Sequence[tuple[int, int]]) -> Tensor:
    """Tokens of the whole tensor ``[..., tokens, channels]``: those in the range that is `needed` by this process, of all processes'."""
    result: Tensor = _Gather.apply(x, shards, tuple(needed))
    return result
