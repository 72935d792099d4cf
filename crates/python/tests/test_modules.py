"""Modules: what they learn, and multi-head attention beside PyTorch's own."""

import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402
from resolvent.torch import Attention, MultiheadAttention  # noqa: E402

CONVOLUTION = Mechanism("soft", landmarks={"kind": "conv", "ratio": 4})


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()


def tokens(batch=2, heads=3, length=24, channels=8):
    return [torch.randn(batch, heads, length, channels) for _ in range(3)]


def preset(name, tokens=24):
    """The preset, with a column for each of so many tokens where it learns maps of them."""
    return Mechanism.linformer(structure=resolvent.Projected(max_tokens=tokens)) if name == "linformer" else Mechanism(name)


@pytest.mark.parametrize("mechanism", [*map(preset, resolvent.mechanisms()), CONVOLUTION, Mechanism(score=resolvent.Student(1.5))], ids=str)
def test_everything_learned_receives_gradients_and_starts_at_the_default(mechanism):
    module = Attention(3, 8, mechanism)
    q, k, v = (x.requires_grad_() for x in tokens())
    k = None if module.mechanism.tied else k
    out = module(q, k, v)
    values = {n: p for n, p in module.values().items() if n in module.mechanism.required_parameters}
    plain = resolvent.torch.attend(q, k, v, mechanism, parameters=values)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert sorted(module.values()) == sorted(module.learned)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_a_step_learns():
    module, (q, k, v) = Attention(3, 8, "infsa"), tokens()
    target = resolvent.torch.attend(q, k, v, "infsa", parameters={"gamma": torch.tensor([0.2, 0.5, 0.9])})
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (module(q, k, v) - target).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(module.values()["gamma"], torch.tensor([0.2, 0.5, 0.9]), atol=0.02, rtol=0)


def test_which_parameters_are_learned():
    assert Attention(3, 8, "fna").learned == ("alpha", "kappa")
    assert Attention(3, 8, "fna", learned=["kappa"]).learned == ("kappa",)
    assert Attention(3, 8, "fna", learned=[]).learned == ()
    assert "gamma" not in Attention(3, 8, "cosine").learned
    assert "landmark_weight" in Attention(3, 8, CONVOLUTION, learned=[]).learned
    with pytest.raises(resolvent.ConfigurationError, match="no parameter `beta`"):
        Attention(3, 8, "fna", learned=["beta"])
    with pytest.raises(resolvent.ConfigurationError, match="inside"):
        Attention(3, 8, Mechanism.infsa(gamma=1.0), learned=["gamma"])
    with pytest.raises(resolvent.UnsupportedError):
        Attention(3, 8, Mechanism("soft", landmarks={"kind": "given", "count": 4}))


def test_parameters_stay_within_their_bounds():
    module = Attention(3, 8, "fna")
    for parameter in module.parameters():
        parameter.data.uniform_(-8, 8)
    values = module.values()
    assert (values["alpha"] > 1).all() and (values["alpha"] < 2).all() and (values["kappa"] > 0).all()
    assert module(*tokens()).isfinite().all()


def test_state_survives():
    module = Attention(3, 8, "infsa", codebook=None)
    module.gamma_logit.data.uniform_()
    other = Attention(3, 8, "infsa")
    other.load_state_dict(module.state_dict())
    again = pickle.loads(pickle.dumps(module))
    q, k, v = tokens()
    assert torch.equal(other(q, k, v), module(q, k, v)) and torch.equal(again(q, k, v), module(q, k, v))
    clustered = Attention(3, 8, "ssa", codebook=torch.randn(3, 4, 8))
    assert "codebook" in clustered.state_dict()
    assert clustered(q, k, v).shape == q.shape


def test_dropout_is_of_training_alone():
    module, inputs = Attention(3, 8, dropout=0.5), tokens()
    assert not torch.equal(module(*inputs), module(*inputs))
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_is_that_of_torch(batch_first, widths, bias):
    theirs = nn.MultiheadAttention(24, 3, bias=bias, batch_first=batch_first, **widths)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
    ours = MultiheadAttention.from_torch(theirs)
    query, key, value = (torch.randn(2, 7, n) for n in (24, widths.get("kdim", 24), widths.get("vdim", 24)))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    for call in (
        {},
        {"key_padding_mask": padding},
        {"key_padding_mask": torch.zeros(2, 7).masked_fill(padding, float("-inf"))},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(7)},
        {"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "is_causal": True},
        {"attn_mask": torch.zeros(7, 7)},
    ):
        expected, _ = theirs(query, key, value, need_weights=False, **call)
        got, weights = ours(query, key, value, **call)
        torch.testing.assert_close(got, expected)
        assert weights is None
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}


def test_multihead_attention_without_a_batch_and_in_an_encoder():
    theirs = nn.MultiheadAttention(24, 3, batch_first=True)
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(7, 24)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0])
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
    batch, padding = torch.randn(2, 7, 24), torch.arange(7).expand(2, 7) > 4
    expected = layer(batch, src_key_padding_mask=padding)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    torch.testing.assert_close(layer(batch, src_key_padding_mask=padding)[~padding], expected[~padding])


@pytest.mark.parametrize("grad", [False, True])
def test_encoder_layers_compute_the_mechanism_in_evaluation(grad):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, "infsa")
    batch = torch.randn(2, 7, 32)
    with torch.set_grad_enabled(grad):
        expected = layer.train()(batch)
        assert torch.equal(layer.eval()(batch), expected)


@pytest.mark.parametrize("mechanism", list(resolvent.mechanisms()))
def test_padding_changes_nothing(mechanism):
    module = MultiheadAttention(24, 3, batch_first=True, mechanism=preset(mechanism))
    x = torch.randn(2, 24, 24)
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[0, 16:] = True
    other = x.clone()
    other[0, 16:] = 1e3
    one, two = (module(y, y, y, key_padding_mask=padding)[0] for y in (x, other))
    assert torch.equal(one[~padding], two[~padding])
    short = x[:1, :16]
    if not module.attention.mechanism.clustered:
        torch.testing.assert_close(module(short, short, short)[0], one[:1, :16], rtol=1e-4, atol=1e-5)


def test_compiled_modules_train():
    module = MultiheadAttention(24, 3, batch_first=True, mechanism="fna")
    compiled, x = torch.compile(module, fullgraph=True), torch.randn(2, 24, 24)
    compiled(x, x, x)[0].square().sum().backward()
    got = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    module(x, x, x)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        {"need_weights": True},
        {"key_padding_mask": torch.full((2, 7), 0.5)},
    ],
)
def test_what_is_not_done_is_refused(call):
    module, x = MultiheadAttention(24, 3, batch_first=True), torch.randn(2, 7, 24)
    with pytest.raises(resolvent.UnsupportedError):
        module(x, x, x, **call)


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(7, 7),
        torch.randn(7, 7).masked_fill(torch.eye(7, dtype=torch.bool), float("-inf")),
        torch.eye(7, dtype=torch.bool),
        torch.randn(6, 7, 7),
        torch.eye(7, dtype=torch.bool).roll(1, 0).expand(6, 7, 7),
    ],
)
def test_masks_of_pairs_are_those_of_torch(mask):
    theirs, x = nn.MultiheadAttention(24, 3, batch_first=True), torch.randn(2, 7, 24)
    ours = MultiheadAttention.from_torch(theirs)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    expected = theirs(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
    got = ours(x, x, x, key_padding_mask=padding, attn_mask=mask)[0]
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-5)
    with pytest.raises(resolvent.UnsupportedError):
        MultiheadAttention(24, 3, mechanism="linear-infsa", batch_first=True)(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 4), (7, 7)])
def test_causality_counts_from_the_first_key(queries, keys, padded, hint):
    theirs, x, y = nn.MultiheadAttention(24, 3, batch_first=True), torch.randn(2, queries, 24), torch.randn(2, keys, 24)
    ours = MultiheadAttention.from_torch(theirs)
    padding = torch.zeros(2, keys, dtype=torch.bool)
    padding[0, 3:] = padded
    mask = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    call = {"key_padding_mask": padding if padded else None, "is_causal": hint}
    expected = theirs(x, y, y, attn_mask=mask, need_weights=False, **call)[0]
    torch.testing.assert_close(ours(x, y, y, attn_mask=mask, **call)[0], expected)
    torch.testing.assert_close(ours(x, y, y, attn_mask=torch.zeros(mask.shape).masked_fill(mask, float("-inf")), **call)[0], expected)
    if hint:
        torch.testing.assert_close(ours(x, y, y, **call)[0], expected)
    if queries <= keys:
        # Mechanisms that form no pairs see the first keys alone.
        linear = MultiheadAttention.from_torch(theirs, "linear")
        short = {**call, "key_padding_mask": padding[:, :queries] if padded else None}
        square = torch.ones(queries, queries, dtype=torch.bool).triu(1)
        alone = linear(x, y[:, :queries], y[:, :queries], attn_mask=square, **short)[0]
        assert torch.equal(linear(x, y, y, attn_mask=mask, **call)[0], alone)


def test_causal_masks_of_pairs_are_refused_where_rows_depend_on_others():
    module, x = MultiheadAttention(24, 3, mechanism="infsa", batch_first=True), torch.randn(2, 7, 24)
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    more = causal.clone()
    more[5, 0] = True
    assert module(x, x, x, attn_mask=causal)[0].isfinite().all()
    for mask in (more, causal.float().mul(-3.0).masked_fill(causal, float("-inf")).add(0.1)):
        with pytest.raises(resolvent.UnsupportedError, match="causal mask of pairs"):
            module(x, x, x, attn_mask=mask)
    assert module(x, x, x, attn_mask=torch.eye(7, dtype=torch.bool))[0].isfinite().all()


def test_masks_of_numbers_are_exported():
    x, causal = torch.randn(2, 7, 24), nn.Transformer.generate_square_subsequent_mask(7)
    padding = torch.zeros(2, 7)
    padding[0, 5:] = float("-inf")

    class Layer(nn.Module):
        def __init__(self, mechanism):
            super().__init__()
            self.attention = MultiheadAttention(24, 3, mechanism=mechanism, batch_first=True)

        def forward(self, x, padding, mask):
            return self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask)[0]

    layer = Layer("fna").eval()
    exported = torch.export.export(layer, (x, padding, causal)).module()
    for mask in (causal, torch.zeros(7, 7)):
        torch.testing.assert_close(exported(x, padding, mask), layer(x, padding, mask))
    with pytest.raises(RuntimeError, match="key_padding_mask"):
        exported(x, padding.clone().fill_(0.5), causal)
    with pytest.raises(Exception, match="pass is_causal=True"):
        torch.export.export(Layer("infsa").eval(), (x, padding, causal))


@pytest.mark.parametrize("bias", ["alibi", {"kind": "buckets", "count": 8, "max_distance": 6}, {"kind": "grid", "height": 2, "width": 4}])
def test_biases_by_distance_are_learned(bias):
    module = Attention(3, 8, Mechanism("softmax", bias=bias))
    q, k, v = (torch.randn(2, 3, 8, 8) for _ in range(3))
    module(q, k, v).square().sum().backward()
    assert module.bias.grad.any() and list(module.state_dict()) == ["scale_log", "bias"]
    again = Attention(3, 8, Mechanism("softmax", bias=bias))
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(q, k, v), module(q, k, v))


def test_bad_modules_are_refused():
    for arguments in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"mechanism": "soft", "kdim": 8}):
        with pytest.raises(resolvent.UnsupportedError):
            MultiheadAttention(24, 3, **arguments)
    with pytest.raises(resolvent.ConfigurationError):
        MultiheadAttention(24, 5)
    tied, x = MultiheadAttention(24, 3, mechanism="soft"), torch.randn(2, 7, 24)
    with pytest.raises(resolvent.UnsupportedError, match="cross-attention"):
        tied(x, x.clone(), x)
    for embed_dim in (0, -24):
        with pytest.raises(resolvent.ConfigurationError, match="embed_dim"):
            MultiheadAttention(embed_dim, 3)
    for bad in (x.numpy(), None):
        with pytest.raises(resolvent.DTypeError):
            MultiheadAttention(24, 3)(x, x, bad)


@pytest.mark.parametrize("mechanism", ["softmax", "fna", "infsa", CONVOLUTION], ids=str)
def test_modules_are_made_where_there_is_no_memory(mechanism):
    with torch.device("meta"):
        empty = MultiheadAttention(24, 3, mechanism=mechanism, batch_first=True)
    assert all(p.is_meta for p in empty.parameters())
    real = MultiheadAttention(24, 3, mechanism=mechanism, batch_first=True)
    assert not any(p.is_meta for p in real.parameters())
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(real.state_dict())
    x = torch.randn(2, 24, 24)
    assert torch.equal(filled(x, x, x)[0], real(x, x, x)[0])
