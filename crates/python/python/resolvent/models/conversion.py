"""Another mechanism in place of a model's attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Iterable, Union

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, Error, UnsupportedError
from ..fits import Fit, FitLike, HeadMechanisms, load_fit
from ..mechanism import Mechanism, MechanismLike
from ..torch import Attention, HeadAttention, MultiheadAttention, attend
from ..torch.attention import parts_of
from ..torch.pairs import is_row_local
from .centroids import centroids
from .fitting import fitted, found_fit, learned_of, mechanism_of
from .given import Given
from .layers import CONVERTED, Layer, Layers, find, select
from .recording import recording, show

__all__ = ["Conversion", "Converted", "convert"]

Mechanisms = Union[MechanismLike, HeadMechanisms, Callable[[str, nn.Module], Union[MechanismLike, HeadMechanisms]]]


@dataclasses.dataclass
class Converted:
    """One layer of a conversion."""

    name: str
    mechanism: Mechanism | HeadMechanisms
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

    def __init__(self, layers: list[Converted], undo: list[Callable[[], None]], fit: Fit | None = None) -> None:
        self.layers = tuple(layers)
        self.fit = fit
        """The fit that the layers have their mechanisms of, where there is one."""
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
            first, *others = map(str, layer.mechanism.groups if isinstance(layer.mechanism, HeadMechanisms) else [layer.mechanism])
            rows.append((layer.name or "(the model)", first, str(len(layer.kept)), *names, *change))
            rows.extend(("", group, *[""] * (len(rows[0]) - 2)) for group in others)
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    @property
    def _has_changes(self) -> bool:
        return any(layer.change is not None for layer in self.layers)


def convert(
    model: nn.Module,
    mechanism: Mechanisms | None = None,
    layers: Layers = None,
    samples: Any = None,
    *,
    fit: FitLike | float | None = None,
    budget: float | None = None,
    learned: Iterable[str] | None = None,
    dropout: float | None = None,
    codebook: bool = False,
    report: bool = False,
) -> Conversion:
    """Puts a mechanism in place of a model's attention, in place, with its weights.

    For models of Hugging Face transformers that leave attention to an implementation, and for models that hold
    ``torch.nn.MultiheadAttention``, those with ``torch.nn.TransformerEncoderLayer`` among them. What the mechanism learns becomes
    parameters of the layers, in their state.

    Args:
        model: The model, which is changed; the result's ``undo()`` changes it back.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping; `HeadMechanisms`; or a function of name and module that gives one of
            these for each layer.
        layers: Which layers of attention: a number, a slice of the numbers, a name, the name of what holds them, a pattern such as
            ``*.self``, a function of name and module, or several of these; all by default.
        samples: Inputs that the model is shown, in evaluation: a tensor, a tuple of arguments, a mapping of keywords, or several in a
            list. Every converted layer must compute what it is given then, and the result tells how far each is from softmax.
        fit: In place of a mechanism, one for every head: a `Fit`, the path of ``fit.json``, or what that holds. Its layers are converted,
            those of them that `layers` names. Or a number, the cosine with softmax's output that every head is to reach: the program
            ``resolvent`` finds the fit on the samples, as `resolvent.analyze` with ``fit``. Heads of one mechanism are one call.
        budget: Beside a number as `fit`, the share of dense softmax's time that all heads together may take; no limit by default.
        learned: Names of the parameters that are learned, as in `resolvent.torch.Attention`; under a fit, wherever there are such.
        dropout: Of weights, in training, in place of the layers' own.
        codebook: Whether mechanisms with clusters get fixed centroids, found among the tokens of the samples, in place of clusters found
            anew in every call. They are in the state, and get no gradient. Of heads with mechanisms of their own, those with clusters
            get them.
        report: Print the result: every layer with the parameters that it has kept, got, and left unused.

    Raises:
        ConfigurationError: for a fit whose layers or numbers of heads are not the model's, and one that cannot be read.
        UnsupportedError: for models without attention that is known, and for what a mechanism cannot do, such as causality; the model
            is then as it was.
    """
    names = None if learned is None else tuple(learned)
    if dropout is not None and not 0.0 <= dropout < 1.0:
        remedy = "must be in [0, 1)"
        raise ConfigurationError(f"argument `dropout` is {dropout}; {remedy}", code="out-of-range", field="dropout", remedy=remedy)
    found = _fit(model, mechanism, layers, samples, fit, budget)
    chosen = select(find(model), layers) if found is None else fitted(found, find(model), layers)
    seen = {} if samples is None else _seen(model, chosen, samples)
    if codebook and not seen:
        remedy = "pass samples that reach the layers"
        raise ConfigurationError(f"argument `codebook` needs samples; {remedy}", code="argument", field="codebook", remedy=remedy)
    done = Conversion([], [], found)
    try:
        made = []
        for layer in chosen:
            own = _mechanism(mechanism, layer) if found is None else mechanism_of(found.layers[layer.name], layer)
            made.append(_made(layer, own, names if found is None else learned_of(own, found, names), dropout))
            if codebook:
                mixed = found is not None or isinstance(own, HeadMechanisms)
                _told(layer, functools.partial(_cluster, _attention_of(made[-1]), seen.get(layer.name, []), mixed))
        _place(model, list(zip(chosen, made)), done)
        if samples is not None:
            show(model, samples)
            _measure(list(zip(chosen, made)), done, seen)
    except BaseException:
        done.undo()
        raise
    if report:
        print(done)
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


def _fit(
    model: nn.Module, mechanism: Mechanisms | None, layers: Layers, samples: Any, fit: FitLike | float | None, budget: float | None
) -> Fit | None:
    """The fit that is meant, if one is."""
    if (mechanism is None) == (fit is None):
        remedy = "pass one of both"
        raise ConfigurationError(f"convert takes a mechanism or a fit; {remedy}", code="argument", field="mechanism", remedy=remedy)
    if isinstance(fit, (int, float)):
        return found_fit(model, samples, layers, float(fit), budget)
    if budget is not None:
        remedy = "pass a number as `fit`, for one to be found within the budget"
        raise ConfigurationError(f"argument `budget` is beside no target; {remedy}", code="argument", field="budget", remedy=remedy)
    return None if fit is None else load_fit(fit)


def _mechanism(mechanism: Any, layer: Layer) -> Mechanism | HeadMechanisms:
    if callable(mechanism) and not isinstance(mechanism, Mechanism):
        mechanism = mechanism(layer.name, layer.module)
    return mechanism_of(mechanism, layer)


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


def _made(layer: Layer, mechanism: Mechanism | HeadMechanisms, learned: tuple[str, ...] | None, dropout: float | None) -> nn.Module:
    """The module that will hold the layer's mechanism."""
    if layer.kind == "converted":
        raise _refused(layer, "a layer that has been converted", "undo its conversion first, or choose others by `layers`")
    parts = [group.mechanism for group in mechanism.groups] if isinstance(mechanism, HeadMechanisms) else [mechanism]
    if layer.crossed and any(part.tied for part in parts):
        raise _refused(layer, f"the tied mechanism `{mechanism}`", "its keys are its queries, which cross-attention has not")
    mixing = [part for part in parts if not is_row_local(part)]
    if layer.crossed and layer.writes and mixing:
        why = "its rows depend on the queries of other tokens, which a decoder has not written yet; leave this layer out by `layers`"
        raise _refused(layer, f"`{mixing[0]}` in cross-attention of a decoder", why)
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
    for _, part in parts_of(attention):
        _told(layer, functools.partial(_check, layer, part, layer.dropout if dropout is None else dropout))
    made: nn.Module = new
    return made


def _layer_attention(
    layer: Layer, mechanism: Mechanism | HeadMechanisms, learned: tuple[str, ...] | None, dropout: float | None
) -> Attention | HeadAttention:
    from .implementations import LayerAttention, LayerHeadAttention

    attention: LayerAttention | LayerHeadAttention
    if isinstance(mechanism, HeadMechanisms):
        attention = LayerHeadAttention(layer.heads, layer.head_dim, mechanism, learned=learned)
    else:
        attention = LayerAttention(layer.heads, layer.head_dim, mechanism, learned=learned)
    attention.override = dropout
    return attention.train(layer.module.training)


def _check(layer: Layer, attention: Attention, dropout: float) -> None:
    """Refuses what the layer is known to ask of every call of these heads."""
    document = attention.mechanism.to_dict()
    grid = document.get("grid") or [(document.get("bias") or {}).get(side, 4) for side in ("height", "width")]
    tokens = math.prod(grid)
    if layer.causal:
        sizes = (1, attention.heads, tokens, tokens, layer.head_dim, layer.head_dim)
        attention.mechanism._core.lengths(sizes, True, "auto")
    if dropout > 0.0 and layer.module.training:
        x = torch.ones(1, attention.heads, tokens, layer.head_dim)
        k = None if attention.mechanism.tied else x
        with torch.no_grad():
            attend(x, k, x, attention.mechanism, parameters=attention.values(), causal=layer.causal, dropout=dropout, seed=0)


def _place_in_transformers(model: nn.Module, layer: Layer, attention: nn.Module) -> tuple[Converted, Callable[[], None]]:
    from .implementations import LayerAttention, LayerHeadAttention, configurations, hold, install, restore

    assert isinstance(attention, (LayerAttention, LayerHeadAttention))
    module, changed = layer.module, configurations(model, [layer.module])
    unused = (layer.keys() or ["what makes keys"]) if attention.mechanism.tied else []
    kept = tuple(name for name, _ in module.named_parameters() if name not in unused)
    module.add_module(CONVERTED, attention)
    for config in changed:
        install(config)
    hold(module, changed)

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


def _attention_of(module: nn.Module) -> Attention | HeadAttention:
    found: Any = module.attention if isinstance(module, MultiheadAttention) else module
    assert isinstance(found, (Attention, HeadAttention))  # all that is made here
    return found


def _seen(model: nn.Module, layers: list[Layer], samples: Any) -> dict[str, list[Given]]:
    """What the layers are given on the samples."""
    seen: dict[str, list[Given]] = {}
    with recording(model, layers, lambda layer, given: seen.setdefault(layer.name, []).append(given)):
        show(model, samples)
    return seen


def _cluster(attention: Attention | HeadAttention, calls: list[Given], mixed: bool) -> None:
    """Gives the heads their centroids; among mixed mechanisms, those with clusters."""
    for heads, part in parts_of(attention):
        if part.mechanism.clustered or not mixed:
            part.codebook = centroids(part.mechanism, [call.of_heads(heads) for call in calls])


@torch.no_grad()
def _change(attention: Attention | HeadAttention, calls: list[Given]) -> float | None:
    """How far the mechanism's output is from softmax's on the same calls; `None` where softmax here is not the model's own."""
    sums = torch.zeros(3, dtype=torch.float64)
    for given in calls:
        if given.window is not None or given.options:
            return None
        for heads, part in parts_of(attention):
            own_given = given.of_heads(heads)
            ours = _applied(own_given, part.mechanism, part.values(), part.codebook).double()
            theirs = _applied(own_given, Mechanism("softmax", scale=given.scale)).double()
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
