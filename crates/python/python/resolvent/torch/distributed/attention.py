"""Attention of a sequence that is spread over processes."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import ConfigurationError, DTypeError, TensorError
from ...mechanism import Mechanism, MechanismLike
from ...values import DotRelu, DotSquaredRelu, Unnormalised
from .._kernels import Options
from ..functional import attend as attend_here
from ..functional import parameter_values
from . import landmarks, sums
from .call import Call, refused
from .clusters import clustered
from .collectives import Shards, gather, prefix_sum, total
from .ring import Part, ring

__all__ = ["attend", "exchange_of"]

#: Presets with fields of their own, and what their shards exchange. For others their four values decide.
_PRESETS = {
    "softmax": "ring",
    "fna": "ring",
    "infsa": "norm",
    "uniform": "sums",
    "linear-infsa": "sums",
    "ssa": "clusters",
    "soft": "landmarks",
    "soft-pp": "landmarks",
    "laplacian": "landmarks",
}
#: Rows over sums of affinities, or sums themselves, of pairs that are scored one by one.
_LOG_SCORES = ("dot-exp", "cosine-exp", "gaussian", "levy", "student", "laplacian", "constant")


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    mechanism: MechanismLike = "softmax",
    *,
    group: Any = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    lengths: Sequence[int] | None = None,
    exchange: str = "auto",
) -> Tensor:
    """`resolvent.torch.attend` of a sequence whose tokens are spread over the processes of a group, in their order; the rows of this one.

    Forward and backward equal one process's to rounding. Every process of the group calls it with the same arguments but for its own
    tokens, and all run the backward pass, of the sum of their losses. So gradients of q, k and v are whole, and those of parameters have
    to be summed over the group.

    Args:
        q: The queries of this process, ``[batch, heads, tokens, channels]``; float32, float16 or bfloat16. Processes may have different
            numbers of tokens.
        k: Its keys; ``None`` if and only if the mechanism is tied.
        v: Its values.
        mechanism: As in `resolvent.torch.attend`.
        group: The process group; all processes by default. Over gloo, as tensors are the CPU's.
        causal: Query ``i`` of the whole sequence sees no later key; every process then has as many queries as keys.
        key_mask: ``[batch, tokens]`` of this process's keys, true = keep.
        query_mask: The same of its queries.
        parameters: Values of the mechanism's parameters, the same in every process.
        lengths: Keys of every process, where they are known: spares the message that asks for them.
        exchange: ``auto``, or one of what `exchange_of` may say. ``gather`` brings all keys and values to every process, for any mechanism
            whose rows depend on their own query alone.

    Raises:
        UnsupportedError: The mechanism has no form in shards, it says why; or a second derivative is asked for.
    """
    found, given = Mechanism.of(mechanism), dict(parameters or {})
    causal = causal or found.causal
    way = _way(exchange, found, causal)
    _check(q, k, v, found, causal, given)
    _check_masks(q, v, key_mask, query_mask, found)
    if found._core.masks_tokens_once:
        query_mask = key_mask = query_mask if key_mask is None else key_mask
    shards = Shards.of(v.shape[-2], group, lengths)
    # Tied keys have been given, and causality is the whole sequence's.
    plain, gamma = _undamped(found.with_tied(False) if found.id not in ("soft", "soft-pp") else found, given)
    call = Call(q, k, v, plain.with_causal(False), causal, key_mask, query_mask, given)
    out = _computation(way, plain)(call, shards)
    return (out if gamma is None else gamma * out).to(q.dtype)


def _undamped(mechanism: Mechanism, parameters: dict[str, Tensor]) -> tuple[Mechanism, Tensor | None]:
    """The mechanism without the factor on its one hop, and this factor, taken from the parameters or the configuration."""
    document = mechanism.to_dict()
    series = document.get("series")
    if series is None:
        return mechanism, None
    given = parameters.pop("gamma", None)
    if given is None and series["gamma"] == 1.0:
        return mechanism, None
    gamma = torch.tensor(float(series["gamma"])) if given is None else given.float().reshape(-1, 1, 1)
    return Mechanism.from_dict({**document, "series": {**series, "gamma": 1.0}}), gamma


def _computation(way: str, mechanism: Mechanism) -> Callable[[Call, Shards], Tensor]:
    own = {
        "uniform": sums.uniform,
        "linear-infsa": sums.linear_infsa,
        "soft": landmarks.soft,
        "soft-pp": landmarks.soft,
        "laplacian": landmarks.laplacian,
    }
    usual = {"sums": sums.features, "landmarks": landmarks.factors, "ring": _ring, "norm": _infsa, "clusters": clustered}
    usual |= {"gather": _gathered, "edges": _gathered}
    return own.get(mechanism.id, usual[way]) if way in ("sums", "landmarks") else usual[way]


def exchange_of(mechanism: MechanismLike, causal: bool = False) -> str:
    """What the shards of a mechanism exchange: ``sums``, ``landmarks``, a ``norm`` and blocks, blocks along a ``ring``, ``edges`` of a window,
    all keys and values (``gather``), or these and all queries, which are clustered (``clusters``).

    Raises:
        UnsupportedError: The mechanism has no form in shards; it says why.
    """
    found = Mechanism.of(mechanism)
    causal, document = causal or found.causal, found.to_dict()
    way = _of_values(found, document) if "structure" in document else _PRESETS.get(found.id)
    if document.get("bias") is not None:
        # Distances are within windows, too; clusters have the places of all tokens.
        way = way if way in ("edges", "clusters") else "gather" if found._core.row_local else None
        if document["bias"]["kind"] == "tensor":
            raise refused("a bias of single pairs", "its numbers would have to be spread as well")
    if way is None or found.id == "fna" and document["norm_exponent"] != 0:
        raise refused(f"`{found}`", _why_not(found, document))
    if way == "landmarks":
        if causal:
            raise refused(f"`{found}` with causality", "landmarks see the whole sequence")
        landmarks.check(found)
    if found.id == "infsa" and document["activation"] != "relu":
        raise refused(f"the activation {document['activation']} of `infsa`", "take relu")
    if found.id == "linear-infsa" and causal:
        raise refused("`linear-infsa` with causality", "one vector of weights is of all tokens")
    if found.id == "linear-infsa" and document["operator"] != "factored":
        raise refused("`linear-infsa` with the exact operator", "it forms pairs; take `factored`")
    return way


def _of_values(mechanism: Mechanism, document: dict[str, Any]) -> str | None:
    """What the shards of a composition exchange, where it is of one hop."""
    score, structure, normalisation = (document[name]["kind"] for name in ("score", "structure", "normalisation"))
    plain = normalisation == "row" and not document["normalisation"]["density_exponent"]
    if document["series"]["kind"] != "one-hop":
        return None
    if structure == "features" and plain:
        return "sums"
    if structure == "nystrom":
        return "landmarks" if normalisation == "factors" else None
    every = structure == "dense" and document["structure"].get("window") is None
    if every and plain and score in _LOG_SCORES:
        return "ring"
    if not mechanism._core.row_local:
        return "clusters" if structure == "clustered" and (plain or normalisation == "none") else None
    return "edges" if _edge(document) is not None else "gather"


def _way(exchange: str, mechanism: Mechanism, causal: bool) -> str:
    usual = exchange_of(mechanism, causal)
    gathers = mechanism._core.row_local and usual not in ("gather", "edges")
    if exchange in ("auto", usual) or exchange == "gather" and gathers:
        return usual if exchange == "auto" else exchange
    remedy = f"`{mechanism}` has `{usual}`" + (" and `gather`" if gathers else "")
    raise ConfigurationError(f"argument `exchange` is {exchange!r}; {remedy}", code="argument", field="exchange", remedy=remedy)


def _why_not(mechanism: Mechanism, document: dict[str, Any]) -> str:
    if mechanism.id == "infsa-resolvent" or document.get("series", {}).get("kind") in ("hops", "resolvent"):
        return "a series has one round per hop; take a mechanism of one hop"
    if document.get("structure", {}).get("kind") == "nystrom":
        return "of landmarks there are `soft`, `soft-pp`, `laplacian` and the normalisation `factors`"
    return "its weights divide by sums over all rows; take one of rows, of landmarks or of sums"


def _check(q: Tensor, k: Tensor | None, v: Tensor, mechanism: Mechanism, causal: bool, parameters: Mapping[str, Tensor]) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and x.dim() != 4:
            remedy = "expected [batch, heads, tokens, channels]"
            raise TensorError(f"tensor `{name}` has {x.dim()} axes; {remedy}", code="shape", tensor=name, remedy=remedy)
        if x is not None and (x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)):
            remedy = "expected float32, float16 or bfloat16 on the CPU"
            raise DTypeError(f"tensor `{name}` is {x.dtype} on {x.device}; {remedy}", code="dtype", tensor=name, remedy=remedy)
    if (k is None) != mechanism.tied:
        remedy = "leave it out" if mechanism.tied else "pass the keys"
        raise TensorError(f"tensor `k` and `{mechanism}` do not go together; {remedy}", code="tensor", tensor="k", remedy=remedy)
    keys = q if k is None else k
    if keys.shape[:2] != q.shape[:2] or keys.shape[-1] != q.shape[-1] or v.shape[:-1] != keys.shape[:-1]:
        remedy = "give all the same batch and heads, q and k the same channels, and k and v the same tokens"
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)) if x is not None)
        raise TensorError(f"attend: {shapes}; {remedy}", code="shape", tensor="k" if k is not None else "v", remedy=remedy)
    clusters_queries = mechanism.clustered and not mechanism._core.row_local
    if (causal or clusters_queries or "factors" in str(mechanism.to_dict().get("normalisation"))) and q.shape[-2] != v.shape[-2]:
        remedy = "give every process the same tokens of both"
        message = f"attend: {q.shape[-2]} queries beside {v.shape[-2]} keys of this process with `{mechanism}`; {remedy}"
        raise TensorError(message, code="shape", tensor="q", remedy=remedy)
    for name in parameters:
        if name not in mechanism.parameters:
            remedy = f"it has {', '.join(mechanism.parameters) or 'none'}"
            raise ConfigurationError(f"`{mechanism}` has no parameter `{name}`; {remedy}", code="argument", field="parameters", remedy=remedy)


def _check_masks(q: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, mechanism: Mechanism) -> None:
    for name, mask, tokens in (("key_mask", key_mask, v.shape[-2]), ("query_mask", query_mask, q.shape[-2])):
        if mask is not None and tuple(mask.shape) != (q.shape[0], tokens):
            remedy = f"expected {[q.shape[0], tokens]}, of this process's tokens"
            raise TensorError(f"tensor `{name}` has shape {list(mask.shape)}; {remedy}", code="shape", tensor=name, remedy=remedy)
    both = key_mask is not None and query_mask is not None
    if both and mechanism._core.masks_tokens_once and not torch.equal(key_mask.bool(), query_mask.bool()):  # type: ignore[union-attr]
        remedy = "its queries are its keys; give one mask"
        raise TensorError(f"masks of `{mechanism}` differ; {remedy}", code="mask", tensor="query_mask", remedy=remedy)


def _ring(call: Call, shards: Shards) -> Tensor:
    names, values = parameter_values(call.parameters)
    options = Options(call.mechanism, call.causal, None, _mask(call.query_mask), names)
    return ring([Part(options, values, means=True)], shards, call.q, call.keys, call.v, call.key_mask)[0]


def _infsa(call: Call, shards: Shards) -> Tensor:
    """``gamma A v / (|A|_F + eps)``: sums and sums of squares of rows come of one passage of the blocks; the norm is a sum of the latter."""
    scale, eps = call.document["scale"], call.document["eps"]
    parts = []
    for score, counts in ((DotRelu(scale=scale), False), (DotSquaredRelu(scale=scale), True)):
        mechanism = Mechanism(score=score, normalisation=Unnormalised())
        parts.append(Part(Options(mechanism, call.causal, None, _mask(call.query_mask)), (), counts))
    rows, squares = ring(parts, shards, call.q, call.keys, call.v, call.key_mask)
    squares = squares.double()
    if call.causal:
        # Each row is divided by the norm of those up to it.
        squares = squares.cumsum(-2) + prefix_sum(squares.sum(-2, keepdim=True), shards)
    else:
        squares = total(squares.sum(-2, keepdim=True), shards)
    norm = squares.clamp_min(1e-300).sqrt() + eps
    divided: Tensor = call.gamma() * rows / norm.float()
    return divided


def _gathered(call: Call, shards: Shards) -> Tensor:
    needed = _needed(call, shards)
    keep = None if call.key_mask is None else call.key_mask.to(torch.uint8)[..., None]
    k, v = (gather(x, shards, needed) for x in (call.keys, call.v))
    mask = None if keep is None else gather(keep, shards, needed)[..., 0].bool()
    q, query_mask = call.q, _mask(call.query_mask)
    after = needed[shards.rank][1] - shards.offset - call.v.shape[-2]
    if _has_places(call.mechanism) and after:
        # The last query is where the last key is: behind the shard stand queries that nobody asks.
        rows = torch.ones((q.shape[0], q.shape[-2]), dtype=torch.bool) if query_mask is None else query_mask
        query_mask = torch.nn.functional.pad(rows, (0, after))
        q = torch.nn.functional.pad(q, (0, 0, 0, after))
    out = attend_here(q, k, v, call.mechanism, causal=call.causal, key_mask=mask, query_mask=query_mask, parameters=call.parameters)
    return out[..., : call.q.shape[-2], :].float()


def _needed(call: Call, shards: Shards) -> list[tuple[int, int]]:
    """Which keys of the whole sequence every process needs: all, those up to its last query, or those that its windows reach."""
    window, ranges = _edge(call.mechanism.to_dict()), []
    for rank, length in enumerate(shards.lengths):
        begin = sum(shards.lengths[:rank])
        end = begin + length
        low = 0 if window is None else max(begin - window + 1, 0)
        high = shards.tokens if window is None else min(end + window - 1, shards.tokens)
        ranges.append((low, end if call.causal else high))
    return ranges


def _edge(document: dict[str, Any]) -> int | None:
    """The window of a mechanism that sees nothing beyond it."""
    structure = document.get("structure") or {}
    window: int | None = structure.get("window")
    return None if structure.get("sinks") else window


def _has_places(mechanism: Mechanism) -> bool:
    """Whether pairs are told apart by where they stand."""
    document = mechanism.to_dict()
    return (document.get("structure") or {}).get("window") is not None or document.get("bias") is not None


def _mask(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.bool).contiguous()
