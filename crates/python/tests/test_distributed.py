"""A sequence that is spread over processes gives what it gives in one."""

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("PyTorch has no gloo", allow_module_level=True)

import shards  # noqa: E402
from shards import CASES, GATHERED, HALVED, LENGTHS, whole  # noqa: E402

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402
from resolvent.torch.distributed import attend, exchange_of  # noqa: E402


@pytest.fixture(scope="module")
def results():
    return shards.together(shards.every_case)


def close(got, expected, what, tolerance=2e-5):
    assert got.shape == expected.shape, what
    # A masked token's content is no number; what it is weighed with is.
    error, size = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error <= tolerance * max(size, 1e-3), f"{what}: off by {error:.1e} of {size:.1e}"


@pytest.mark.parametrize(("name", "causal", "masked"), CASES)
def test_shards_are_the_whole(results, name, causal, masked):
    out, gradients, parameters = whole(name, causal, masked)
    for exchange in ("auto", "gather") if name in GATHERED else ("auto",):
        parts = [result[name, causal, masked, exchange] for result in results]
        close(torch.cat([part[0] for part in parts], -2), out, "out")
        for n, (tensor, whole_gradient) in enumerate(zip("qkv", gradients)):
            if whole_gradient is not None:
                close(torch.cat([part[1][n] for part in parts], -2), whole_gradient, f"d{tensor}", 1e-4)
        for parameter, gradient in parameters.items():
            assert gradient.any()
            close(sum(part[2][parameter] for part in parts), gradient, f"d{parameter}", 1e-4)


@pytest.mark.parametrize("name", HALVED)
def test_shards_in_bfloat16(results, name):
    out, gradients, _ = whole(name, False, False, rounded=True)
    close(torch.cat([result[name][0] for result in results], -2).float(), out, "out", 1e-2)
    for n, (tensor, gradient) in enumerate(zip("qkv", gradients)):
        if gradient is not None:
            close(torch.cat([result[name][1][n] for result in results], -2).float(), gradient, f"d{tensor}", 2e-2)


def test_what_is_exchanged_does_not_grow_with_the_tokens(results):
    """The bytes that the processes have sent, against the formulas of docs/distributed.md."""
    batch, heads, d = shards.BATCH, shards.HEADS, shards.CHANNELS
    size = len(LENGTHS)
    slices, reduced = batch * heads, lambda numbers: 2 * 4 * numbers * (size - 1) // size

    def sent(name, causal=False):
        return [result[name, causal, False, "auto"][3] for result in results]

    # Forward and backward: a sum and its gradient.
    assert sent("uniform") == [2 * reduced(slices * (d + 1))] * size
    assert sent("linear") == [2 * reduced(slices * d * (d + 1))] * size
    landmarks, met = batch * 5 * (heads * d + 1), slices * 5 * (d + 1)
    assert sent("soft") == [2 * (reduced(landmarks) + reduced(met))] * size
    # Queries, keys and values go to the others; gradients of the last two come back.
    rows = [4 * slices * n * d for n in LENGTHS]
    assert sent("ssa") == [3 * (size - 1) * own + 2 * (sum(rows) - own) for own in rows]
    # A window of 4 reaches three tokens further, into the neighbours; before and behind the middle shard.
    edge = 4 * slices * 3 * 2 * d
    assert sent("local") == [2 * edge, 4 * edge, 2 * edge]
    # Every block passes the other processes twice, with its mask, and the gradients of what it met go home.
    block = [4 * slices * n * 2 * d for n in LENGTHS]
    mask = [batch * n for n in LENGTHS]
    ring = [sum(2 * (block[(r - s) % size] + mask[(r - s) % size]) + block[(r - s - 1) % size] for s in range(size - 1)) for r in range(size)]
    assert sent("softmax") == ring
    # Of three blocks the first passes two processes, the second one.
    further = 2 * (block[0] + mask[0]) * 2 + 2 * (block[1] + mask[1]) + 2 * block[0] + block[1]
    assert sum(sent("softmax", causal=True)) == further


@pytest.mark.parametrize(
    ("mechanism", "causal", "why"),
    [
        (Mechanism("ssa", series=resolvent.Hops(2)), False, "one hop"),
        (Mechanism("ssa", normalisation="frobenius"), False, "all rows"),
        ("infsa-resolvent", False, "one hop"),
        ("laplacian-exact", False, "all rows"),
        (Mechanism.fna(norm_exponent=0.5), False, "all rows"),
        (Mechanism.infsa(activation="abs"), False, "relu"),
        (Mechanism.linear_infsa(operator="exact"), False, "factored"),
        ("linear-infsa", True, "all tokens"),
        ("soft", True, "landmarks"),
        (Mechanism.soft(landmarks={"kind": "first", "count": 4}), False, "pool"),
        (Mechanism.soft(inverse="eigen"), False, "cholesky"),
        (Mechanism("linear", series=resolvent.Hops(2)), False, "one hop"),
        (Mechanism("soft", normalisation="row"), False, "of landmarks"),
        (Mechanism("nystromformer", structure=resolvent.Nystrom(gradient="implicit")), False, "unrolled"),
        (Mechanism("softmax", bias={"kind": "tensor", "keys": True}), False, "spread"),
    ],
    ids=str,
)
def test_what_has_no_form_in_shards_is_refused(mechanism, causal, why):
    with pytest.raises(resolvent.UnsupportedError, match=why) as caught:
        exchange_of(mechanism, causal)
    assert caught.value.remedy and caught.value.field == "mechanism"


def test_every_mechanism_is_exchanged_or_refused():
    ways = {}
    for name in resolvent.mechanisms():
        try:
            ways[name] = exchange_of(name)
        except resolvent.UnsupportedError as error:
            ways[name] = error.code
    assert ways == {
        "softmax": "ring",
        "fna": "ring",
        "cosine": "ring",
        "infsa": "norm",
        "uniform": "sums",
        "linear-infsa": "sums",
        "linear": "sums",
        "performer": "sums",
        "soft": "landmarks",
        "soft-pp": "landmarks",
        "laplacian": "landmarks",
        "nystromformer": "landmarks",
        "sigmoid": "gather",
        "relu": "gather",
        "local": "edges",
        "routed": "gather",
        "ssa": "clusters",
        "infsa-resolvent": "unsupported",
        "laplacian-exact": "unsupported",
        "linformer": "unsupported",
    }


def test_calls_say_what_is_wrong_before_anything_is_sent():
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(resolvent.ConfigurationError, match="init_process_group"):
        attend(q, k, v)
    with pytest.raises(resolvent.ConfigurationError, match="exchange"):
        attend(q, k, v, "soft", exchange="ring")
    with pytest.raises(resolvent.TensorError, match="axes"):
        attend(q[0], k[0], v[0])
    with pytest.raises(resolvent.TensorError, match="same tokens"):
        attend(q[:, :, :3], k, v, causal=True)
    with pytest.raises(resolvent.DTypeError, match="float64"):
        attend(q.double(), k.double(), v.double())
    with pytest.raises(resolvent.TensorError, match="same batch and heads"):
        attend(q, k[:, :1], v[:, :1])
    with pytest.raises(resolvent.TensorError, match="key_mask"):
        attend(q, k, v, key_mask=torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(resolvent.TensorError, match="masks of `soft` differ"):
        attend(q, None, v, "soft", key_mask=torch.ones(1, 4), query_mask=torch.zeros(1, 4))
    with pytest.raises(resolvent.TensorError, match="`k`"):
        attend(q, k, v, "soft")
    with pytest.raises(resolvent.ConfigurationError, match="gamma"):
        attend(q, k, v, parameters={"gamma": torch.ones(2)})


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mechanism", ["softmax", "infsa", "linear", "uniform", "soft", "relu", "ssa"])
def test_second_derivatives_are_refused(alone, mechanism):
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    out = attend(q, None if Mechanism(mechanism).tied else k, v, mechanism)
    with pytest.raises(resolvent.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(out.square().sum(), v, create_graph=True)


def test_lengths_are_checked(alone):
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    assert torch.equal(attend(q, k, v, lengths=[4]), attend(q, k, v))
    for lengths in ([5], [4, 4]):
        with pytest.raises(resolvent.ConfigurationError, match="lengths"):
            attend(q, k, v, lengths=lengths)
    with pytest.raises(resolvent.TensorError, match="no tokens"):
        attend(q[:, :, :0], k[:, :, :0], v[:, :, :0])
