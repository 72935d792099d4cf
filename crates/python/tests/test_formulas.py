"""Mechanisms with structures against their formulas in float64, forward and backward."""

import functools
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
import formulas_of_structures as formulas  # noqa: E402

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402
from resolvent.torch import attend  # noqa: E402

SCALES = {"scale": [0.2, 0.35, 0.5]}
LENGTHS = {"lambda": [2.0, 4.0, 7.0]}
GAMMAS = {"gamma": [0.4, 0.7, 1.0]}
SEGMENTS = {"kind": "segment", "size": 8}


class Case(NamedTuple):
    mechanism: Mechanism
    formula: object
    parameters: dict
    causal: tuple = (False,)


def structured(name, **fields):
    return Mechanism.from_dict({"mechanism": name, "structure": fields})


def of_soft(formula, name, **options):
    newton = functools.partial(formulas.newton, implicit=options.get("gradient") != "unrolled")
    inverse = formulas.exact_inverse if options.get("inverse") == "cholesky" else newton
    return Case(Mechanism(name, **options), functools.partial(formula, inverse=inverse), SCALES)


CASES = {
    "linear-infsa": Case(Mechanism("linear-infsa"), formulas.linear_infsa, GAMMAS),
    "soft": of_soft(formulas.soft, "soft"),
    "soft, cholesky": of_soft(formulas.soft, "soft", inverse="cholesky"),
    "soft, unrolled": of_soft(formulas.soft, "soft", gradient="unrolled"),
    "soft-pp": of_soft(formulas.soft_pp, "soft-pp"),
    "soft-pp, cholesky": of_soft(formulas.soft_pp, "soft-pp", inverse="cholesky"),
    "soft-pp, unrolled": of_soft(formulas.soft_pp, "soft-pp", gradient="unrolled"),
    "laplacian": Case(Mechanism("laplacian"), formulas.laplacian, LENGTHS),
    "laplacian, cholesky": Case(Mechanism("laplacian", inverse="cholesky"), formulas.laplacian, LENGTHS),
    "laplacian-exact": Case(Mechanism("laplacian-exact"), formulas.laplacian_exact, LENGTHS),
    "performer": Case(Mechanism("performer"), formulas.performer, {**SCALES, **GAMMAS}, (False, True)),
    "nystromformer": Case(
        structured("nystromformer", landmarks={"kind": "pool", "count": 6}), formulas.nystromformer, {**SCALES, **GAMMAS}
    ),
    "linformer": Case(structured("linformer", count=6), formulas.linformer, {**SCALES, **GAMMAS}),
    "ssa": Case(Mechanism("ssa", clusters=4), formulas.clustered, {}),
    "ssa, centroid": Case(
        Mechanism("ssa", clusters=6, estimator="centroid", cluster_on="dual", routes=2),
        functools.partial(formulas.clustered, means=True),
        {},
    ),
    "routed": Case(
        Mechanism("routed", clusters=6, routes=2), functools.partial(formulas.clustered, means=True), {**SCALES, **GAMMAS}
    ),
    "routed, outliers": Case(
        Mechanism("routed", clusters=5, routes=2, outlier_globals=3), functools.partial(formulas.clustered, means=True), {}
    ),
    "routed, no means": Case(
        structured("routed", clusters=5, routes=2, estimator="importance", samples=0), formulas.clustered, {}
    ),
    "routed, segments": Case(
        Mechanism("routed", clusters=3, routes=2, causal_clusters=SEGMENTS),
        functools.partial(formulas.clustered, means=True, segment=8),
        {**SCALES, **GAMMAS},
        (True,),
    ),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def close(what, got, expected, tolerance):
    expected = expected.detach().double()
    error = (got.detach().double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp_min(1e-3), f"{what}: off by {error:.1e} of {expected.abs().max():.1e}"


def given(name, case, q, k, v, keep, causal):
    """What a formula has from the call: directions of features, a plan."""
    mechanism = case.mechanism
    if name.startswith("performer"):
        directions = torch.tensor(mechanism._core.feature_directions(q.shape[-1]), dtype=torch.float64)
        return {"directions": directions.reshape(-1, q.shape[-1])}
    if mechanism.clustered:
        arrays = [x.detach().numpy() for x in (q, k, v)]
        masks = {} if keep is None else {"key_mask": keep.numpy()}
        found = resolvent.clusters(*arrays, mechanism, causal=causal, **masks)
        return {"plan": formulas.Plan(found, (*q.shape[:-1], k.shape[-2]))}
    return {}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "causal"), [(name, causal) for name, case in CASES.items() for causal in case.causal])
def test_gradients_are_those_of_the_formula(name, causal, masked):
    case = CASES[name]
    tied = case.mechanism.tied
    q, k, v = (torch.randn(2, 3, 24, 8, requires_grad=True) for _ in range(3))
    keep = None
    if masked:
        keep = torch.rand(2, 24) > 0.3
        keep[:, 0] = True
        keep[0, 8:12] = False  # a window without a token
    parameters = {name: torch.tensor(x, requires_grad=True) for name, x in case.parameters.items()}
    if "key_map" in case.mechanism.parameters:
        maps = {name: torch.randn(6, 24) for name in ("key_map", "value_map")}
        parameters |= {name: (x / 24**0.5).requires_grad_() for name, x in maps.items()}
    out = attend(q, None if tied else k, v, case.mechanism, causal=causal, key_mask=keep, parameters=parameters)
    seen = torch.ones(2, 24, dtype=torch.bool) if keep is None else keep
    constants = given(name, case, q, k, v, keep, causal)
    wide = [x.double() for x in (q, k, v)]
    expected = case.formula(*wide, seen, causal, **parameters, **constants)
    close("out", out, expected, 2e-5)
    weights = torch.randn_like(out)
    tensors = {"q": q, **({} if tied else {"k": k}), "v": v, **parameters}
    got = torch.autograd.grad((out * weights).sum(), list(tensors.values()))
    want = torch.autograd.grad((expected * weights).sum(), list(tensors.values()))
    for what, one, other in zip(tensors, got, want):
        assert other.any(), what
        close(what, one, other, 1e-4)


def test_every_mechanism_has_a_formula():
    from formulas import FORMULAS

    known = {*FORMULAS, *(case.mechanism.id for case in CASES.values())}
    assert known == set(resolvent.mechanisms())
