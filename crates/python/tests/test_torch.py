"""The differentiable function and its operators, against formulas in float64."""

import pickle

import pytest

torch = pytest.importorskip("torch")
from formulas import FORMULAS, visible  # noqa: E402
from torch import nn  # noqa: E402
from torch.library import opcheck  # noqa: E402

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402
from resolvent.torch import attend  # noqa: E402
from resolvent.torch.operators import attend_backward_op, attend_op  # noqa: E402

PARAMETERS = {
    "fna": {"alpha": [1.2, 1.5, 1.8], "kappa": [3.0, 20.0, 50.0]},
    "infsa": {"gamma": [0.3, 0.6, 0.9]},
    "infsa-resolvent": {"gamma": [0.3, 0.6, 0.8]},
    "cosine": {"scale": [5.0, 8.0, 11.0]},
    "sigmoid": {"scale": [0.1, 0.2, 0.4]},
    "relu": {"scale": [0.1, 0.2, 0.4]},
}
CAUSAL = ("softmax", "uniform", "fna", "cosine", "sigmoid", "relu", "linear")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def problem(tokens=24, shape=(2, 3), channels=8):
    return [torch.randn(*shape, tokens, channels, requires_grad=True) for _ in range(3)]


def parameters_of(mechanism):
    return {name: torch.tensor(x, requires_grad=True) for name, x in PARAMETERS.get(mechanism, {}).items()}


def gradients(out, weights, tensors):
    return torch.autograd.grad((out * weights).sum(), tensors, retain_graph=True)


def close(got, expected, tolerance=2e-5):
    expected = expected.detach().double()
    error = (got.detach().double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp_min(1e-3), f"off by {error:.1e} of {expected.abs().max():.1e}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("mechanism", "causal"), [(name, False) for name in FORMULAS] + [(name, True) for name in CAUSAL]
)
def test_gradients_are_those_of_the_formula(mechanism, masked, causal):
    q, k, v = problem()
    parameters = parameters_of(mechanism)
    keep = None
    if masked:
        keep = torch.rand(2, 24) > 0.3
        keep[:, 0] = True
    out = attend(q, k, v, mechanism, causal=causal, key_mask=keep, parameters=parameters)
    wide = [x.double() for x in (q, k, v)]
    expected = FORMULAS[mechanism](*wide, visible(q, k, keep, causal), **parameters)
    close(out, expected)
    weights = torch.randn_like(out)
    tensors = [q, k, v, *parameters.values()]
    names = ["q", "k", "v", *parameters]
    got = gradients(out, weights, tensors)
    want = torch.autograd.grad((expected * weights).sum(), tensors, allow_unused=True)
    for name, one, other in zip(names, got, want):
        if other is None:
            assert not one.any(), name
        else:
            assert other.any(), name
            close(one, other, 1e-4)


@pytest.mark.parametrize("mechanism", list(resolvent.mechanisms()))
def test_operators_pass_opcheck(mechanism):
    q, k, v = problem(tokens=16)
    m = Mechanism(mechanism)
    names = [name for name in m.parameters if name not in m.required_parameters]
    sizes = (2, 3, 16, 16, 8, 8)
    defaults = {name: torch.tensor(m._core.parameter_default(name, sizes)) for name in names}
    parameters = [x.reshape(m.parameter_shape(name, sizes)).requires_grad_() for name, x in defaults.items()]
    if "gamma" in names:
        parameters[names.index("gamma")].data.mul_(0.9)
    k = None if m.tied else k
    keep = torch.ones(2, 16, dtype=torch.bool)
    keep[0, 10:] = False
    rest = (",".join(names), keep, keep, None, None, m.to_json(), False, "weights", 0.0, None, "full", None, None)
    opcheck(attend_op, (q, k, v, parameters, *rest, resolvent.__version__))
    out, state = attend_op(q, k, v, parameters, *rest, resolvent.__version__)
    tensors = [out.detach(), out.detach(), state, q.detach(), None if k is None else k.detach(), v.detach()]
    opcheck(attend_backward_op, (*tensors, [p.detach() for p in parameters], *rest))


@pytest.mark.parametrize("mechanism", ["softmax", "infsa", "fna", "soft-pp", "ssa", "linear-infsa"])
def test_compiled_is_eager(mechanism):
    m = Mechanism(mechanism)

    def loss(q, k, v, keep):
        return attend(q, None if m.tied else k, v, m, key_mask=keep).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for tokens in (24, 31):
        inputs, keep = problem(tokens), torch.rand(2, tokens) > 0.2
        for one, other in zip(
            torch.autograd.grad(compiled(*inputs, keep), inputs, allow_unused=True),
            torch.autograd.grad(loss(*inputs, keep), inputs, allow_unused=True),
        ):
            assert (one is None and other is None) or torch.equal(one, other)


def test_compiled_once_for_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, frames = CompileCounterWithBackend("aot_eager"), set()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, "fna"), backend=counter, dynamic=True)
    for tokens in (16, 24, 31, 50):
        inputs = problem(tokens)
        assert torch.equal(compiled(*inputs), attend(*inputs, "fna"))
        frames.add(counter.frame_count)
    assert len(frames) == 1, "no length has compiled anew"


def test_exported_with_dynamic_tokens():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, "softmax", causal=True)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    inputs = tuple(x.detach() for x in problem(24))
    program = torch.export.export(Model(), inputs, dynamic_shapes=({2: tokens},) * 3)
    assert "resolvent.attend" in program.graph_module.code
    # What compilers keep on disk of a graph is of this version alone: the state's length is not that of every other.
    assert repr(resolvent.__version__) in program.graph_module.code
    others = [x.detach() for x in problem(77)]
    assert torch.equal(program.module()(*others), attend(*others, causal=True))


def test_second_derivatives_are_refused():
    for call in (attend, torch.compile(attend, backend="aot_eager")):
        q, k, v = problem()
        with pytest.raises(RuntimeError if call is not attend else resolvent.UnsupportedError) as caught:
            (first,) = torch.autograd.grad(call(q, k, v).square().sum(), q, create_graph=True)
            first.square().sum().backward()
        assert call is not attend or caught.value.code == "double-backward"
    q, k, v = problem()
    rest = ("", None, None, None, None, "softmax", False, "weights", 0.0, None, "full", None, None, resolvent.__version__)
    out, state = attend_op(q, k, v, [], *rest)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(resolvent.UnsupportedError, match="second derivatives"):
        first.square().sum().backward()


def test_first_derivatives_with_create_graph_are_right():
    q, k, v = problem()
    plain = torch.autograd.grad(attend(q, k, v, "infsa").square().sum(), [q, k, v])
    graph = torch.autograd.grad(attend(q, k, v, "infsa").square().sum(), [q, k, v], create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, graph))


@pytest.mark.parametrize("mechanism", list(FORMULAS))
def test_padding_changes_nothing(mechanism):
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[0, 15:] = False
    results = []
    for junk in (0.0, float("nan")):
        torch.manual_seed(1)
        q, k, v = problem()
        for x in (q, k, v):
            x.data[0, :, 15:] = junk
        out = attend(q, k, v, mechanism, key_mask=keep, query_mask=keep)
        results.append([out, *torch.autograd.grad(out[0, :, :15].square().sum() + out[1].sum(), [q, k, v])])
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)
    short = [x.detach()[:1, :, :15] for x in (q, k, v)]
    close(results[0][0][:1, :, :15], attend(*short, mechanism), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3e-3), (torch.bfloat16, 3e-2)])
def test_halves(dtype, tolerance):
    inputs = [x.detach().to(dtype).requires_grad_() for x in problem()]
    out = attend(*inputs, "infsa", parameters={"gamma": torch.tensor([0.3, 0.6, 0.9], dtype=dtype)})
    wide = [x.detach().float().requires_grad_() for x in inputs]
    full = attend(*wide, "infsa", parameters={"gamma": torch.tensor([0.3, 0.6, 0.9], dtype=dtype).float()})
    assert out.dtype == dtype
    close(out, full, tolerance)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(full.sum(), wide)):
        assert one.dtype == dtype
        close(one, other, tolerance)


def test_autocast():
    q, k, v = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_strided_and_expanded_inputs():
    q, k, v = (torch.randn(2, 24, 3, 8, requires_grad=True) for _ in range(3))
    views = [x.transpose(1, 2) for x in (q, k, v)]
    one = torch.autograd.grad(attend(*views).square().sum(), [q, k, v])
    dense = [x.detach().contiguous().requires_grad_() for x in views]
    for x, y in zip(one, torch.autograd.grad(attend(*dense).square().sum(), dense)):
        assert torch.equal(x.transpose(1, 2), y)
    out = attend(*views)
    assert out.transpose(1, 2).is_contiguous(), "heads are merged without a copy"
    assert torch.equal(out, attend(*dense))
    shared = torch.randn(1, 3, 24, 8).expand(2, 3, 24, 8)
    assert torch.equal(attend(shared, shared, shared)[0], attend(shared[1:], shared[1:], shared[1:])[0])
    # The gradient of a sum is expanded from one number.
    attend(*dense).sum().backward()
    assert dense[2].grad.any()


def test_heads_of_keys_are_repeated_where_asked():
    q, (k, v) = torch.randn(2, 6, 24, 8), [torch.randn(2, 3, 24, 8, requires_grad=True) for _ in range(2)]
    out = attend(q, k, v, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    close(out, expected)
    for x, y in zip(torch.autograd.grad(out.square().sum(), [k, v]), torch.autograd.grad(expected.square().sum(), [k, v])):
        close(x, y)
    with pytest.raises(resolvent.TensorError):
        attend(q, k, v)
    with pytest.raises(resolvent.TensorError, match="multiple"):
        attend(q[:, :4], k, v, enable_gqa=True)


def test_dropout_follows_the_generator():
    q, k, v = problem()
    torch.manual_seed(3)
    first = attend(q, k, v, dropout=0.4)
    torch.manual_seed(3)
    assert torch.equal(attend(q, k, v, dropout=0.4), first)
    assert not torch.equal(attend(q, k, v, dropout=0.4), first)
    assert torch.equal(attend(q, k, v, dropout=0.4, seed=5), attend(q, k, v, dropout=0.4, seed=5))
    mean = torch.stack([attend(q, k, v, dropout=0.4) for _ in range(400)]).mean(0)
    close(mean, attend(q, k, v), 0.15)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, dropout=0.4), fullgraph=True)
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_gradients_of_clustered_calls_follow_their_plan():
    q, k, v = problem(tokens=48)
    out = attend(q, k, v, "ssa")
    got = torch.autograd.grad(out.square().sum(), [q, k, v])
    arrays = [x.detach().numpy() for x in (q, k, v)]
    want = resolvent.attend_backward(*arrays, 2 * out.detach().numpy(), "ssa")
    for one, other in zip(got, want[:3]):
        assert torch.equal(one, torch.from_numpy(other))


def test_inputs_that_were_written_to_are_noticed():
    q, k, v = problem()
    out = attend(q, k * 1.0, v)
    with torch.no_grad():
        v.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_constants_that_were_written_to_are_noticed():
    q, _, v = problem()
    landmarks, indices = Mechanism("soft", landmarks={"kind": "random", "count": 3, "seed": 0}), torch.tensor([[0, 3, 5]] * 2)
    clusters, codebook = Mechanism.ssa(clusters=2), torch.randn(3, 2, 8)
    for call, constant in (((None, v, landmarks), {"landmark_indices": indices}), ((q, v, clusters), {"codebook": codebook})):
        out = attend(q, *call, **constant)
        torch.autograd.grad(out.sum(), q, retain_graph=True)
        next(iter(constant.values())).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "tensor"),
    [
        ({"q": torch.zeros(2, 3, 24, 8).double()}, resolvent.DTypeError, "q"),
        ({"k": torch.zeros(2, 3, 24, 7)}, resolvent.TensorError, "k"),
        ({"v": torch.zeros(2, 3, 24, 8).half()}, resolvent.DTypeError, "v"),
        ({"v": torch.zeros(2, 3, 24, 8).to_sparse()}, resolvent.TensorError, "v"),
        ({"q": torch.zeros(2, 3, 24, 8, dtype=torch.complex64)}, resolvent.DTypeError, "q"),
        ({"key_mask": torch.zeros(2, 23, dtype=torch.bool)}, resolvent.TensorError, "key_mask"),
        ({"key_mask": torch.zeros(2, 24)}, resolvent.DTypeError, "key_mask"),
        ({"parameters": {"gamma": torch.ones(3)}}, resolvent.TensorError, "gamma"),
        ({"parameters": {"gamma": [1.0]}}, resolvent.DTypeError, "gamma"),
        ({"mechanism": "soft"}, resolvent.TensorError, "k"),
    ],
)
def test_bad_tensors_are_named(change, error, tensor):
    call = dict(zip("qkv", (torch.zeros(2, 3, 24, 8) for _ in range(3))))
    with pytest.raises(error) as caught:
        attend(**{**call, **change})
    assert caught.value.tensor == tensor and caught.value.remedy
    if "parameters" not in change:
        with pytest.raises(error) as caught:
            resolvent.attend(**{**call, **change})
        assert caught.value.tensor == tensor


def test_meta_tensors_have_shapes_alone():
    q, k, v = (x.to("meta") for x in problem())
    assert attend(q, k, v[..., :5]).shape == (2, 3, 24, 5)
    with pytest.raises(resolvent.TensorError, match="meta"):
        resolvent.attend(q.detach(), k.detach(), v.detach())


def test_what_transforms_of_functions_cannot_do_is_refused():
    q = torch.randn(2, 3, 24, 8)
    with pytest.raises(RuntimeError, match=r"[Bb]atching rule"):
        torch.vmap(lambda x: attend(x, x, x))(q)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: attend(x, x, x).sum())(q)


def test_threads_follow_torch():
    q, k, v = problem(tokens=130)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(attend(q, k, v))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_arrays_take_torch_tensors_of_every_type():
    q, k, v = (x.detach().bfloat16() for x in problem())
    out = resolvent.attend(q, k, v, "fna")
    assert isinstance(out, torch.Tensor) and torch.equal(out, attend(q, k, v, "fna"))
    with pytest.raises(resolvent.TensorError, match="requires gradients"):
        resolvent.attend(*problem())


def test_mechanisms_in_a_model_are_pickled():
    model = resolvent.torch.Attention(3, 8, "fna")
    again = pickle.loads(pickle.dumps(model))
    inputs = problem()
    assert torch.equal(model(*inputs), again(*inputs))


BIASES = {
    "pairs": (2, 3, 24, 24),
    "pairs of any head": (2, 1, 24, 24),
    "queries and keys": (24, 24),
    "keys": (2, 1, 1, 24),
    "heads and keys": (1, 3, 1, 24),
}


@pytest.mark.parametrize("axes", BIASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_biases_are_added_to_logits(axes, compiled):
    q, k, v = problem()
    bias = torch.randn(BIASES[axes])
    bias.view(-1)[1::7] = -torch.inf
    bias.requires_grad_()
    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out = call(q, k, v, bias=bias)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    logits = wide[0] @ wide[1].mT * 8**-0.5 + wide[3]
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    expected = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0) @ wide[2]
    close(out, expected)
    weights = torch.randn_like(out)
    for got, wanted in zip(gradients(out, weights, [q, k, v, bias]), gradients(expected, weights.double(), wide)):
        close(got, wanted)


def test_masks_of_pairs_keep_what_is_true():
    q, k, v = problem()
    keep = torch.rand(2, 1, 24, 24) > 0.4
    added = torch.zeros(2, 1, 24, 24).masked_fill(~keep, -torch.inf)
    for mechanism in ("softmax", "infsa", "fna", "sigmoid", '{"mechanism": "ssa", "clusters": 4}'):
        out = attend(q, k, v, mechanism, bias=keep)
        assert torch.equal(out, attend(q, k, v, mechanism, bias=added))
        assert torch.equal(out[:1], attend(q[:1], k[:1], v[:1], mechanism, bias=keep[:1]))
    # An expanded tensor has one number for all that it is expanded over.
    wide = keep.expand(2, 3, 24, 24)
    assert torch.equal(attend(q, k, v, bias=wide), attend(q, k, v, bias=keep))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_window_hides_what_is_further(compiled):
    q, k, v = (torch.randn(2, 4, 23, 8, requires_grad=True) for _ in range(3))
    apart = (torch.arange(23)[:, None] - torch.arange(23)).abs()

    def slopes(**given):
        call = torch.compile(lambda *x: attend(*x, "fna", **given), fullgraph=True) if compiled else lambda *x: attend(*x, "fna", **given)
        out = call(q, k, v)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    for near, hidden in zip(slopes(window=5, causal=True), slopes(bias=apart < 5, causal=True)):
        torch.testing.assert_close(near, hidden, rtol=1e-4, atol=1e-5)
    if not compiled:
        lengths = torch.tensor([0, 9, 23])
        tokens = [x.detach()[0].transpose(0, 1) for x in (q, k, v)]
        ends = resolvent.torch.attend_varlen(*tokens, lengths, window=3)
        alone = [attend(*(x[first:end].transpose(0, 1) for x in tokens), window=3).transpose(0, 1) for first, end in ((0, 9), (9, 23))]
        torch.testing.assert_close(ends, torch.cat(alone))
        mixed = resolvent.HeadMechanisms([([0, 2], "softmax"), ([1, 3], "fna")])
        heads = attend(q, k, v, mixed, window=5)
        torch.testing.assert_close(heads[:, 1], attend(q[:, 1:2], k[:, 1:2], v[:, 1:2], "fna", window=5)[:, 0])
        torch.testing.assert_close(heads[:, 0], attend(q[:, :1], k[:, :1], v[:, :1], window=5)[:, 0])
        for mechanism, window in (("linear", 5), (resolvent.Mechanism.local(window=4), 5), ("softmax", 0)):
            with pytest.raises(resolvent.Error, match="window"):
                attend(q, k, v, mechanism, window=window)


def test_biases_that_do_not_fit_are_refused():
    q, k, v = problem()
    with pytest.raises(resolvent.TensorError, match="bias"):
        attend(q, k, v, bias=torch.zeros(24, 23))
    with pytest.raises(resolvent.TensorError, match="twice"):
        attend(q, k, v, bias=torch.zeros(24, 24), parameters={"bias": torch.zeros(1, 1, 24, 24)})
    with pytest.raises(resolvent.UnsupportedError, match="pairs"):
        attend(q, k, v, "linear", bias=torch.zeros(24, 24))
    with pytest.raises(resolvent.Error, match="2\\^34"):
        attend(q, k, v, bias=torch.full((24, 24), torch.nan))
