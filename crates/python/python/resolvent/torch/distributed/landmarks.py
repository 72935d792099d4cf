"""Mechanisms through landmarks: what the shards exchange is as long as the landmarks are many, whatever the number of tokens.

Landmarks are means of windows of the whole sequence. Products with all tokens, of which each process has its own, are calls of the
kernels with the landmarks for queries or for keys; what lies between them, of landmarks alone, every process computes in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...mechanism import Mechanism
from ...values import Gaussian, Laplacian, Unnormalised
from .. import _kernels
from .._kernels import Forward, Options
from ..functional import attend, parameter_values
from .call import Call, divided, refused, with_ones
from .collectives import Shards, largest, reduced, refuse_second_derivatives, total
from .inverses import inverse, pseudo_inverse
from .ring import Rows

__all__ = ["check", "factors", "laplacian", "soft"]


def check(mechanism: Mechanism) -> None:
    """Refuses what has no form in shards."""
    m = _structure(mechanism)
    if m["landmarks"]["kind"] != "pool":
        raise refused(f"landmarks of kind {m['landmarks']['kind']}", "take means of windows, of kind pool")
    if m.get("grid") is not None and "count" in m["landmarks"]:
        raise refused("a number of landmarks on a grid", "give the side of a window, `ratio`, or leave out `grid`")
    if m.get("landmark_act") or m.get("value_conv"):
        raise refused("a filter or an activation beside the landmarks", "leave out `landmark_act` and `value_conv`")
    if m.get("inverse") == "eigen" or m.get("newton_init") == "backtrack":
        raise refused("this inverse", "take `cholesky`, or `newton-schulz` from another start")
    if m.get("inverse") == "cg":
        raise refused("this inverse", "take `cholesky`, which gives the same")
    if "structure" in mechanism.to_dict() and m["gradient"] != "unrolled":
        raise refused("an implicit gradient of the pseudo-inverse", "take `unrolled`")
    if (m.get("whitening") or "none") == "full":
        raise refused("full whitening", "take `diagonal`")


def _structure(mechanism: Mechanism) -> dict[str, Any]:
    document = mechanism.to_dict()
    found: dict[str, Any] = document.get("structure") or document
    return found


def _windows(m: dict[str, Any], shards: Shards) -> tuple[Tensor, int]:
    """The window of every token of this shard, and how many there are."""
    at, tokens = torch.arange(shards.offset, shards.offset + shards.lengths[shards.rank]), shards.tokens
    ratio, count = m["landmarks"].get("ratio"), m["landmarks"].get("count")
    if m.get("grid") is not None:
        height, width = m["grid"]
        across = -(-width // ratio)
        return (at // width // ratio) * across + at % width // ratio, -(-height // ratio) * across
    if ratio is not None:
        return at // ratio, -(-tokens // ratio)
    count = min(count, tokens)
    # Window `i` begins at `floor(i tokens / count)`.
    starts = torch.arange(1, count) * tokens // count
    return torch.bucketize(at, starts, right=True), count


def _means(x: Tensor, keep: Tensor, m: dict[str, Any], shards: Shards) -> tuple[Tensor, Tensor]:
    """Landmarks ``[batch, heads, count, channels]``, and which of them there are, ``[batch, count]``. `keep` is ``[batch, 1, tokens]``."""
    windows, count = _windows(m, shards)
    keep = keep.expand(x.shape[0], 1, -1)
    summed = x.new_zeros((*x.shape[:2], count, x.shape[-1]), dtype=torch.float64).index_add(2, windows, x.double() * keep[..., None])
    counts = keep.new_zeros((*keep.shape[:2], count), dtype=torch.float32).index_add(2, windows, keep.float())
    # Numbers of tokens have no gradient, but are on the way with what has.
    width = x.shape[1] * x.shape[-1]
    flat = summed.transpose(1, 2).reshape(x.shape[0], count, width).float()
    sums = total(torch.cat((flat, counts[:, 0, :, None]), -1), shards)
    counts = sums[..., width].detach()
    means = sums[..., :width] / counts.clamp_min(1.0)[..., None]
    return means.reshape(x.shape[0], count, *x.shape[1::2]).transpose(1, 2), counts > 0


def _among(u: Tensor, w: Tensor, alive: list[Tensor], mechanism: Mechanism, parameters: dict[str, Tensor]) -> Tensor:
    """The affinities of landmarks in float64; 0 where one of them is none."""
    rows = attend(u, w, _unit(w), mechanism, query_mask=alive[0], key_mask=alive[1], parameters=parameters)
    return rows.double()


def _unit(u: Tensor) -> Tensor:
    """Values with which a row of the output is a row of affinities."""
    return torch.eye(u.shape[2]).expand(*u.shape[:2], -1, -1).contiguous()


def _alone(a: Tensor, alive: Tensor) -> Tensor:
    """The matrix with the row of the identity for landmarks that are none."""
    return a + torch.diag_embed((~alive).to(a.dtype))[:, None]


def soft(call: Call, shards: Shards) -> Tensor:
    """``P^T c Y c (P v)``. "Softmax-free Linear Transformers", eq. 7 and 17: the landmarks and ``P v`` are exchanged."""
    m = call.document
    affinity = Mechanism(score=Gaussian(scale=m["scale"]), normalisation=Unnormalised())
    learned = {name: x for name, x in call.parameters.items() if name == "scale"}
    u, alive = _means(call.keys.float(), call.keys_kept(call.q.float()), m, shards)
    values = with_ones(call.v.float())
    sums = attend(u, call.keys.float(), values, affinity, query_mask=alive, key_mask=call.key_mask, parameters=learned)
    sums = total(sums, shards).double()
    a = _alone(_among(u, u, [alive, alive], affinity, learned), alive)
    y = inverse(a, m["inverse"], m["ridge"], m["newton_iterations"], m["newton_init"], m["gradient"] == "implicit")
    z = sums[..., :-1]
    if call.mechanism.id == "soft-pp":
        degree = sums[..., -1:].clamp_min(1e-30) if m["degree"] == "token" else a.sum(-1, keepdim=True)
        z = degree.rsqrt() * (y @ (degree.rsqrt() * z))
    else:
        z = y @ z
    return attend(call.q.float(), u, z.float(), affinity, key_mask=alive, query_mask=call.key_mask, parameters=learned)


def laplacian(call: Call, shards: Shards) -> Tensor:
    """``Cq X Ck^T``, centred and divided by the deviations of its columns: the landmarks, moments of ``Cq`` and a product with the values
    are exchanged. "LaplacianFormer", eq. 4 to 6."""
    m = call.document
    affinity = Mechanism(score=Laplacian(lambda_=m["lambda"]), normalisation=Unnormalised())
    learned = {name: x for name, x in call.parameters.items() if name == "lambda"}
    u, alive = _means(call.keys.float(), call.keys_kept(call.q.float()), m, shards)
    unit = _unit(u)
    sides = [
        attend(x.float(), u, unit, affinity, key_mask=alive, query_mask=mask, parameters=learned).double()
        for x, mask in ((call.q, call.query_mask), (call.keys, call.key_mask))
    ]
    a = _alone(_among(u, u, [alive, alive], affinity, learned), alive)
    x = inverse(a, m["inverse"], m["ridge"], m["newton_iterations"], None, True)
    return call.queries_kept(_whitened(call, m, shards, sides[0], sides[1] @ x).float())


def _whitened(call: Call, m: dict[str, Any], shards: Shards, cq: Tensor, columns: Tensor) -> Tensor:
    """The rows from ``Cq`` and ``Ck X``. The variance of a column is a form of the covariance of the rows of ``Cq``."""
    rows, keys = call.rows(cq), call.keys_kept(cq)
    numbers = torch.cat([x.expand(call.q.shape[0], 1, -1).sum(-1) for x in (rows, keys)], -1)
    sums = total(torch.cat((cq.sum(-2), columns.sum(-2), call.v.double().sum(-2)), -1), shards)
    numbers = total(numbers, shards).clamp_min(1.0)[:, None, None, :]
    queries, seen = numbers[..., :1], numbers[..., 1:]
    of_cq, of_columns, values = torch.split(sums[..., None, :], [cq.shape[-1], cq.shape[-1], call.v.shape[-1]], -1)
    centred = (cq - of_cq / queries) * rows[..., None]
    inverse_deviation = 1.0
    if m["whitening"] == "diagonal":
        covariance = total(centred.mT @ centred, shards) / queries
        variance = ((columns @ covariance) * columns).sum(-1, keepdim=True)
        inverse_deviation = (variance + m["whiten_eps"]).rsqrt()
    if m["centering"] == "per-query":
        columns = (columns - of_columns / seen) * keys[..., None]
    left = centred if m["centering"] == "per-key" else cq
    factor = seen ** {"unit": 0.0, "inv-sqrt-n": -0.5, "inv-n": -1.0}[m["weight_scale"]]
    out = factor * (left @ total((columns * inverse_deviation).mT @ call.v.double(), shards))
    return out + values / seen if m["bias_one_over_n"] else out


def factors(call: Call, shards: Shards) -> Tensor:
    """``F A^+ (B v)``, three softmaxes. "Nyströmformer", eq. 13 to 15: landmarks and the rows of ``B v`` with their logarithms are exchanged."""
    m = call.document["structure"]
    affinity, learned = Mechanism.from_dict({"mechanism": "composed", "score": call.score}), call.parameters
    of_q, alive_q = _means(call.q.float(), call.rows(call.q.float()), m, shards)
    of_k, alive_k = _means(call.keys.float(), call.keys_kept(call.q.float()), m, shards)
    a = _among(of_q, of_k, [alive_q, alive_k], affinity, learned)
    both = (alive_q & alive_k).to(a.dtype)
    z = pseudo_inverse(a + m["ridge"] * torch.diag_embed(both)[:, None], m["newton_iterations"])
    names, parameters = parameter_values(learned)
    options = Options(affinity, key_mask=call.key_mask, query_mask=alive_q, names=names)
    values = (of_q, call.keys.float().contiguous(), call.v.float().contiguous())
    sums: Tensor = _Merged.apply(options, shards, *values, *parameters)
    through = (z @ sums.double()).float()
    return attend(call.q.float(), of_k, through, affinity, key_mask=alive_k, query_mask=call.query_mask, parameters=learned)


class _Merged(torch.autograd.Function):
    """Rows of softmax of queries that all processes have over keys of which each has its own."""

    @staticmethod
    def forward(ctx: Any, options: Options, shards: Shards, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        own = Rows(means=True)
        own.add(_kernels.forward(options, q, k, v, parameters))
        most = largest(own.logs, shards)
        most = torch.where(most.isfinite(), most, 0.0)
        share = (own.logs - most).exp().float()[..., None]
        sums = reduced(torch.cat((own.out * share, share), -1), shards)
        divisor = sums[..., -1:]
        own.out = divided(sums[..., :-1], divisor)
        own.logs = divisor[..., 0].double().log() + most
        done = own.result()
        ctx.options, ctx.shards = options, shards
        ctx.save_for_backward(q, k, v, done.out, done.state, *parameters)
        return done.out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        q, k, v, out, state, *parameters = ctx.saved_tensors
        saved, wanted = Forward(out, state, None), [True] * len(parameters)
        # What is made of the rows, each process makes by itself.
        gradients = _kernels.backward(ctx.options, q, k, v, parameters, saved, reduced(dout, ctx.shards), wanted)
        return (None, None, *gradients[:3], *gradients[3])
