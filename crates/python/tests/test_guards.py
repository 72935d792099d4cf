"""What calls of tensors refuse, as they would read it wrongly: derivatives in forward mode, tracing, other devices."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402

import resolvent  # noqa: E402
from resolvent import HeadMechanisms, Mechanism  # noqa: E402
from resolvent.torch import Attention, MultiheadAttention, attend, attend_varlen  # noqa: E402


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 4, 8, 4)


def refused(what):
    return pytest.raises(resolvent.UnsupportedError, match=what)


@pytest.mark.parametrize("place", range(3))
def test_forward_mode_is_refused(x, place):
    def call(tangible):
        return attend(*(tangible if n == place else x for n in range(3)))

    with refused("forward mode"):
        torch.func.jacfwd(call)(x)
    with refused("forward mode"):
        torch.func.jvp(call, (x,), (x,))
    with refused("forward mode"):
        torch.func.linearize(call, x)
    with forward_ad.dual_level():
        for requires in (False, True):
            dual = forward_ad.make_dual(x.clone().requires_grad_(requires), x)
            with refused("forward mode"):
                call(dual)
            with torch.no_grad(), refused("forward mode"):
                call(dual)
        # Others are computed as ever.
        torch.testing.assert_close(attend(x, x, x), attend(x.clone(), x, x))
    assert forward_ad._current_level < 0


def test_tangents_of_parameters_biases_and_arrays_are_refused(x):
    with forward_ad.dual_level():
        gamma = forward_ad.make_dual(torch.full((4,), 0.5), torch.ones(4))
        with refused("forward mode"):
            attend(x, x, x, "infsa", parameters={"gamma": gamma})
        bias = forward_ad.make_dual(torch.zeros(8, 8), torch.ones(8, 8))
        with refused("forward mode"):
            attend(x, x, x, bias=bias)
        heads = HeadMechanisms([([0, 1], "softmax"), ([2, 3], "fna")])
        with refused("forward mode"):
            attend(x, forward_ad.make_dual(x, x), x, heads)
        with pytest.raises(resolvent.TensorError, match="gradients"):
            resolvent.attend(x, forward_ad.make_dual(x, x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tracing_is_refused(x):
    with refused("torch.export"):
        torch.jit.trace(lambda y: attend(y, x, x), (x,), check_trace=False)
    layer, tokens = MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False), torch.randn(1, 5, 8)
    with torch.no_grad(), refused("torch.export"):
        torch.jit.trace(lambda y: layer(y, y, y)[0], (tokens,))


OTHERS = {
    "key_mask": torch.ones(2, 8, dtype=torch.bool),
    "query_mask": torch.ones(2, 8, dtype=torch.bool),
    "bias": torch.zeros(8, 8),
    "codebook": torch.zeros(4, 2, 4),
    "landmark_indices": torch.zeros(2, 3, dtype=torch.int64),
    "gamma": torch.full((4,), 0.5),
}


@pytest.mark.parametrize("name", ["q", "k", "v", *OTHERS])
def test_each_tensor_elsewhere_is_refused_by_name(x, name):
    tensors = {"q": x, "k": x, "v": x}
    where = tensors if name in tensors else {name: OTHERS[name]}
    for elsewhere, error in ((where[name].to("meta"), resolvent.DeviceError), (where[name].numpy(), resolvent.DTypeError)):
        given = {name: elsewhere}
        call = {**tensors, **({"parameters": given, "mechanism": "infsa"} if name == "gamma" else given)}
        with pytest.raises(error) as caught:
            attend(**call)
        assert caught.value.tensor == name and caught.value.remedy


def test_what_is_missing_is_named(x):
    for name in ("q", "v"):
        call = {"q": x, "k": x, "v": x, name: None}
        with pytest.raises(resolvent.DTypeError) as caught:
            attend(**call)
        assert caught.value.tensor == name
        with pytest.raises(resolvent.DTypeError) as caught:
            attend_varlen(**{n: None if y is None else y[0] for n, y in call.items()}, cu_seqlens_q=torch.tensor([0, 4]))
        assert caught.value.tensor == name
    with pytest.raises(resolvent.DeviceError, match="cu_seqlens_q"):
        attend_varlen(x[0], x[0], x[0], torch.tensor([0, 4], device="meta"))


def negated(x):
    """A view whose numbers have other signs than its memory, as imaginary parts of conjugates are."""
    view = torch._neg_view(x)
    assert view.is_neg() and torch.equal(view, -x)
    return view


@pytest.mark.parametrize("place", range(3))
def test_views_with_other_signs_are_read_as_what_they_are(x, place):
    views, plain = ([f(x) if n == place else x for n in range(3)] for f in (negated, torch.neg))
    assert torch.equal(attend(*views), attend(*plain))
    assert torch.equal(resolvent.attend(*views), resolvent.attend(*plain))
    weights = torch.randn_like(x)
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    found = attend(*(torch._neg_view(leaf) if n == place else x for n in range(3)))
    known = attend(*(-other if n == place else x for n in range(3)))
    gradients = [torch.autograd.grad(out, y, w)[0] for out, y, w in ((found, leaf, negated(weights)), (known, other, -weights))]
    assert torch.equal(*gradients)
    ours = resolvent.attend_backward(*views, negated(weights))
    theirs = resolvent.attend_backward(*plain, -weights)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3]))


def test_parameters_and_codebooks_with_other_signs(x):
    gamma = torch.full((4,), -0.5)
    assert torch.equal(
        attend(x, x, x, "infsa", parameters={"gamma": negated(gamma)}), attend(x, x, x, "infsa", parameters={"gamma": -gamma})
    )
    ssa, centroids = Mechanism.ssa(clusters=2), torch.randn(4, 2, 4)
    assert torch.equal(attend(x, x, x, ssa, codebook=negated(centroids)), attend(x, x, x, ssa, codebook=-centroids))
    bias = torch.randn(8, 8)
    assert torch.equal(attend(x, x, x, bias=negated(bias)), attend(x, x, x, bias=-bias))
    layer = Attention(4, 4, "softmax")
    assert torch.equal(layer(negated(x), x, x), layer(-x, x, x))
    with pytest.raises(resolvent.TensorError) as caught:
        resolvent.attend(x, x, x, out=negated(torch.empty_like(x)))
    assert caught.value.tensor == "out"
    assert np.array_equal(resolvent.attend(x, x, x).numpy(), attend(x, x, x).numpy())


@pytest.mark.parametrize("value", [-1, 2**70, "a", 1.5, True])
def test_numbers_of_threads_and_seeds_are_checked(x, value):
    calls = {
        "threads": [lambda: resolvent.attend(x, x, x, threads=value), lambda: resolvent.attend_backward(x, x, x, x, threads=value)],
        "seed": [lambda: resolvent.attend(x, x, x, dropout=0.1, seed=value), lambda: attend(x, x, x, dropout=0.1, seed=value)],
    }
    for field, given in calls.items():
        for call in given:
            with pytest.raises(resolvent.ConfigurationError) as caught:
                call()
            assert caught.value.field == field and caught.value.remedy
    with pytest.raises(resolvent.ConfigurationError):
        resolvent.set_num_threads(value)
    assert resolvent.attend(x, x, x, threads=np.int64(1), dropout=0.1, seed=np.uint8(3)).shape == x.shape


def test_masked_arrays_are_refused(x):
    numbers = x.numpy()
    masked = np.ma.masked_array(numbers, mask=numbers > 0)
    for place, name in enumerate("qkv"):
        with pytest.raises(resolvent.DTypeError, match="masked array") as caught:
            resolvent.attend(*(masked if n == place else numbers for n in range(3)))
        assert caught.value.tensor == name
    assert np.array_equal(resolvent.attend(masked.data, numbers, numbers), resolvent.attend(numbers, numbers, numbers))


@pytest.mark.parametrize("mechanism", ["softmax", "infsa", "fna", "local"])
def test_a_score_that_is_nan_is_left_out_as_the_documentation_says(x, mechanism):
    key = x.clone()
    key[:, :, 2, 1] = torch.nan
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[:, 2] = False
    torch.testing.assert_close(attend(x, key, x, mechanism), attend(x, x, x, mechanism, key_mask=keep), rtol=1e-5, atol=1e-6)
    assert torch.equal(attend(x, key, x, mechanism, key_mask=keep), attend(x, x, x, mechanism, key_mask=keep))
    assert attend(x, key, x, "linear").isnan().any(-1).all()
