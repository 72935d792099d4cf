"""A converted model learns to do what the original does."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from typing import Any, Callable, Iterable, Iterator, Literal, Mapping, Sequence, Union

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, NumericalError
from .layers import find
from .matching import Matching, Weights, watching

__all__ = ["Distillation", "Losses", "distill"]

Trained = Union[Literal["all", "attention"], Callable[[str, nn.Parameter], bool]]


@dataclasses.dataclass(frozen=True)
class Losses:
    """How far the student is from the teacher, without unit; `None` where the models have nothing to compare or its weight is 0."""

    total: float
    """The weighted sum of the others, which training makes smaller."""
    attention: float | None = None
    """Of the layers of attention: squared differences of their outputs over the variance of the teacher's, mean over layers."""
    hidden: float | None = None
    """The same of the hidden states after each block."""
    output: float | None = None
    """Of logits the Kullback-Leibler divergence, in nats; of other outputs as of hidden states."""


@dataclasses.dataclass(frozen=True)
class Distillation:
    """What a distillation has done; prints as a table."""

    steps: tuple[Losses, ...]
    """The losses of every step, before its update."""
    before: Losses | None
    """Mean losses of the held-out batches before the first step; `None` without such."""
    after: Losses | None
    """The same after the last."""
    parameters: tuple[str, ...]
    """The student's parameters that were trained."""
    seconds: float

    def __str__(self) -> str:
        names = [name for name in ("total", "attention", "hidden", "output") if getattr(self.steps[0], name) is not None]
        shown = sorted({round(n * (len(self.steps) - 1) / 5) for n in range(6)})
        rows: list[tuple[str, Losses | None]] = [(f"step {n + 1}", self.steps[n]) for n in shown]
        rows += [("held out, before", self.before), ("held out, after", self.after)]
        cells = [("", *names)]
        cells += [(what, *(f"{getattr(losses, name):.4g}" for name in names)) for what, losses in rows if losses is not None]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, f"{len(self.parameters)} parameters trained in {self.seconds:.1f} s"])


def distill(
    student: nn.Module,
    teacher: nn.Module,
    data: Any,
    *,
    held_out: Any = None,
    steps: int = 300,
    lr: float = 1e-4,
    parameters: Trained = "all",
    attention: float | None = None,
    hidden: float | None = None,
    output: float | None = None,
    temperature: float = 1.0,
    weight_decay: float = 0.01,
    clip: float | None = 1.0,
    warmup: float = 0.1,
    seed: int = 0,
) -> Distillation:
    """Trains a student, such as a converted model, to do what its teacher does, by AdamW on the outputs of both.

    Compared are the outputs of layers of attention, hidden states of models of transformers, and what the models return: logits, where
    these have the name, or a tensor. Tokens that ``attention_mask`` or ``src_key_padding_mask`` of a batch leaves out are not compared. The
    student is run as in evaluation, since dropout would be noise that the teacher has not; both models' modes are put back.

    Args:
        student: The model that learns, in place.
        teacher: The original, such as a ``copy.deepcopy`` made before the conversion; nothing of it changes.
        data: Batches, over and over: a tensor, a mapping of keywords or a tuple of arguments is one; several come in a list, whose order is
            drawn anew for every pass, or from any other iterable, such as a ``DataLoader``.
        held_out: Batches, in the same forms, on which the losses are measured before and after.
        steps: How many batches are learned from.
        lr: The learning rate at its highest. It rises evenly from 0 over the first share `warmup` of the steps and falls as a cosine to 0.
        parameters: ``"all"`` of the student's that require a gradient; of these the ones within layers of ``"attention"``; or those for which
            a function of name and parameter says so.
        attention: Weight of the outputs of layers of attention. By default 1 for each of these three weights, where both models have what is
            compared; 0 leaves it out.
        hidden: Weight of the hidden states.
        output: Weight of what the models return.
        temperature: Logits are divided by it, and their loss is multiplied by its square.
        weight_decay: AdamW's.
        clip: The largest norm of all gradients together; ``None`` for no limit.
        warmup: A share of the steps.
        seed: Of the order of batches in a list, and of PyTorch's generator meanwhile, which is put back.

    Raises:
        ConfigurationError: for arguments out of range, no batch, a student that shares trained weights with the teacher, nothing to train
            or to compare.
        TensorError: where the outputs of student and teacher differ in number or shape.
        NumericalError: where a loss is not finite.
    """
    _validate(steps=steps, lr=lr, temperature=temperature, weight_decay=weight_decay, clip=clip, warmup=warmup)
    matching = Matching(Weights(attention, hidden, output), temperature)
    trained = _trained(student, teacher, parameters)
    checked = None if held_out is None else _several(held_out)
    if checked is not None and not isinstance(checked, list):
        checked = list(checked)
    begun, done = time.perf_counter(), []
    with _prepared(student, teacher, trained, seed), watching(student, teacher, matching) as compare:
        before = None if checked is None else _mean(compare, checked)
        optimizer = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps, warmup))
        for step, batch in zip(range(steps), _cycled(_several(data), seed)):
            losses = compare(batch)
            done.append(_finite(losses, step))
            optimizer.zero_grad()
            torch.autograd.backward(losses["total"])
            if clip is not None:
                nn.utils.clip_grad_norm_(trained.values(), clip)
            optimizer.step()
            schedule.step()
        after = None if checked is None else _mean(compare, checked)
    return Distillation(tuple(done), before, after, tuple(trained), time.perf_counter() - begun)


def _wrong(field: str, problem: str, remedy: str, code: str = "argument") -> ConfigurationError:
    return ConfigurationError(f"argument `{field}` {problem}; {remedy}", code=code, field=field, remedy=remedy)


def _validate(**given: float | None) -> None:
    for name, value in given.items():
        if value is None:
            continue
        good, remedy = value >= 0.0 and math.isfinite(value), "must be at least 0"
        if name == "steps":
            good, remedy = isinstance(value, int) and value >= 1, "must be a whole number of at least 1"
        elif name == "warmup":
            good, remedy = 0.0 <= value <= 1.0, "must be in [0, 1]"
        elif name != "weight_decay":
            good, remedy = value > 0.0 and math.isfinite(value), "must be above 0"
        if not good:
            raise _wrong(name, f"is {value}", remedy, "out-of-range")


def _trained(student: nn.Module, teacher: nn.Module, parameters: Trained) -> dict[str, nn.Parameter]:
    """The parameters that learn, by their names."""
    able = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    if callable(parameters):
        able = {name: parameter for name, parameter in able.items() if parameters(name, parameter)}
    elif parameters == "attention":
        within = {id(parameter) for layer in find(student) for parameter in layer.module.parameters()}
        able = {name: parameter for name, parameter in able.items() if id(parameter) in within}
    elif parameters != "all":
        raise _wrong("parameters", f"is {parameters!r}", 'pass "all", "attention" or a function of name and parameter')
    if not able:
        raise _wrong("parameters", "leaves nothing to train", "choose parameters of the student that require gradients")
    places = {x.untyped_storage().data_ptr() for x in (*teacher.parameters(), *teacher.buffers())}
    if shared := [name for name, parameter in able.items() if parameter.untyped_storage().data_ptr() in places]:
        remedy = "pass a copy that was made before the conversion, copy.deepcopy(model)"
        raise _wrong("teacher", f"shares `{shared[0]}` with the student", remedy)
    return able


@contextlib.contextmanager
def _prepared(student: nn.Module, teacher: nn.Module, trained: Mapping[str, nn.Parameter], seed: int) -> Iterator[None]:
    """Both models in evaluation, with gradients for what is trained alone, and PyTorch's generator seeded; all is put back, gradients too."""
    modes = [(module, module.training) for model in (student, teacher) for module in model.modules()]
    own = [(parameter, parameter.requires_grad, parameter.grad) for parameter in student.parameters()]
    chosen = {id(parameter) for parameter in trained.values()}
    try:
        for module, _ in modes:
            module.training = False
        for parameter, _, _ in own:
            parameter.requires_grad_(id(parameter) in chosen)
            parameter.grad = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires, gradient in own:
            parameter.requires_grad_(requires)
            parameter.grad = gradient


def _several(data: Any) -> Iterable[Any]:
    """Batches, where one may stand for itself."""
    return [data] if isinstance(data, (Tensor, Mapping, tuple)) else data


def _cycled(data: Iterable[Any], seed: int) -> Iterator[Any]:
    """The batches without end: lists in an order that is drawn anew for every pass, what can be passed through once from memory."""
    once, generator = iter(data) is data, random.Random(seed)
    kept: list[Any] = []
    while True:
        count = 0
        for batch in generator.sample(data, len(data)) if isinstance(data, Sequence) else data:
            count += 1
            if once:
                kept.append(batch)
            yield batch
        if not count:
            raise _wrong("data", "has no batch", "pass at least one")
        if once:
            data, once = kept, False


def _mean(compare: Callable[[Any], Mapping[str, Tensor]], batches: Sequence[Any]) -> Losses:
    """The mean losses of batches, which change nothing."""
    if not batches:
        raise _wrong("held_out", "has no batch", "pass at least one, or leave it out")
    with torch.no_grad():
        found = [compare(batch) for batch in batches]
    return Losses(**{name: math.fsum(float(one[name]) for one in found) / len(found) for name in found[0]})


def _share(step: int, steps: int, warmup: float) -> float:
    """The learning rate's share of its highest: even rise, then a cosine."""
    rise = round(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _finite(losses: Mapping[str, Tensor], step: int) -> Losses:
    found = Losses(**{name: float(loss.detach()) for name, loss in losses.items()})
    if not math.isfinite(found.total):
        remedy = "lower lr, and look for inputs or weights that are not finite"
        raise NumericalError(f"the loss of step {step + 1} is {found.total}; {remedy}", code="not-finite", field="lr", remedy=remedy)
    return found
