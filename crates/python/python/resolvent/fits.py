"""Heads with mechanisms of their own: of one layer, and of a whole model as the program ``resolvent analyze --fit`` finds them."""

from __future__ import annotations

import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence, Union

from .errors import ConfigurationError, Error
from .mechanism import Mechanism, MechanismLike

__all__ = ["Fit", "HeadGroup", "HeadMechanisms", "load_fit"]

#: The version of the format that is read and written.
_VERSION = 1


def _wrong(field: str, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"fit field `{field}` {problem}; {remedy}", code="fit", field=field, remedy=remedy)


@dataclass(frozen=True)
class HeadGroup:
    """Heads of a layer that have one mechanism."""

    heads: tuple[int, ...]
    """Which, ascending, from 0 on."""
    mechanism: Mechanism

    def __str__(self) -> str:
        return f"{_ranges(self.heads)}: {_described(self.mechanism)}"


class HeadMechanisms:
    """Which mechanism each head of a layer has. Immutable, hashable, picklable.

    ``HeadMechanisms([([0, 3], "routed"), ([1, 2], Mechanism("local", window=64))])`` has four heads. `resolvent.torch.attend`, the modules of
    `resolvent.torch`, `resolvent.convert` and `resolvent.transformers.register` take it where they take a mechanism.

    Args:
        groups: Pairs of heads and their mechanism: a `Mechanism`, a preset's id, JSON or a mapping.

    Raises:
        ConfigurationError: where a head is in two groups, or in none although a later one is; where there is no head;
            for a mechanism that tells heads apart (`Mechanism.tells_heads_apart`).
    """

    __slots__ = ("groups",)
    groups: tuple[HeadGroup, ...]
    """The heads by mechanism, in the order in which they were given; every head is in one."""

    def __init__(self, groups: Iterable[tuple[Iterable[int], MechanismLike]]) -> None:
        self._set("", [(tuple(heads), Mechanism.of(mechanism)) for heads, mechanism in groups])

    def _set(self, prefix: str, groups: Sequence[tuple[tuple[Any, ...], Mechanism]], heads: int | None = None) -> None:
        """Checks and keeps the groups; errors name their fields after `prefix`. As many `heads` as there must be, where that is said."""
        count = sum(len(own) for own, _ in groups) if heads is None else heads
        seen: set[int] = set()
        for n, (own, mechanism) in enumerate(groups):
            if mechanism.tells_heads_apart:
                problem = f"is {mechanism}, whose heads have numbers of their own, which are others' in a group"
                raise _wrong(f"{prefix}groups[{n}].mechanism", problem, "leave its bias or its maps per head out")
            field = f"{prefix}groups[{n}].heads"
            if not own:
                raise _wrong(field, "is empty", "leave a group without heads out")
            for head in own:
                if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < count:
                    raise _wrong(field, f"has {head!r}, and there are {count} heads", f"name heads by numbers from 0 to {count - 1}")
                if head in seen:
                    raise _wrong(field, f"has head {head}, which is there twice", "give every head one mechanism")
                seen.add(head)
        if missing := sorted(set(range(count)) - seen):
            raise _wrong(f"{prefix}groups", f"leaves head {missing[0]} without a mechanism", "give every head one")
        if not count:
            raise _wrong(f"{prefix}groups", "has no heads", "give every head a mechanism")
        object.__setattr__(self, "groups", tuple(HeadGroup(tuple(sorted(own)), mechanism) for own, mechanism in groups))

    @classmethod
    def _of(cls, prefix: str, groups: Sequence[tuple[tuple[Any, ...], Mechanism]], heads: int) -> HeadMechanisms:
        found = cls.__new__(cls)
        found._set(prefix, groups, heads)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"HeadMechanisms are immutable; make others to change `{name}`")

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return sum(len(group.heads) for group in self.groups)

    @property
    def tied(self) -> bool:
        """Whether the keys of all heads are their queries, so that calls have no ``k``."""
        return all(group.mechanism.tied for group in self.groups)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the tensors that can be learned in some of the groups."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group.mechanism.parameters))

    @property
    def order(self) -> tuple[int, ...]:
        """Where each head is among the heads of all groups, one group after the other."""
        heads = [head for group in self.groups for head in group.heads]
        return tuple(sorted(range(len(heads)), key=heads.__getitem__))

    def of_head(self, head: int) -> Mechanism:
        """The mechanism of a head, by its number from 0 on."""
        return next(group.mechanism for group in self.groups if head in group.heads)

    def to_dict(self) -> dict[str, Any]:
        """As in a fit: ``heads`` and ``groups``."""
        groups = [{"heads": list(group.heads), "mechanism": group.mechanism.to_dict()} for group in self.groups]
        return {"heads": self.heads, "groups": groups}

    def __str__(self) -> str:
        return "; ".join(map(str, self.groups))

    def __repr__(self) -> str:
        return f"HeadMechanisms([{', '.join(f'({list(group.heads)}, {group.mechanism!r})' for group in self.groups)}])"

    def __eq__(self, other: object) -> bool:
        return self.groups == other.groups if isinstance(other, HeadMechanisms) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return (HeadMechanisms, ([(group.heads, group.mechanism) for group in self.groups],))


@dataclass(frozen=True)
class Fit:
    """A mechanism for every head of a model's layers."""

    layers: Mapping[str, HeadMechanisms]
    """By the names that `resolvent.analyze` gives the layers."""
    measure: str = "cosine"
    """What the target is of: ``cosine``, at least, or ``error``, at most."""
    target: float | None = None
    """What every head was to reach."""
    cost: str = "time"
    """What was saved: ``time`` or ``operations``."""
    budget: float | None = None
    """The share of dense softmax's cost that all heads together could take; ``None``: there was no limit."""
    causal: bool = False
    """Whether it was found where tokens see themselves and earlier ones only."""

    def to_dict(self) -> dict[str, Any]:
        """The document that `load_fit` and the program read."""
        layers = [{"name": name, **mechanisms.to_dict()} for name, mechanisms in self.layers.items()]
        about = {"measure": self.measure, "target": self.target, "cost": self.cost, "budget": self.budget, "causal": self.causal}
        return {"fit": _VERSION, **about, "layers": layers}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the document to a file."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        width = max((len(name) for name in self.layers), default=0)
        return "\n".join(f"{name.ljust(width)}  {mechanisms}" for name, mechanisms in self.layers.items())


FitLike = Union[Fit, str, "os.PathLike[str]", Mapping[str, Any]]
"""What calls take for a fit: one, the path of its file, or what the file holds."""


def load_fit(fit: FitLike) -> Fit:
    """Reads a fit: the file ``fit.json`` of ``resolvent analyze --fit``, or what such a file holds.

    Args:
        fit: The file's path, or a mapping as in the file. Keys that are not known are not looked at.

    Raises:
        ConfigurationError: naming the field, for a file that cannot be read, another version of the format, a head that is there twice or
            has no mechanism, and mechanisms that are none.
    """
    if isinstance(fit, Fit):
        return fit
    document = fit if isinstance(fit, Mapping) else _read(fit)
    version = document.get("fit")
    if version != _VERSION or isinstance(version, bool):
        raise _wrong("fit", f"is {version!r}", f"expected {_VERSION}, the version of the format that is read here")
    layers: dict[str, HeadMechanisms] = {}
    for n, entry in enumerate(_get(document, "", "layers", list)):
        prefix = f"layers[{n}]."
        name = _get(entry, prefix, "name", str)
        if name in layers:
            raise _wrong(f"{prefix}name", f"is {name!r}, which is there twice", "name every layer once")
        layers[name] = _layer(entry, prefix)
    about = {name: document[name] for name in ("measure", "target", "cost", "budget", "causal") if name in document}
    return Fit(layers, **about)


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        document = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "pass the file fit.json that `resolvent analyze --fit` writes"
        message = f"argument `fit` is {os.fspath(path)!r}, which cannot be read: {error}; {remedy}"
        raise ConfigurationError(message, code="argument", field="fit", remedy=remedy) from error
    if not isinstance(document, dict):
        raise _wrong(".", f"is {type(document).__name__}", 'expected an object like {"fit": 1, "layers": [...]}')
    return document


def _layer(entry: Mapping[str, Any], prefix: str) -> HeadMechanisms:
    groups = []
    for n, group in enumerate(_get(entry, prefix, "groups", list)):
        own = f"{prefix}groups[{n}]."
        document = _get(group, own, "mechanism", Mapping)
        try:
            mechanism = Mechanism.of(document)
        except Error as error:
            raise _wrong(f"{own}mechanism", f"is no mechanism: {error}", error.remedy or "name one") from error
        groups.append((tuple(_get(group, own, "heads", list)), mechanism))
    return HeadMechanisms._of(prefix, groups, _get(entry, prefix, "heads", int))


def _get(entry: Any, prefix: str, name: str, kind: type) -> Any:
    """A field, of its kind."""
    found = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        what = {list: "a list", str: "a string", int: "a number", Mapping: "an object"}[kind]
        raise _wrong(f"{prefix}{name}", "is missing" if found is None else f"is {type(found).__name__}", f"expected {what}")
    return found


def _ranges(heads: tuple[int, ...]) -> str:
    """``0, 2-4``."""
    runs: list[list[int]] = []
    for head in heads:
        if runs and runs[-1][-1] == head - 1:
            runs[-1][1:] = [head]
        else:
            runs.append([head])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _described(mechanism: Mechanism) -> str:
    """The mechanism with what differs from its preset: ``routed clusters=64``."""
    if mechanism.id == "composed":
        return str(mechanism)
    usual, own = (_flat(one.to_dict()) for one in (Mechanism(mechanism.id), mechanism))
    changed = (f" {name}={value}" for name, value in own.items() if usual.get(name) != value)
    return str(mechanism) + "".join(changed)


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {name: value})
    return flat
