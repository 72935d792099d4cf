"""The four values that a mechanism is made of: a score, a structure, a normalisation and a series.

A field that is not given has the default that the mechanism's documentation says; ``None`` is a value of its own
(``Clustered(balance=None)`` has no limit). ``docs/algebra.md`` of the project has what each means.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Union, final


@final
class Unset:
    """The type of a field that is not given."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset()


@dataclass(frozen=True)
class Value:
    """One of the four values, with its fields."""

    KIND: ClassVar[str]
    PART: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The value as it is in a mechanism's JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        given = {name: value for name, value in fields.items() if value is not UNSET}
        return {"kind": self.KIND, **given}

    def __repr__(self) -> str:
        given = {k: v for k, v in self.to_dict().items() if k != "kind"}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


class Score(Value):
    """How two tokens relate."""

    PART = "score"


class Structure(Value):
    """How the matrix between all tokens is held."""

    PART = "structure"


class Normalisation(Value):
    """What makes affinities weights."""

    PART = "normalisation"


class Series(Value):
    """How many hops over the graph of tokens."""

    PART = "series"


Number = Union[float, Unset]
OptionalNumber = Union[float, None, Unset]
OptionalInt = Union[int, None, Unset]


@dataclass(frozen=True, repr=False)
class DotExp(Score):
    """``exp(scale q.k)``, or ``exp(c tanh(scale q.k / c))`` with a softcap ``c``."""

    KIND = "dot-exp"
    scale: OptionalNumber = UNSET
    softcap: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class CosineExp(Score):
    """``exp(scale cos(q, k))``."""

    KIND = "cosine-exp"
    scale: Number = UNSET


@dataclass(frozen=True, repr=False)
class DotRelu(Score):
    """``max(0, scale q.k)``."""

    KIND = "dot-relu"
    scale: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class DotAbs(Score):
    """``|scale q.k|``."""

    KIND = "dot-abs"
    scale: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class DotGelu(Score):
    """``gelu(scale q.k)``, exact."""

    KIND = "dot-gelu"
    scale: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class DotSquaredRelu(Score):
    """``max(0, scale q.k)^2``."""

    KIND = "dot-squared-relu"
    scale: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class DotSigmoid(Score):
    """``1 / (1 + exp(-(scale q.k + offset)))``."""

    KIND = "dot-sigmoid"
    scale: OptionalNumber = UNSET
    offset: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class Gaussian(Score):
    """``exp(-scale |q - k|^2)``."""

    KIND = "gaussian"
    scale: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class Levy(Score):
    """``(1 + r / kappa)^-(d_M + alpha)`` of the distance ``r``."""

    KIND = "levy"
    alpha: Number = UNSET
    kappa: Union[float, str, None, Unset] = UNSET
    manifold: Union[Literal["euclidean", "sphere"], Unset] = UNSET
    intrinsic_dim: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class Student(Score):
    """``(1 + (r / kappa)^2)^(-(d_M + alpha) / 2)`` of the distance ``r``."""

    KIND = "student"
    alpha: Number = UNSET
    kappa: Union[float, str, None, Unset] = UNSET
    manifold: Union[Literal["euclidean", "sphere"], Unset] = UNSET
    intrinsic_dim: OptionalNumber = UNSET


@dataclass(frozen=True, repr=False)
class Laplacian(Score):
    """``exp(-|q - k|_1 / lambda)``; ``lambda_`` here, as Python keeps the word."""

    KIND = "laplacian"
    lambda_: Number = UNSET

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if "lambda_" in fields:
            fields["lambda"] = fields.pop("lambda_")
        return fields

    def __repr__(self) -> str:
        return f"Laplacian({'' if self.lambda_ is UNSET else f'lambda_={self.lambda_!r}'})"


@dataclass(frozen=True, repr=False)
class Constant(Score):
    """1 for every pair."""

    KIND = "constant"


@dataclass(frozen=True, repr=False)
class Dense(Structure):
    """Every pair, or those within a window."""

    KIND = "dense"
    window: OptionalInt = UNSET
    sinks: Union[int, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Clustered(Structure):
    """Clusters of tokens: exact within, sampled or averaged beyond."""

    KIND = "clustered"
    clusters: OptionalInt = UNSET
    samples: OptionalInt = UNSET
    pairs: Union[int, Literal["all"], Unset] = UNSET
    seed: Union[int, Unset] = UNSET
    kmeans_iterations: Union[int, Unset] = UNSET
    cluster_on: Union[str, Unset] = UNSET
    sampler: Union[str, None, Unset] = UNSET
    global_tokens: Union[int, "list[int]", None, Unset] = UNSET
    estimator: Union[str, Unset] = UNSET
    causal_clusters: Union["dict[str, Union[str, int]]", Unset] = UNSET
    jl_dim: OptionalInt = UNSET
    balance: OptionalNumber = UNSET
    routes: Union[int, Unset] = UNSET
    route_by: Union[Literal["cluster", "query"], Unset] = UNSET
    cluster_metric: Union[Literal["euclidean", "cosine"], Unset] = UNSET
    outlier_globals: Union[int, Unset] = UNSET
    outlier_queries: Union[int, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Nystrom(Structure):
    """Through landmarks: every token's affinity to them, and the inverse of theirs to each other.

    ``landmarks`` is an object such as ``{"kind": "pool", "count": 49}``; a number stands for this one.
    """

    KIND = "nystrom"
    landmarks: Union[int, "dict[str, Any]", Unset] = UNSET
    grid: Union["tuple[int, int]", None, Unset] = UNSET
    landmark_act: Union[bool, Unset] = UNSET
    inverse: Union[str, Unset] = UNSET
    newton_iterations: Union[int, Unset] = UNSET
    newton_init: Union[str, None, Unset] = UNSET
    ridge: Number = UNSET
    gradient: Union[str, Unset] = UNSET
    eigen_cutoff: Number = UNSET
    value_conv: Union[int, Unset] = UNSET

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if isinstance(self.landmarks, int):
            fields["landmarks"] = {"kind": "pool", "count": self.landmarks}
        return fields


@dataclass(frozen=True, repr=False)
class Features(Structure):
    """``phi(Q) phi(K)^T`` of feature maps, never multiplied out."""

    KIND = "features"
    map: Union[Literal["elu", "favor"], Unset] = UNSET
    count: OptionalInt = UNSET
    seed: Union[int, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Projected(Structure):
    """Pairs of queries and of `count` learned combinations of all keys."""

    KIND = "projected"
    count: Union[int, Unset] = UNSET
    per_head: Union[bool, Unset] = UNSET
    max_tokens: OptionalInt = UNSET
    seed: Union[int, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Row(Normalisation):
    """Each row by its sum."""

    KIND = "row"
    density_exponent: Number = UNSET


@dataclass(frozen=True, repr=False)
class Frobenius(Normalisation):
    """All of a head by its Frobenius norm."""

    KIND = "frobenius"
    eps: Number = UNSET


@dataclass(frozen=True, repr=False)
class Symmetric(Normalisation):
    """By the roots of row and column sums, or of the degrees of landmarks."""

    KIND = "symmetric"
    degree: Union[Literal["token", "landmark"], None, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Whitened(Normalisation):
    """Centred, divided by deviations, scaled and shifted."""

    KIND = "whitened"
    centering: Union[str, Unset] = UNSET
    whitening: Union[str, Unset] = UNSET
    whiten_eps: Number = UNSET
    weight_scale: Union[float, str, Unset] = UNSET
    bias_one_over_n: Union[bool, Unset] = UNSET


@dataclass(frozen=True, repr=False)
class Factors(Normalisation):
    """Through landmarks of queries and of keys, each of the three factors by its rows."""

    KIND = "factors"


@dataclass(frozen=True, repr=False)
class Unnormalised(Normalisation):
    """Affinities as they are, times a factor."""

    KIND = "none"
    factor: Union[Literal["unit", "inv-n"], Unset] = UNSET


@dataclass(frozen=True, repr=False)
class OneHop(Series):
    """``gamma W v``."""

    KIND = "one-hop"
    gamma: Number = UNSET


@dataclass(frozen=True, repr=False)
class Hops(Series):
    """The sum of ``gamma^t W^t v`` for ``t = 1..count``."""

    KIND = "hops"
    count: Union[int, Unset] = UNSET
    gamma: Number = UNSET


@dataclass(frozen=True, repr=False)
class Resolvent(Series):
    """All hops, ``((I - gamma W)^-1 - I) v``, solved."""

    KIND = "resolvent"
    gamma: Number = UNSET
    tol: Number = UNSET
    max_iter: OptionalInt = UNSET


VALUES: Final = tuple(
    value for part in (Score, Structure, Normalisation, Series) for value in part.__subclasses__()
)
__all__ = [
    "UNSET",
    "Normalisation",
    "Score",
    "Series",
    "Structure",
    "Unset",
    "Value",
    *(value.__name__ for value in VALUES),
]
