"""Sequences that lie end to end, in one call, are what they are one by one."""

import numpy as np
import pytest

import resolvent
from resolvent import Mechanism

LENGTHS, KEYS = (7, 1, 23, 12), (5, 9, 2, 31)
BOUNDS, KEY_BOUNDS = (np.cumsum((0, *lengths), dtype=np.int32) for lengths in (LENGTHS, KEYS))
#: One of every structure, and one whose sequences share what is learned.
MECHANISMS = ["softmax", "fna", "infsa", "uniform", "linear", "local", "ssa", "routed", "soft-pp", "infsa-resolvent", "sigmoid"]
CROSS = ["softmax", "fna", "linear", "routed"]


def problem(dtype=np.float32, lengths=(LENGTHS, LENGTHS), heads=(4, 4), seed=0):
    """Queries, keys, values and what the output is weighed with, ``[tokens, heads, channels]``."""
    rng = np.random.default_rng(seed)
    shapes = [(sum(lengths[side]), heads[side], 8) for side in (0, 1, 1, 0)]
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


def untied(mechanism, k):
    return None if Mechanism.of(mechanism).tied else k


def one_by_one(call, tensors, bounds, key_bounds):
    """What `call` makes of every sequence alone, ``[1, heads, tokens, channels]``."""
    sides = (bounds, key_bounds, key_bounds, bounds)
    for n in range(len(bounds) - 1):
        parts = [None if x is None else x[b[n] : b[n + 1]].swapaxes(0, 1)[None] for x, b in zip(tensors, sides)]
        yield call(n, *parts)


def packed(parts):
    return np.concatenate([np.asarray(x)[0].swapaxes(0, 1) for x in parts])


@pytest.mark.parametrize(("mechanism", "causal"), [(m, False) for m in MECHANISMS] + [(m, True) for m in ("softmax", "fna", "linear")])
def test_sequences_are_what_they_are_alone(mechanism, causal):
    q, k, v, dout = problem()
    k, keep = untied(mechanism, k), np.random.default_rng(1).random(sum(LENGTHS)) > 0.2
    options = {"causal": causal, "key_mask": keep, "query_mask": keep}
    out, state = resolvent.attend_varlen(q, k, v, BOUNDS, mechanism=mechanism, **options, return_state=True)
    got = resolvent.attend_varlen_backward(q, k, v, dout, BOUNDS, mechanism=mechanism, **options, state=state)
    again = resolvent.attend_varlen_backward(q, k, v, dout, list(BOUNDS), mechanism=mechanism, **options)

    def alone(n, q, k, v, dout):
        mask = keep[None, BOUNDS[n] : BOUNDS[n + 1]]
        masks = {"causal": causal, "key_mask": mask, "query_mask": mask}
        out, state = resolvent.attend(q, k, v, mechanism, **masks, return_state=True)
        return out, resolvent.attend_backward(q, k, v, dout, mechanism, **masks, state=state)

    expected = list(one_by_one(alone, (q, k, v, dout), BOUNDS, BOUNDS))
    np.testing.assert_array_equal(out, packed([x for x, _ in expected]))
    for name, one, other in zip("qkv", got[:3], again[:3]):
        if one is None:
            assert name == "k" and Mechanism(mechanism).tied
            continue
        np.testing.assert_array_equal(one, packed([getattr(gradients, name) for _, gradients in expected]))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mechanism", CROSS)
def test_sequences_of_keys_of_other_lengths(mechanism):
    q, k, v, dout = problem(lengths=(LENGTHS, KEYS), heads=(4, 2))
    out = resolvent.attend_varlen(q, k, v, BOUNDS, KEY_BOUNDS, mechanism)
    got = resolvent.attend_varlen_backward(q, k, v, dout, BOUNDS, KEY_BOUNDS, mechanism)

    def alone(n, q, k, v, dout):
        return resolvent.attend(q, k, v, mechanism), resolvent.attend_backward(q, k, v, dout, mechanism)

    expected = list(one_by_one(alone, (q, k, v, dout), BOUNDS, KEY_BOUNDS))
    np.testing.assert_array_equal(out, packed([x for x, _ in expected]))
    for name, one in zip("qkv", got[:3]):
        np.testing.assert_array_equal(one, packed([getattr(gradients, name) for _, gradients in expected]))


def test_parameters_halves_windows_and_outputs():
    q, k, v, dout = problem(np.float16)
    gamma = np.array([0.2, 0.4, 0.6, 0.8], np.float32)
    options = {"mechanism": "infsa", "parameters": {"gamma": gamma}}
    out = np.empty_like(v)
    assert resolvent.attend_varlen(q, k, v, BOUNDS, **options, out=out) is out
    got = resolvent.attend_varlen_backward(q, k, v, dout, BOUNDS, **options)
    assert got.q.dtype == np.float16

    def alone(n, *tensors):
        return resolvent.attend_backward(*tensors, "infsa", parameters={"gamma": gamma})

    each = [x.parameters["gamma"] for x in one_by_one(alone, (q, k, v, dout), BOUNDS, BOUNDS)]
    np.testing.assert_allclose(got.parameters["gamma"], np.sum(each, 0, dtype=np.float64), rtol=1e-6)
    near = resolvent.attend_varlen(q, k, v, BOUNDS, window=3)
    np.testing.assert_array_equal(near[:7], resolvent.attend_varlen(q[:7], k[:7], v[:7], [0, 7], window=3))
    assert (near != resolvent.attend_varlen(q, k, v, BOUNDS)).any()
    # Each sequence draws for itself.
    twice = [np.concatenate((x[:7], x[:7])) for x in (q, k, v)]
    dropped = resolvent.attend_varlen(*twice, [0, 7, 14], dropout=0.4, seed=3)
    assert (dropped[:7] != dropped[7:]).any()
    np.testing.assert_array_equal(dropped, resolvent.attend_varlen(*twice, [0, 7, 14], dropout=0.4, seed=3))


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        ({"cu_seqlens_q": [0, 7, 7, 43]}, resolvent.ConfigurationError, "cu_seqlens_q"),
        ({"cu_seqlens_q": [1, 43]}, resolvent.ConfigurationError, "cu_seqlens_q"),
        ({"cu_seqlens_q": []}, resolvent.ConfigurationError, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 42]}, resolvent.ConfigurationError, "cu_seqlens_q"),
        ({"cu_seqlens_k": [0, 20, 43]}, resolvent.ConfigurationError, "cu_seqlens_k"),
        ({"cu_seqlens_k": [0, 7, 8, 31, 44]}, resolvent.ConfigurationError, "cu_seqlens_k"),
        ({"cu_seqlens_q": [0.0, 43.0]}, resolvent.TensorError, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, -1, 43]}, resolvent.TensorError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.zeros((2, 2), int)}, resolvent.TensorError, "cu_seqlens_q"),
        ({"q": np.zeros((1, 43, 4, 8), np.float32)}, resolvent.TensorError, "q"),
        ({"k": np.zeros((43, 4, 7), np.float32)}, resolvent.TensorError, "k"),
        ({"key_mask": np.ones(42, bool)}, resolvent.TensorError, "key_mask"),
        ({"mechanism": Mechanism.linear_infsa(broadcast=False)}, resolvent.UnsupportedError, "sequences end to end"),
        ({"mechanism": "linear-infsa", "causal": True}, resolvent.UnsupportedError, "causal"),
    ],
)
def test_what_does_not_fit_is_named(change, error, what):
    q, k, v, _ = problem()
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": BOUNDS}
    with pytest.raises(error) as caught:
        resolvent.attend_varlen(**{**call, **change})
    assert what in (caught.value.field, caught.value.tensor) and caught.value.remedy


def test_plans_of_sequences_are_for_them_alone():
    q, k, v, _ = problem()
    _, state = resolvent.attend_varlen(q, k, v, BOUNDS, mechanism="ssa", return_state=True)
    assert len(state.clusters.counts) == 4 * len(LENGTHS)
    with pytest.raises(resolvent.TensorError, match="4 sequences"):
        resolvent.attend(*(x[:7].swapaxes(0, 1) for x in (q, k, v)), "ssa", clusters=state.clusters)
    with pytest.raises(resolvent.TensorError) as caught:
        resolvent.attend_varlen(q[:7], k[:7], v[:7], [0, 7], mechanism="ssa", clusters=state.clusters)
    assert caught.value.tensor == "clusters"


torch = pytest.importorskip("torch")
import resolvent.torch  # noqa: E402
from resolvent.torch import attend_varlen  # noqa: E402


def leaves(**options):
    return [torch.from_numpy(x).requires_grad_() for x in problem(**options)[:3]]


def slopes(out, tensors):
    return torch.autograd.grad(out.square().sum(), tensors)


@pytest.mark.parametrize(
    ("mechanism", "compiled"),
    [(m, compiled) for m in ("softmax", "fna", "infsa", "ssa", "soft-pp") for compiled in (False, True) if m != "soft-pp" or not compiled],
)
def test_sequences_in_torch(mechanism, compiled):
    torch._dynamo.reset()
    q, k, v = leaves()
    k, tensors = untied(mechanism, k), [q, v] if Mechanism(mechanism).tied else [q, k, v]
    names = [n for n in ("gamma", "kappa") if n in Mechanism(mechanism).parameters]
    own = {n: torch.tensor([0.2, 0.4, 0.6, 0.8] if n == "gamma" else [3.0, 4.0, 5.0, 6.0], requires_grad=True) for n in names}
    bounds = torch.from_numpy(BOUNDS)
    call = torch.compile(attend_varlen, fullgraph=True, backend="aot_eager") if compiled else attend_varlen
    out = call(q, k, v, bounds, None, mechanism, parameters=own)
    parts = []
    for n in range(len(LENGTHS)):
        each = [None if x is None else x[BOUNDS[n] : BOUNDS[n + 1]].transpose(0, 1) for x in (q, k, v)]
        parts.append(resolvent.torch.attend(*each, mechanism, parameters=own).transpose(0, 1))
    expected = torch.cat(parts)
    assert torch.equal(out, expected) and (compiled or out.is_contiguous())
    for one, other in zip(slopes(out, [*tensors, *own.values()]), slopes(expected, [*tensors, *own.values()])):
        assert other.any()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_graph_for_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, frames = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(lambda q, k, v, b: attend_varlen(q, k, v, b, mechanism="fna", causal=True), backend=counter, dynamic=True)
    # Sizes that are equal by chance would be taken for one.
    for lengths in ((7, 5, 9, 2, 1), (4, 30), (3, 3, 3, 8)):
        q, k, v = leaves(lengths=(lengths, lengths))
        bounds = torch.tensor(np.cumsum((0, *lengths)))
        assert torch.equal(compiled(q, k, v, bounds), attend_varlen(q, k, v, bounds, mechanism="fna", causal=True))
        frames.add(counter.frame_count)
    assert len(frames) == 1, "no lengths have compiled anew"


def test_sequences_pass_opcheck():
    from resolvent.torch.operators import attend_op

    q, k, v = (x.transpose(0, 1) for x in leaves(lengths=(LENGTHS, KEYS)))
    bounds = [torch.from_numpy(x) for x in (BOUNDS, KEY_BOUNDS)]
    rest = ("", None, None, None, None, "softmax", False, "weights", 0.0, None, "full", *bounds, resolvent.__version__)
    torch.library.opcheck(attend_op, (q, k, v, [], *rest))


def test_states_of_unknown_length_are_not_compiled():
    q, _, v = leaves()
    with pytest.raises(RuntimeError, match="depends on each length"):
        torch.compile(lambda q, v: attend_varlen(q, None, v, torch.from_numpy(BOUNDS), None, "soft-pp"), fullgraph=True)(q, v)


def test_heads_of_keys_and_of_mechanisms():
    q, k, v = leaves(heads=(4, 2))
    bounds = torch.from_numpy(BOUNDS)
    with pytest.raises(resolvent.TensorError, match="enable_gqa"):
        attend_varlen(q, k, v, bounds)
    out = attend_varlen(q, k, v, bounds, enable_gqa=True)
    repeated = attend_varlen(q, *(x.repeat_interleave(2, 1) for x in (k, v)), bounds)
    assert torch.equal(out, repeated)
    halves = resolvent.HeadMechanisms([([0, 3], "softmax"), ([1, 2], "fna")])
    mixed = attend_varlen(q, k, v, bounds, None, halves, enable_gqa=True)
    torch.testing.assert_close(mixed[:, [0, 3]], out[:, [0, 3]])
    assert not torch.equal(mixed, out)
    with pytest.raises(resolvent.TensorError, match="axes"):
        attend_varlen(q[None], k[None], v[None], bounds)
    with pytest.raises(resolvent.TensorError, match="cu_seqlens_q"):
        attend_varlen(q, k, v, bounds.float(), enable_gqa=True)
