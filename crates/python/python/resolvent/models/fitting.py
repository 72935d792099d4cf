"""Fits and the layers of a model: which are meant, which mechanisms they get, and a fit found on samples."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import nn

from ..errors import ConfigurationError, UnsupportedError
from ..fits import Fit, HeadMechanisms
from ..mechanism import Mechanism, MechanismLike
from .analysis import analyze
from .layers import Layer, Layers, select

__all__ = ["fitted", "found_fit", "learned_of", "mechanism_of"]


def mechanism_of(mechanism: MechanismLike | HeadMechanisms, layer: Layer) -> Mechanism | HeadMechanisms:
    """What the layer computes; where all heads have one mechanism, this one."""
    if not isinstance(mechanism, HeadMechanisms):
        return Mechanism.of(mechanism)
    if mechanism.heads != layer.heads:
        remedy = "give every head of the layer one"
        message = f"layer `{layer.name}` has {layer.heads} heads, and {mechanism.heads} have mechanisms; {remedy}"
        raise ConfigurationError(message, code="argument", field="mechanism", remedy=remedy)
    return mechanism.groups[0].mechanism if len(mechanism.groups) == 1 else mechanism


def fitted(fit: Fit, found: list[Layer], layers: Layers) -> list[Layer]:
    """The layers that the fit has mechanisms for, of those that are meant.

    Raises:
        ConfigurationError: where the fit has a layer that the model has not, or with other heads; where a layer that is meant is not in it.
    """
    known = {layer.name: layer for layer in select(found, None)}
    for n, (name, mechanisms) in enumerate(fit.layers.items()):
        if name not in known:
            names = ", ".join([*known][:12]) + (", ..." if len(known) > 12 else "")
            raise _other(f"layers[{n}].name", f"is {name!r}, which is no layer of the model", f"there are {names}")
        heads = known[name].heads
        if heads != mechanisms.heads:
            what = f"is {mechanisms.heads}, and layer `{name}` of the model has {heads}"
            raise _other(f"layers[{n}].heads", what, "take a fit of this model")
    chosen = [layer for layer in known.values() if layer.name in fit.layers] if layers is None else select(found, layers)
    if not chosen:
        raise _other("layers", "is empty", "take a fit of at least one layer")
    for layer in chosen:
        if layer.name not in fit.layers:
            remedy = f"it has {', '.join(fit.layers)}"
            message = f"argument `layers` has layer `{layer.name}`, for which the fit has no mechanisms; {remedy}"
            raise ConfigurationError(message, code="argument", field="layers", remedy=remedy)
    return chosen


def learned_of(mechanism: Mechanism | HeadMechanisms, fit: Fit, learned: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Of the names that are learned, those that the layer's mechanism has.

    Raises:
        ConfigurationError: for names that no mechanism of the fit has.
    """
    if learned is None:
        return None
    known = {name for mechanisms in fit.layers.values() for name in mechanisms.parameters}
    if unknown := sorted(set(learned) - known):
        remedy = f"they have {', '.join(sorted(known)) or 'none'}"
        message = f"argument `learned` has `{unknown[0]}`, a parameter of no mechanism of the fit; {remedy}"
        raise ConfigurationError(message, code="argument", field="learned", remedy=remedy)
    return tuple(name for name in learned if name in mechanism.parameters)


def _other(field: str, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"fit field `{field}` {problem}; {remedy}", code="fit", field=field, remedy=remedy)


def found_fit(model: nn.Module, samples: Any, layers: Layers, target: float, budget: float | None) -> Fit:
    """What the program finds on the samples; what it writes is not kept."""
    if samples is None:
        remedy = "pass inputs that the model is shown"
        raise ConfigurationError(f"a target as `fit` needs samples; {remedy}", code="argument", field="samples", remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="resolvent-") as folder:
        found = analyze(model, samples, folder, layers=layers, fit=target, budget=budget).fit
    if found is None:
        remedy = "install it, or pass the fit.json that it has written elsewhere"
        raise UnsupportedError(
            f"a target as `fit` without the program resolvent is not supported; {remedy}", code="unsupported", field="fit", remedy=remedy
        )
    return found
