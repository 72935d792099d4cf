"""What two models make of the same inputs, and how far it is apart."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError, TensorError
from .layers import find
from .recording import call

__all__ = ["Matching", "Weights", "watching"]

#: What a variance of no spread is taken as, so that it can divide.
_LEAST_VARIANCE = 1e-12


class Weights(NamedTuple):
    """Of the losses' parts; `None` for 1 where both models have such a part, and 0 elsewhere."""

    attention: float | None
    hidden: float | None
    output: float | None


class _Made(NamedTuple):
    """What a model makes of a batch."""

    attention: Sequence[Tensor]
    hidden: Sequence[Tensor]
    output: Tensor | None
    logits: bool
    """Whether the output is logits, by its name."""


class Matching:
    """The losses between two models, ``total`` and its parts.

    Raises:
        ConfigurationError: for negative weights, and weights that leave nothing.
    """

    def __init__(self, weights: Weights, temperature: float) -> None:
        self.weights, self.temperature = weights, temperature
        for name, weight in weights._asdict().items():
            if weight is not None and not 0.0 <= weight < float("inf"):
                remedy = "must be at least 0"
                raise ConfigurationError(f"argument `{name}` is {weight}; {remedy}", code="out-of-range", field=name, remedy=remedy)
        if not any(weight is None or weight for weight in weights):
            raise _nothing("output", "all weights are 0", "leave one of them above 0")

    def losses(self, student: _Made, teacher: _Made, keep: Tensor | None) -> dict[str, Tensor]:
        """Every part that has a weight, and their weighted sum."""
        found = {}
        if self._wants("attention", student.attention, teacher.attention):
            found["attention"] = _layers("attention", student.attention, teacher.attention, keep)
        if self._wants("hidden", student.hidden, teacher.hidden):
            found["hidden"] = _layers("hidden", student.hidden, teacher.hidden, keep)
        outputs = [[] if made.output is None else [made.output] for made in (student, teacher)]
        if self._wants("output", *outputs):
            found["output"] = self._output(student, teacher, keep)
        if not found:
            raise _nothing("output", "the models have no outputs that are compared", "return a tensor or logits")
        weights = {name: 1.0 if weight is None else weight for name, weight in self.weights._asdict().items()}
        total = torch.stack([weights[name] * loss for name, loss in found.items()]).sum()
        return {"total": total, **found}

    def _wants(self, name: str, *made: Sequence[Tensor]) -> bool:
        weight = getattr(self.weights, name)
        if weight == 0.0 or (weight is None and not any(made)):
            return False
        if not any(made):
            raise _nothing(name, "has a weight, and neither model has such outputs", "leave it out")
        return True

    def _output(self, student: _Made, teacher: _Made, keep: Tensor | None) -> Tensor:
        if student.output is None or teacher.output is None or student.logits != teacher.logits:
            raise _differ("output", "is logits of one model, and not of the other")
        if not teacher.logits:
            return _layers("output", [student.output], [teacher.output], keep)
        _same("output", student.output, teacher.output)
        own, other = (_kept(x, keep).float() / self.temperature for x in (student.output, teacher.output))
        distance = functional.kl_div(own.log_softmax(-1), other.log_softmax(-1), reduction="none", log_target=True)
        return distance.sum(-1).mean() * self.temperature**2


def _nothing(field: str, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"argument `{field}`: {problem}; {remedy}", code="argument", field=field, remedy=remedy)


def _differ(name: str, what: str) -> TensorError:
    remedy = f"give the models outputs of the same shapes, or leave these out by {name.split()[0]}=0"
    return TensorError(f"tensor `{name}` {what}; {remedy}", code="shape", tensor=name, remedy=remedy)


def _same(name: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise _differ(name, f"is {list(student.shape)} of the student and {list(teacher.shape)} of the teacher")


def _layers(name: str, student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None) -> Tensor:
    """Squared differences over the teacher's variance, mean over layers."""
    if len(student) != len(teacher):
        raise _differ(name, f"is there {len(student)} times in the student and {len(teacher)} times in the teacher")
    losses = []
    for n, (own, other) in enumerate(zip(student, teacher)):
        _same(f"{name} {n}" if len(teacher) > 1 else name, own, other)
        own, other = _kept(own, keep).float(), _kept(other, keep).float()
        losses.append((own - other).square().mean() / other.var(correction=0).clamp_min(_LEAST_VARIANCE))
    return torch.stack(losses).mean()


def _kept(x: Tensor, keep: Tensor | None) -> Tensor:
    """``[batch, tokens, channels]`` without tokens that are left out; anything else whole."""
    return x if keep is None or x.dim() < 3 or x.shape[:2] != keep.shape else x[keep]


@contextlib.contextmanager
def watching(student: nn.Module, teacher: nn.Module, matching: Matching) -> Iterator[Callable[[Any], dict[str, Tensor]]]:
    """A function of a batch that gives the losses, while this lasts; only the student's outputs have gradients."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        # Encoder layers of `torch.nn` have a path of their own, which calls no module.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        attending = matching.weights.attention != 0.0
        run_student, run_teacher = (_Watched(model, stack, attending) for model in (student, teacher))

        def compare(batch: Any) -> dict[str, Tensor]:
            with torch.no_grad():
                wanted = run_teacher(batch)
            return matching.losses(run_student(batch), wanted, _keep(batch))

        yield compare


class _Watched:
    """A model, and what its layers of attention return."""

    def __init__(self, model: nn.Module, stack: contextlib.ExitStack, attending: bool) -> None:
        self.model = model
        self.outputs: list[Tensor] = []
        self.options: dict[str, Any] = {}
        if hasattr(getattr(model, "config", None), "output_hidden_states"):
            self.options["output_hidden_states"] = True
            # What is not written on is not to be cached.
            if "use_cache" in inspect.signature(model.forward).parameters:
                self.options["use_cache"] = False
        for layer in find(model) if attending else ():
            stack.callback(layer.module.register_forward_hook(self._take).remove)

    def _take(self, module: nn.Module, args: Any, output: Any) -> None:
        found = output if isinstance(output, Tensor) else output[0]
        assert isinstance(found, Tensor)  # of every layer of attention that is known
        self.outputs.append(found)

    def __call__(self, batch: Any) -> _Made:
        self.outputs = []
        made = call(self.model, batch, **self.options)
        attention, self.outputs = self.outputs, []
        if isinstance(made, Tensor):
            return _Made(attention, (), made, False)
        logits, states = _get(made, "logits"), _get(made, "hidden_states")
        if states is None:
            states = (*(_get(made, "encoder_hidden_states") or ()), *(_get(made, "decoder_hidden_states") or ()))
        if isinstance(logits, Tensor):
            return _Made(attention, states[1:], logits, True)
        output = _get(made, "last_hidden_state")
        if output is None and isinstance(made, (tuple, list)):
            output = next((x for x in made if isinstance(x, Tensor)), None)
        # The first states are what comes before all blocks.
        return _Made(attention, states[1:], output, False)


def _get(made: Any, name: str) -> Any:
    return made.get(name) if isinstance(made, Mapping) else getattr(made, name, None)


def _keep(batch: Any) -> Tensor | None:
    """The tokens of a batch that are compared, ``[batch, tokens]``, where it says so."""
    if not isinstance(batch, Mapping):
        return None
    mask, padding = batch.get("attention_mask"), batch.get("src_key_padding_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.to(torch.bool)
    return ~padding if isinstance(padding, Tensor) and padding.dtype == torch.bool else None
