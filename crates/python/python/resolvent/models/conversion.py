"""Another mechanism in place of a model's attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Iterable, Union

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, Error, UnsupportedError
from ..mechanism import Mechanism, MechanismLike
from ..torch import Attention, MultiheadAttention, attend
from .centroids import centroids
from .given import Given
from .layers import CONVERTED, Layer, Layers, find, select
from .recording import recording, show

__all__ = ["Conversion", "Converted", "convert"]

Mechanisms = Union[MechanismLike, Callable[[str, nn.Module], MechanismLike]]


@dataclasses.dataclass
class Converted:
    """One layer of a conversion."""

    name: str
    mechanism: Mechanism
    kept: tuple[str, ...]
    """Parameters of the layer that it computes with as before."""
    new: tuple[str, ...]
    """Parameters, and centroids, that the mechanism has brought."""
    unused: tuple[str, ...]
    """Parameters that the mechanism has no use for."""
    change: float | None = None
    """How far its output is from softmax's on the samples, after the best single factor: the norm of the difference over softmax's."""


class Conversion:
    """What has been converted; prints as a table."""

    def __init__(self, layers: list[Converted], undo: list[Callable[[], None]]) -> None:
        self.layers = tuple(layers)
        self._undo = undo

    def undo(self) -> None:
        """Puts the layers back that were there before, with the weights that they share with their conversion. May be called more than
        once."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        rows = [("layer", "mechanism", "kept", "new", "unused", *(["change"] if self._has_changes else []))]
        for layer in self.layers:
            names = [", ".join(part) or "-" for part in (layer.new, layer.unused)]
            change = [] if not self._has_changes else ["-" if layer.change is None else f"{layer.change:.3f}"]
            rows.append((layer.name or "(the model)", str(layer.mechanism), str(len(layer.kept)), *names, *change))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    @property
    def _has_changes(self) -> bool:
        return any(layer.change is not None for layer in self.layers)


def convert(
    model: nn.Module,
    mechanism: Mechanisms,
    layers: Layers = None,
    samples: Any = None,
    *,
    learned: Iterable[str] | None = None,
    dropout: float | None = None,
    codebook: bool = False,
) -> Conversion:
    """Puts a mechanism in place of a model's attention, in place, with its weights.

    For models of Hugging Face transformers that leave attention to an implementation, and for models that hold
    ``torch.nn.MultiheadAttention``, those with ``torch.nn.TransformerEncoderLayer`` among them. What the mechanism learns becomes
    parameters of the layers, in their state.

    Args:
        model: The model, which is changed; the result's ``undo()`` changes it back.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping; or a function of name and module that gives one for each layer.
        layers: Which layers of attention: a number, a slice of the numbers, a name, the name of what holds them, a pattern such as
            ``*.self``, a function of name and module, or several of these; all by default.
        samples: Inputs that the model is shown, in evaluation: a tensor, a tuple of arguments, a mapping of keywords, or several in a
            list. Every converted layer must compute what it is given then, and the result tells how far each is from softmax.
        learned: Names of the parameters that are learned, as in `resolvent.torch.Attention`.
        dropout: Of weights, in training, in place of the layers' own.
        codebook: Whether mechanisms with clusters get fixed centroids, found among the tokens of the samples, in place of clusters found
            anew in every call. They are in the state, and get no gradient.

    Raises:
        UnsupportedError: for models without attention that is known, and for what a mechanism cannot do, such as causality; the model
            is then as it was.
    """
    names = None if learned is None else tuple(learned)
    if dropout is not None and not 0.0 <= dropout < 1.0:
        remedy = "must be in [0, 1)"
        raise ConfigurationError(f"argument `dropout` is {dropout}; {remedy}", code="out-of-range", field="dropout", remedy=remedy)
    chosen = select(find(model), layers)
    seen = {} if samples is None else _seen(model, chosen, samples)
    if codebook and not seen:
        remedy = "pass samples that reach the layers"
        raise ConfigurationError(f"argument `codebook` needs samples; {remedy}", code="argument", field="codebook", remedy=remedy)
    done = Conversion([], [])
    try:
        made = []
        for layer in chosen:
            made.append(_made(layer, _mechanism(mechanism, layer), names, dropout))
            if codebook:
                _told(layer, functools.partial(_cluster, _attention_of(made[-1]), seen.get(layer.name, [])))
        _place(model, list(zip(chosen, made)), done)
        if samples is not None:
            show(model, samples)
            _measure(list(zip(chosen, made)), done, seen)
    except BaseException:
        done.undo()
        raise
    return done


def _place(model: nn.Module, made: list[tuple[Layer, nn.Module]], done: Conversion) -> None:
    """Puts the modules in place, and tells in `done` which and how to undo it."""
    for layer, module in made:
        place = _place_in_transformers if hasattr(layer.module, "config") else _place_in_torch
        converted, undo = place(model, layer, module)
        done.layers = (*done.layers, converted)
        done._undo.append(undo)


def _measure(made: list[tuple[Layer, nn.Module]], done: Conversion, seen: dict[str, list[Given]]) -> None:
    for (layer, module), converted in zip(made, done.layers):
        if layer.name in seen:
            converted.change = _told(layer, functools.partial(_change, _attention_of(module), seen[layer.name]))


def _mechanism(mechanism: Mechanisms, layer: Layer) -> Mechanism:
    if callable(mechanism) and not isinstance(mechanism, Mechanism):
        return Mechanism.of(mechanism(layer.name, layer.module))
    return Mechanism.of(mechanism)


def _told(layer: Layer, compute: Callable[[], Any]) -> Any:
    """The result, or the error with the layer's name before it."""
    try:
        return compute()
    except Error as error:
        message = f"layer `{layer.name}`: {error}"
        kind, remedy = type(error), error.remedy
        raise kind(message, code=error.code, field=error.field, tensor=error.tensor, remedy=remedy) from error


def _refused(layer: Layer, what: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"layer `{layer.name}`: {what} is not supported: {why}", code="unsupported", field=what, remedy=why)


def _made(layer: Layer, mechanism: Mechanism, learned: tuple[str, ...] | None, dropout: float | None) -> nn.Module:
    """The module that will hold the layer's mechanism."""
    if layer.kind == "converted":
        raise _refused(layer, "a layer that has been converted", "undo its conversion first, or choose others by `layers`")
    if layer.crossed and mechanism.tied:
        raise _refused(layer, f"the tied mechanism `{mechanism}`", "its keys are its queries, which cross-attention has not")
    if isinstance(layer.module, nn.MultiheadAttention):
        if not layer.name:
            remedy = "use resolvent.torch.MultiheadAttention.from_torch"
            raise _refused(layer, "a model that is nothing but a layer", f"there is nothing that holds it; {remedy}")
        source = layer.module
        new = _told(layer, lambda: MultiheadAttention.from_torch(source, mechanism, learned=learned))
        attention = new.attention
        attention.dropout = new.dropout = layer.dropout if dropout is None else dropout
    else:
        new = attention = _told(layer, lambda: _layer_attention(layer, mechanism, learned, dropout))
    _told(layer, lambda: _check(layer, attention, layer.dropout if dropout is None else dropout))
    made: nn.Module = new
    return made


def _layer_attention(layer: Layer, mechanism: Mechanism, learned: tuple[str, ...] | None, dropout: float | None) -> Attention:
    from .implementations import LayerAttention

    attention = LayerAttention(layer.heads, layer.head_dim, mechanism, learned=learned)
    attention.override = dropout
    return attention.train(layer.module.training)


def _check(layer: Layer, attention: Attention, dropout: float) -> None:
    """Refuses what the layer is known to ask of every call."""
    document = attention.mechanism.to_dict()
    grid = document.get("grid") or [(document.get("bias") or {}).get(side, 4) for side in ("height", "width")]
    tokens = math.prod(grid)
    if layer.causal:
        sizes = (1, layer.heads, tokens, tokens, layer.head_dim, layer.head_dim)
        attention.mechanism._core.lengths(sizes, True, "auto")
    if dropout > 0.0 and layer.module.training:
        x = torch.ones(1, layer.heads, tokens, layer.head_dim)
        k = None if attention.mechanism.tied else x
        with torch.no_grad():
            attend(x, k, x, attention.mechanism, parameters=attention.values(), causal=layer.causal, dropout=dropout, seed=0)


def _place_in_transformers(model: nn.Module, layer: Layer, attention: nn.Module) -> tuple[Converted, Callable[[], None]]:
    from .implementations import LayerAttention, configurations, install, restore

    assert isinstance(attention, LayerAttention)
    module, changed = layer.module, configurations(model, [layer.module])
    unused = (layer.keys() or ["what makes keys"]) if attention.mechanism.tied else []
    kept = tuple(name for name, _ in module.named_parameters() if name not in unused)
    module.add_module(CONVERTED, attention)
    for config in changed:
        install(config)

    def undo() -> None:
        module._modules.pop(CONVERTED, None)
        if not any(CONVERTED in other._modules for other in model.modules()):
            for config in changed:
                restore(config)

    new = tuple(f"{CONVERTED}.{name}" for name in attention.state_dict())
    return Converted(layer.name, attention.mechanism, kept, new, tuple(unused)), undo


def _place_in_torch(model: nn.Module, layer: Layer, new: nn.Module) -> tuple[Converted, Callable[[], None]]:
    assert isinstance(new, MultiheadAttention)
    old, unused = layer.module, []
    for name, parameter in old.named_parameters():
        holder, _, last = name.rpartition(".")
        place = new.get_submodule(holder)
        if place._parameters.get(last) is None:
            unused.append(name)
        elif place._parameters[last].shape == parameter.shape:  # type: ignore[union-attr]
            place._parameters[last] = parameter  # one weight, so that optimizers know it
        else:
            unused.append(f"the keys' third of {name}")
    places = [(holder, name) for holder in model.modules() for name, inner in holder._modules.items() if inner is old]
    # Encoders pack padded texts into nested tensors in evaluation, for a path of softmax's alone.
    packing = [
        holder
        for holder in model.modules()
        if isinstance(holder, nn.TransformerEncoder) and holder.use_nested_tensor and old in set(holder.modules())
    ]

    def put(module: nn.Module, nested: bool) -> None:
        for holder, name in places:
            holder._modules[name] = module
        for encoder in packing:
            encoder.use_nested_tensor = nested

    put(new, False)
    kept = tuple(name for name, _ in old.named_parameters() if name not in unused)
    added = tuple(f"attention.{name}" for name in new.attention.state_dict())
    return Converted(layer.name, new.attention.mechanism, kept, added, tuple(unused)), lambda: put(old, True)


def _attention_of(module: nn.Module) -> Attention:
    found: Any = module.attention if isinstance(module, MultiheadAttention) else module
    assert isinstance(found, Attention)  # all that is made here
    return found


def _seen(model: nn.Module, layers: list[Layer], samples: Any) -> dict[str, list[Given]]:
    """What the layers are given on the samples."""
    seen: dict[str, list[Given]] = {}
    with recording(model, layers, lambda layer, given: seen.setdefault(layer.name, []).append(given)):
        show(model, samples)
    return seen


def _cluster(attention: Attention, calls: list[Given]) -> None:
    attention.codebook = centroids(attention.mechanism, calls)


@torch.no_grad()
def _change(attention: Attention, calls: list[Given]) -> float | None:
    """How far the mechanism's output is from softmax's on the same calls; `None` where softmax here is not the model's own."""
    sums = torch.zeros(3, dtype=torch.float64)
    for given in calls:
        if given.window is not None or given.options:
            return None
        ours = _applied(given, attention.mechanism, attention.values(), attention.codebook).double()
        theirs = _applied(given, Mechanism("softmax", scale=given.scale)).double()
        sums += torch.stack([(ours * theirs).sum(), ours.square().sum(), theirs.square().sum()])
    both, own, reference = sums.tolist()
    return math.sqrt(max(0.0, 1.0 - both * both / (own * reference))) if own > 0.0 and reference > 0.0 else None


def _applied(
    given: Given, mechanism: Mechanism, parameters: dict[str, Tensor] | None = None, codebook: Tensor | None = None
) -> Tensor:
    square = given.k is not None and given.q.shape[2] == given.k.shape[2]
    return attend(
        given.q,
        None if mechanism.tied else given.k,
        given.v,
        mechanism,
        causal=given.causal,
        key_mask=given.keep,
        query_mask=given.keep if square else None,
        bias=given.pairs,
        parameters=parameters,
        codebook=codebook,
        enable_gqa=True,
    )
