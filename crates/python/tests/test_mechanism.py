"""Mechanisms as values: read, composed, written, compared, pickled, refused by name."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

import resolvent
from resolvent import Mechanism, errors, values

EXAMPLES = [
    Mechanism("softmax"),
    Mechanism.fna(alpha=1.5),
    Mechanism.laplacian_exact(lambda_=2.0),
    Mechanism("ssa", series=resolvent.Resolvent(0.8)),
    Mechanism(score=resolvent.Levy(1.2, kappa=3.0), structure=resolvent.Clustered(64), series=resolvent.Hops(3)),
    Mechanism(score=resolvent.Laplacian(2.0), structure=resolvent.Nystrom(16), normalisation=resolvent.Symmetric()),
]


def test_presets_have_constructors_and_sentences():
    presets = resolvent.mechanisms()
    assert len(presets) == 20 and all(presets.values())
    for preset in presets:
        assert getattr(Mechanism, preset.replace("-", "_"))() == Mechanism(preset), preset


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=str)
def test_values_survive(mechanism):
    for other in (
        pickle.loads(pickle.dumps(mechanism)),
        copy.deepcopy(mechanism),
        Mechanism.from_json(mechanism.to_json()),
        Mechanism.from_dict(mechanism.to_dict()),
        Mechanism.of(mechanism.to_json()),
        eval(repr(mechanism)),
    ):
        assert other == mechanism and hash(other) == hash(mechanism) and str(other) == str(mechanism)
    assert mechanism != Mechanism("uniform") and mechanism != mechanism.to_json()


def test_fields_reach_the_configuration():
    document = EXAMPLES[4].to_dict()
    assert document["score"]["kappa"] == 3.0 and document["structure"]["clusters"] == 64
    assert document["series"] == {"kind": "hops", "count": 3, "gamma": 1.0}
    assert EXAMPLES[2].to_dict()["lambda"] == 2.0
    assert str(EXAMPLES[4]) == "levy x clustered x row x hops"
    assert Mechanism.fna(alpha=np.float64(1.5)) == Mechanism.fna(alpha=1.5)


@pytest.mark.parametrize("value", values.VALUES, ids=lambda value: value.KIND)
def test_every_field_of_every_value_is_known(value):
    """The classes list the fields that the configuration has, and no other."""
    scores = {"features": "dot-exp", "nystrom": "gaussian", "clustered": "dot-exp"}
    normalisations = {"frobenius": "frobenius", "factors": "factors"}
    document = {
        "mechanism": "composed",
        "score": scores.get(value.KIND, "dot-exp" if value.KIND == "factors" else "gaussian"),
        "structure": "nystrom" if value.KIND == "factors" else "dense",
        "normalisation": normalisations.get(value.KIND, "row"),
        "series": "one-hop",
    }
    if value.KIND == "factors":
        document["structure"] = {"kind": "nystrom", "gradient": "unrolled", "ridge": 0}
    document[value.PART] = value().to_dict()
    written = Mechanism.from_dict(document).to_dict()[value.PART]
    listed = {field.name.rstrip("_") for field in dataclasses.fields(value)}
    left_out_where_default = {"window", "sinks"}
    assert set(written) - {"kind"} == listed - left_out_where_default
    for name in listed & left_out_where_default:
        given = value(window=8, **({name: 2} if name == "sinks" else {})).to_dict()
        assert name in Mechanism.from_dict({**document, value.PART: given}).to_dict()[value.PART]


def test_mechanisms_are_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        Mechanism("fna").alpha = 2.0


@pytest.mark.parametrize(
    ("make", "error", "field"),
    [
        (lambda: Mechanism("fna", alpha=3.0), errors.ConfigurationError, "alpha"),
        (lambda: Mechanism("fna", alpha="much"), errors.ConfigurationError, "alpha"),
        (lambda: Mechanism("fna", beta=1.0), errors.ConfigurationError, "beta"),
        (lambda: Mechanism("nothing"), errors.ConfigurationError, "mechanism"),
        (lambda: Mechanism(), errors.ConfigurationError, "preset"),
        (lambda: Mechanism(score=resolvent.Clustered(4)), errors.ConfigurationError, "score"),
        (lambda: Mechanism.from_json("fna"), errors.ConfigurationError, "."),
        (lambda: Mechanism.from_json('{"mechanism": "fna", "alpha": 1, "alpha": 2}'), errors.ConfigurationError, "."),
        (lambda: Mechanism("fna", alpha=float("nan")), errors.ConfigurationError, "."),
        (lambda: Mechanism("fna", alpha=object()), errors.ConfigurationError, "."),
        (lambda: Mechanism(structure=resolvent.Nystrom(8)), errors.UnsupportedError, None),
    ],
)
def test_bad_configurations_name_the_field(make, error, field):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, ValueError) and caught.value.remedy
    if field is not None:
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "error", "tensor"),
    [
        ({"q": [1.0]}, errors.DTypeError, "q"),
        ({"q": np.ones((1, 1, 4, 8))}, errors.DTypeError, "q"),
        ({"v": np.ones((1, 1, 4, 8), np.float16)}, errors.DTypeError, "v"),
        ({"q": np.ones(8, np.float32)}, errors.TensorError, "q"),
        ({"q": np.ones((1, 1, 1, 4, 8), np.float32)}, errors.TensorError, "q"),
        ({"k": np.ones((1, 1, 4, 7), np.float32)}, errors.TensorError, "k"),
        ({"k": np.ones((4, 8), np.float32)}, errors.TensorError, "k"),
        ({"v": np.ones((1, 1, 5, 8), np.float32)}, errors.TensorError, "v"),
        ({"v": np.float32(1)}, errors.TensorError, "v"),
        ({"k": None}, errors.TensorError, "k"),
        ({"mechanism": "soft"}, errors.TensorError, "k"),
        ({"key_mask": np.ones((1, 3), bool)}, errors.TensorError, "key_mask"),
        ({"key_mask": np.ones((1, 4), np.float32)}, errors.DTypeError, "key_mask"),
        ({"parameters": {"gamma": np.ones(1, np.float32)}}, errors.TensorError, "gamma"),
        ({"codebook": np.ones((1, 2, 8), np.float32)}, errors.TensorError, "codebook"),
    ],
)
def test_bad_tensors_are_named(change, error, tensor):
    call = {name: np.ones((1, 1, 4, 8), np.float32) for name in "qkv"}
    with pytest.raises(error) as caught:
        resolvent.attend(**{**call, **change})
    assert caught.value.tensor == tensor and caught.value.remedy


def test_bad_numbers_and_arguments():
    q = np.full((1, 1, 4, 8), 1e30, np.float32)
    one = np.ones_like(q)
    with pytest.raises(errors.NumericalError) as caught:
        resolvent.attend(q, q, one)
    assert caught.value.tensor == "q"
    for argument, value in [("threads", 0), ("strategy", "fast"), ("dropout_kind", "rows")]:
        with pytest.raises(errors.ConfigurationError) as caught:
            resolvent.attend(one, one, one, dropout=0.5, **{argument: value})
        assert caught.value.field == argument
    with pytest.raises(errors.ConfigurationError):
        resolvent.attend(one, one, one, dropout=1.5)
    with pytest.raises(errors.DTypeError):
        resolvent.attend(one, one, one, 7)
    for value in (0, True, 1.5):
        with pytest.raises(errors.ConfigurationError):
            resolvent.set_num_threads(value)
    with pytest.raises(errors.NumericalError):
        resolvent.attend(one, one[..., ::-1], one, Mechanism.infsa_resolvent(max_iter=1, gamma=0.99))


def test_exceptions_cross_processes():
    with pytest.raises(errors.ConfigurationError) as caught:
        Mechanism("fna", alpha=3.0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.field, again.code) == (str(caught.value), "alpha", "out-of-range")


def test_plans():
    plan = resolvent.plan((1, 8, 4096, 64))
    assert plan.strategy == "fused" and plan.flops_forward > 4096 * 4096 * 64 * 8 * 4 - 1
    causal = resolvent.plan((1, 8, 4096, 64), causal=True)
    assert causal.flops_forward < 0.6 * plan.flops_forward
    assert resolvent.plan((4096, 64), "soft").caution is not None
    held = [resolvent.plan((1, 8, 4096, 64), "laplacian", threads=threads).scratch_backward for threads in (1, 2, 8)]
    assert held[0] < held[1] < held[2]
    assert resolvent.plan((64, 64), value_dim=32, kv_tokens=128).stats == resolvent.plan((64, 64)).stats
    with pytest.raises(errors.UnsupportedError):
        resolvent.plan((64, 64), "linear-infsa", causal=True)
    with pytest.raises(errors.TensorError):
        resolvent.plan((64,))


def test_number_of_threads():
    assert resolvent.get_num_threads() >= 1
    resolvent.set_num_threads(3)
    try:
        assert resolvent.get_num_threads() == 3
    finally:
        resolvent.set_num_threads(None)
    resolvent.release_memory()
