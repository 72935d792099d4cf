"""Mechanisms: published presets, and compositions of four values."""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, Mapping, Sequence, Union

from . import _resolvent
from .errors import ConfigurationError, DTypeError, UnsupportedError
from .values import Dense, DotExp, Normalisation, Score, Series, Structure, Value

__all__ = ["Mechanism", "MechanismLike", "mechanisms", "with_bias_of"]

MechanismLike = Union["Mechanism", str, Mapping[str, Any]]
"""What calls take for a mechanism: one, a preset's id, JSON, or the same as a mapping."""

#: Batch, heads, query tokens, key tokens, channels of a key, channels of a value.
Sizes = tuple[int, int, int, int, int, int]


class Mechanism:
    """An attention mechanism: four values and what is fixed about them. Immutable, hashable, picklable.

    ``Mechanism("fna")`` is a preset, ``Mechanism.fna(alpha=1.5)`` one with a field changed, and
    ``Mechanism(score=Levy(1.2), structure=Clustered(64))`` a composition. A preset and values together are the preset
    with these values replaced: ``Mechanism("ssa", series=Resolvent(0.8))``. Those that form pairs may have a bias by the distance of
    tokens: ``Mechanism("softmax", bias="alibi")``, ``bias={"kind": "buckets", "count": 32}``, ``bias={"kind": "grid", "height": 7,
    "width": 7}``; a bias that is a tensor comes with a call.
    """

    __slots__ = ("__weakref__", "_core", "_json")
    _core: _resolvent.Core
    _json: str

    def __init__(
        self,
        preset: str | None = None,
        *,
        score: Score | str | None = None,
        structure: Structure | str | None = None,
        normalisation: Normalisation | str | None = None,
        series: Series | str | None = None,
        bias: Mapping[str, Any] | str | None = None,
        **fields: Any,
    ) -> None:
        parts = {"score": score, "structure": structure, "normalisation": normalisation, "series": series}
        given = {name: _part(name, part) for name, part in parts.items() if part is not None}
        if preset is None and not given:
            raise ConfigurationError(
                "argument `preset` is missing; name a preset or give a score, a structure, a normalisation or a series",
                code="argument",
                field="preset",
                remedy="name a preset or give a score, a structure, a normalisation or a series",
            )
        document = {**given, **_json_names(fields), "mechanism": preset or "composed"}
        if bias is not None:
            document["bias"] = bias if isinstance(bias, str) else dict(bias)
        self._set(_core_of(document))

    def _set(self, core: _resolvent.Core) -> None:
        object.__setattr__(self, "_core", core)
        object.__setattr__(self, "_json", core.to_json())

    @classmethod
    def _of(cls, core: _resolvent.Core) -> Mechanism:
        mechanism = cls.__new__(cls)
        mechanism._set(core)
        return mechanism

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mechanism is immutable; make another one to change `{name}`")

    @classmethod
    def from_json(cls, text: str) -> Mechanism:
        """Reads a configuration, ``{"mechanism": "fna", "alpha": 1.5}``."""
        if not text.lstrip().startswith("{"):
            raise ConfigurationError(
                'configuration: not a JSON object; expected one like {"mechanism": "softmax"}',
                code="config",
                field=".",
                remedy='expected an object like {"mechanism": "softmax"}',
            )
        return cls._of(_resolvent.Core(text))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Mechanism:
        """The same from a mapping."""
        return cls._of(_core_of(dict(document)))

    @classmethod
    def of(cls, mechanism: MechanismLike) -> Mechanism:
        """A mechanism from what calls take for one."""
        if isinstance(mechanism, cls):
            return mechanism
        if isinstance(mechanism, str):
            return _of_text(mechanism)
        if isinstance(mechanism, Mapping):
            return cls.from_dict(mechanism)
        kind = type(mechanism).__name__
        raise DTypeError(
            f"argument `mechanism` is {kind}; expected a Mechanism, a preset's id, JSON or a mapping",
            code="argument",
            field="mechanism",
            remedy="expected a Mechanism, a preset's id, JSON or a mapping",
        )

    def to_json(self) -> str:
        """The whole configuration; equal mechanisms have the same."""
        return self._json

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as a dictionary."""
        document: dict[str, Any] = json.loads(self._json)
        return document

    @property
    def id(self) -> str:
        """The preset's id, or ``composed``."""
        return self._core.id

    @property
    def tied(self) -> bool:
        """Whether the keys are the queries, so that calls have no ``k``."""
        return self._core.tied

    @property
    def causal(self) -> bool:
        """Whether the configuration asks for causality; a call may add it."""
        return self._core.causal

    @property
    def clustered(self) -> bool:
        """Whether calls put tokens in clusters."""
        return self._core.clustered

    @property
    def tells_heads_apart(self) -> bool:
        """Whether heads of a call have numbers of their own that nobody learned: a bias, or maps per head."""
        return self._core.tells_heads_apart

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the tensors that can be learned."""
        return tuple(name for name, _ in self._core.parameters)

    @property
    def required_parameters(self) -> tuple[str, ...]:
        """Those that every call must give, as the configuration has no values for them."""
        return tuple(name for name, required in self._core.parameters if required)

    @property
    def caution(self) -> str | None:
        """What is allowed and likely a mistake."""
        return self._core.caution

    def parameter_shape(self, name: str, sizes: Sizes) -> tuple[int, ...]:
        """Shape of a parameter in calls of ``(batch, heads, seq_q, seq_kv, head_dim, value_dim)``."""
        return tuple(self._core.parameter_shape(name, sizes))

    def with_tied(self, tied: bool = True) -> Mechanism:
        """The same with keys that are the queries, or not."""
        return self._of(self._core.with_tied(tied))

    def with_causal(self, causal: bool = True) -> Mechanism:
        """The same with queries that see no later key, or with ones that see all."""
        return self._of(self._core.with_causal(causal))

    def with_seed(self, seed: int) -> Mechanism:
        """The same with another seed for what it draws: landmarks, clusters and sampled edges, random features."""
        return self._of(self._core.with_seed(seed))

    def with_window(self, window: int, sinks: int = 0) -> Mechanism:
        """The same with queries that see keys less than ``window`` tokens away, and the first ``sinks`` keys."""
        document = self.to_dict()
        structure = json.loads(self._core.structure())
        if structure["kind"] != "dense" or structure.get("window") is not None:
            why = f"`{self}` does not hold pairs by their positions, or has a window of its own"
            raise UnsupportedError(f"a sliding window is not supported: {why}", code="unsupported", field="window", remedy=why)
        document["structure"] = {**structure, **Dense(window=window, sinks=sinks).to_dict()}
        if "score" not in document and "scale" in document and self.id == "softmax":
            document["score"] = DotExp(scale=document.pop("scale")).to_dict()
        return self.from_dict(document)

    def __str__(self) -> str:
        return str(self._core)

    def __repr__(self) -> str:
        return f"Mechanism.from_json({self._json!r})"

    def __eq__(self, other: object) -> bool:
        return self._json == other._json if isinstance(other, Mechanism) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._json)

    def __reduce__(self) -> tuple[Callable[[str], Mechanism], tuple[str]]:
        return (Mechanism.from_json, (self._json,))

    def __copy__(self) -> Mechanism:
        return self

    def __deepcopy__(self, memo: Any) -> Mechanism:
        return self

    # Constructors of the presets, each with the fields of its configuration.

    @classmethod
    def softmax(cls, **fields: Any) -> Mechanism:
        """Dense softmax: ``scale``, ``causal``, ``tied``."""
        return cls("softmax", **fields)

    @classmethod
    def uniform(cls, **fields: Any) -> Mechanism:
        """The mean of the values: ``causal``."""
        return cls("uniform", **fields)

    @classmethod
    def infsa(cls, **fields: Any) -> Mechanism:
        """Pure InfSA: ``gamma``, ``activation``, ``scale``, ``eps``, ``tied``, ``causal``."""
        return cls("infsa", **fields)

    @classmethod
    def infsa_resolvent(cls, **fields: Any) -> Mechanism:
        """All hops of `infsa`: its fields, ``tol`` and ``max_iter``."""
        return cls("infsa-resolvent", **fields)

    @classmethod
    def linear_infsa(cls, **fields: Any) -> Mechanism:
        """Linear InfSA, O(N): ``gamma``, ``activation``, ``iterations``, ``operator``, ``norm_bias``, ..."""
        return cls("linear-infsa", **fields)

    @classmethod
    def soft(cls, **fields: Any) -> Mechanism:
        """SOFT, a Gaussian kernel through landmarks: ``landmarks``, ``grid``, ``inverse``, ``ridge``, ..."""
        return cls("soft", **fields)

    @classmethod
    def soft_pp(cls, **fields: Any) -> Mechanism:
        """SOFT++: the same with symmetric degrees."""
        return cls("soft-pp", **fields)

    @classmethod
    def fna(cls, **fields: Any) -> Mechanism:
        """Fractional neural attention: ``alpha``, ``kappa``, ``manifold``, ``intrinsic_dim``, ..."""
        return cls("fna", **fields)

    @classmethod
    def laplacian(cls, **fields: Any) -> Mechanism:
        """LaplacianFormer, through landmarks: ``lambda_``, ``landmarks``, ``whitening``, ..."""
        return cls("laplacian", **fields)

    @classmethod
    def laplacian_exact(cls, **fields: Any) -> Mechanism:
        """The kernel of `laplacian`, every pair of it."""
        return cls("laplacian-exact", **fields)

    @classmethod
    def ssa(cls, **fields: Any) -> Mechanism:
        """Spectral sparse attention: ``clusters``, ``samples``, ``estimator``, ..."""
        return cls("ssa", **fields)

    @classmethod
    def cosine(cls, **fields: Any) -> Mechanism:
        """Softmax of the cosine, Swin v2's."""
        return cls("cosine", **fields)

    @classmethod
    def sigmoid(cls, **fields: Any) -> Mechanism:
        """A sigmoid per pair."""
        return cls("sigmoid", **fields)

    @classmethod
    def relu(cls, **fields: Any) -> Mechanism:
        """ReLU over the number of keys."""
        return cls("relu", **fields)

    @classmethod
    def linear(cls, **fields: Any) -> Mechanism:
        """``elu + 1`` of queries and keys, O(N)."""
        return cls("linear", **fields)

    @classmethod
    def performer(cls, **fields: Any) -> Mechanism:
        """Positive orthogonal random features, O(N)."""
        return cls("performer", **fields)

    @classmethod
    def nystromformer(cls, **fields: Any) -> Mechanism:
        """Three softmaxes over landmarks, O(N)."""
        return cls("nystromformer", **fields)

    @classmethod
    def linformer(cls, **fields: Any) -> Mechanism:
        """Softmax over learned combinations of keys and values, O(N)."""
        return cls("linformer", **fields)

    @classmethod
    def routed(cls, **fields: Any) -> Mechanism:
        """Softmax over clusters of keys: each query sees those exactly that weigh most for it, and the means of the others."""
        return cls("routed", **fields)

    @classmethod
    def local(cls, **fields: Any) -> Mechanism:
        """Softmax within a window."""
        return cls("local", **fields)


def mechanisms() -> dict[str, str]:
    """The ids of the presets, each with a sentence on what it is."""
    return dict(_resolvent.presets())


def with_bias_of(text: str, shape: Sequence[int]) -> str:
    """The JSON of a mechanism, of which `text` is JSON or id, with a bias that is a tensor ``[batch, heads, queries, keys]``. Written as
    text, as compilers trace this."""
    axes = ",".join(f'"{name}":{"true" if n > 1 else "false"}' for name, n in zip(("batch", "heads", "queries", "keys"), shape))
    own = text.strip()
    document = own[:-1] + "," if own.startswith("{") else f'{{"mechanism":"{own}",'
    return f'{document}"bias":{{"kind":"tensor",{axes}}}}}'


@functools.lru_cache(maxsize=256)
def with_window_of(text: str, window: int) -> str:
    """The JSON of a mechanism, of which `text` is JSON or id, with a window."""
    return Mechanism.of(text).with_window(window).to_json()


@functools.lru_cache(maxsize=256)
def _of_text(text: str) -> Mechanism:
    return Mechanism._of(_resolvent.Core(text))


def _core_of(document: Mapping[str, Any]) -> _resolvent.Core:
    try:
        text = json.dumps(document, default=_encode, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"configuration: {error}; expected numbers, strings, lists and mappings",
            code="config",
            field=".",
            remedy="expected numbers, strings, lists and mappings",
        ) from error
    return _resolvent.Core(text)


def _encode(value: object) -> Any:
    if isinstance(value, Value):
        return value.to_dict()
    if hasattr(value, "item"):  # numbers of NumPy
        return value.item()
    raise TypeError(f"a mechanism's field cannot be {type(value).__name__}")


def _json_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name[:-1] if name.endswith("_") else name: value for name, value in fields.items()}


def _part(name: str, part: object) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Value) and part.PART == name:
        return part.to_dict()
    found = f"a {part.PART}" if isinstance(part, Value) else type(part).__name__
    raise ConfigurationError(
        f"configuration field `{name}` is {found}; expected one of resolvent.values or a kind",
        code="config",
        field=name,
        remedy="expected one of resolvent.values or a kind",
    )
