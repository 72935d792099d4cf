"""Products of bfloat16: as far from float64 as rounding the operands makes them, and refused where they are not."""

import numpy as np
import pytest

import resolvent

#: How many times the error of a naive computation one of the kernels may have: what the kernels' own tests allow.
OF_NAIVE = 2.0


def problem(mechanism, seed=0):
    rng = np.random.default_rng(seed)
    shape = (1, 2, 96, 32)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]


def rounded(x):
    """The nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def exact(x):
    return np.asarray(x, np.float64)


def solve(mechanism, q, k, v, dout, keep):
    """Output and gradients in float64, of operands that `keep` rounds or keeps."""
    q, k, v, dout = (keep(x) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    scores = scale * q @ k.swapaxes(-1, -2)
    if mechanism == "softmax":
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        held = keep(weights)
    else:
        weights = np.maximum(scores, 0.0)
        norm = np.sqrt((weights**2).sum((-2, -1), keepdims=True))
        weights, held = 0.7 * weights / (norm + 1e-6), 0.7 * keep(weights) / (norm + 1e-6)
    out = held @ v
    of_weights = dout @ v.swapaxes(-1, -2)
    if mechanism == "softmax":
        of_scores = weights * (of_weights - (dout * out).sum(-1, keepdims=True))
    else:
        whole = (of_weights * weights).sum((-2, -1), keepdims=True)
        of_scores = (0.7 * of_weights - whole * weights / 0.7 * (norm + 1e-6) / norm) / (norm + 1e-6) * (scores > 0)
    of_scores = keep(scale * of_scores)
    return out, of_scores @ k, of_scores.swapaxes(-1, -2) @ q, held.swapaxes(-1, -2) @ dout


def error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("mechanism", ["softmax", "infsa"])
def test_errors_are_those_of_rounded_operands(mechanism):
    q, k, v, dout = problem(mechanism)
    out, state = resolvent.attend(q, k, v, mechanism, precision="bf16", return_state=True)
    gradients = resolvent.attend_backward(q, k, v, dout, mechanism, precision="bf16", state=state)
    full = resolvent.attend(q, k, v, mechanism)
    true, naive = (solve(mechanism, q, k, v, dout, keep) for keep in (exact, rounded))
    assert error(full, true[0]) < 1e-5, "the formula is the mechanism"
    for name, got, right, rough in zip(("out", "dq", "dk", "dv"), (out, *gradients[:3]), true, naive):
        assert 1e-4 < error(got, right) <= OF_NAIVE * error(rough, right), name


def test_three_products_keep_sixteen_bits_where_there_are_tiles():
    q, k, v, dout = problem("softmax")
    try:
        plan = resolvent.plan(q.shape, precision="bf16x3")
    except resolvent.UnsupportedError as refused:
        assert "tiles" in str(refused) and refused.field == "precision"
        return
    assert (plan.precision, plan.instructions) == ("bf16x3", "amx-bf16")
    out, state = resolvent.attend(q, k, v, precision="bf16x3", return_state=True)
    gradients = resolvent.attend_backward(q, k, v, dout, precision="bf16x3", state=state)
    true = solve("softmax", q, k, v, dout, exact)
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *gradients[:3]), true):
        assert 1e-7 < error(got, right) < 2e-5, name
    with pytest.raises(resolvent.UnsupportedError, match="cancel"):
        resolvent.attend(q, k, v, "fna", precision="bf16x3")


def test_what_has_no_such_products_is_refused():
    q, k, v, dout = problem("softmax")
    assert resolvent.plan(q.shape, precision="bf16").precision == "bf16"
    assert resolvent.plan(q.shape).precision == "full"
    for call in (
        lambda **o: resolvent.attend(q, k, v, **o),
        lambda **o: resolvent.attend_backward(q, k, v, dout, **o),
        lambda **o: resolvent.plan(q.shape, **o),
        lambda **o: resolvent.attend_varlen(q[0], k[0], v[0], [0, 2], **o),
    ):
        for options in ({"mechanism": "uniform"}, {"mechanism": "linear"}, {"strategy": "reference"}):
            with pytest.raises(resolvent.UnsupportedError) as caught:
                call(precision="bf16", **options)
            assert caught.value.field == "precision" and caught.value.remedy
        with pytest.raises(resolvent.ConfigurationError, match="full or bf16") as caught:
            call(precision="half")
        assert caught.value.field == "precision"


torch = pytest.importorskip("torch")
import resolvent.torch  # noqa: E402


@pytest.mark.parametrize("mechanism", ["softmax", "infsa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_torch_it_is_that_of_arrays(mechanism, compiled):
    torch._dynamo.reset()
    arrays = problem(mechanism)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in arrays[:3])
    call = torch.compile(resolvent.torch.attend, fullgraph=True, backend="aot_eager") if compiled else resolvent.torch.attend
    out = call(q, k, v, mechanism, precision="bf16")
    got = torch.autograd.grad(out, [q, k, v], torch.from_numpy(arrays[3]))
    expected = resolvent.attend(*arrays[:3], mechanism, precision="bf16")
    np.testing.assert_array_equal(out.detach().numpy(), expected)
    for one, other in zip(got, resolvent.attend_backward(*arrays, mechanism, precision="bf16")[:3]):
        np.testing.assert_array_equal(one.numpy(), other)
    with pytest.raises(resolvent.UnsupportedError, match="precision bf16"):
        resolvent.torch.attend(q, k, v, "linear", precision="bf16")


def test_sequences_end_to_end_have_it_too():
    q, k, v, _ = (x[0].swapaxes(0, 1) for x in problem("softmax"))
    out = resolvent.attend_varlen(q, k, v, [0, 40, 96], precision="bf16")
    parts = [resolvent.attend(*(x[a:b].swapaxes(0, 1) for x in (q, k, v)), precision="bf16") for a, b in ((0, 40), (40, 96))]
    np.testing.assert_array_equal(out, np.concatenate(parts, 1).swapaxes(0, 1))
