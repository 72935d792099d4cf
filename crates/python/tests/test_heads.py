"""Heads with mechanisms of their own: each computes what it does alone, learns, and is undone; a fit says what is wrong with it."""

import copy
import json
import os
import pickle
import shutil
import stat
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

import resolvent  # noqa: E402
import resolvent.torch  # noqa: E402
import resolvent.transformers  # noqa: E402
from resolvent import HeadMechanisms, Mechanism  # noqa: E402

MIXED = HeadMechanisms([([0, 3], Mechanism("local", window=5)), ([2], "fna"), ([1, 4, 5], "softmax")])
FOUR = HeadMechanisms([([3, 0], Mechanism("local", window=3)), ([1, 2], "softmax")])
WORDS = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100, "pad_token_id": 0}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**WORDS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=100, n_positions=64, eos_token_id=None)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WORDS, num_key_value_heads=2)),
}
NAMES = {"bert": "encoder.layer.{}.attention.self", "gpt2": "transformer.h.{}.attn", "llama": "model.layers.{}.self_attn"}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def tensors(heads=6, kv_heads=6, tokens=20):
    shapes = ((2, heads, tokens, 8), (2, kv_heads, tokens, 8), (2, kv_heads, tokens, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def head_by_head(q, k, v, mechanisms, **options):
    """One call for every head, with the head that it shares."""
    outs, share = [], q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        own, mechanism = slice(head // share, head // share + 1), mechanisms.of_head(head)
        own_k = None if mechanism.tied else k[:, own]
        outs.append(resolvent.torch.attend(q[:, head : head + 1], own_k, v[:, own], mechanism, **options))
    return torch.cat(outs, 1)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_as_alone(kv_heads, causal):
    given, keep = tensors(kv_heads=kv_heads), torch.ones(2, 20, dtype=torch.bool)
    keep[0, 15:] = False
    options = {"causal": causal, "key_mask": keep}
    out = resolvent.torch.attend(*given, MIXED, enable_gqa=True, **options)
    expected = head_by_head(*given, MIXED, **options)
    assert torch.equal(out, expected)
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((one * weights).sum(), given) for one in (out, expected))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_biases_tied_groups_and_single_groups():
    q, k, v = tensors()
    bias = torch.randn(2, 6, 20, 20, requires_grad=True)
    pairs = HeadMechanisms([([5, 0], Mechanism("local", window=4)), ([1, 2, 3, 4], "softmax")])
    out = resolvent.torch.attend(q, k, v, pairs, bias=bias)
    alone = [resolvent.torch.attend(q[:, [n]], k[:, [n]], v[:, [n]], pairs.of_head(n), bias=bias[:, [n]]) for n in range(6)]
    assert torch.equal(out, torch.cat(alone, 1))
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape
    assert resolvent.torch.attend(q, k, v, pairs, bias=bias[:, :1]).shape == v.shape
    tied = HeadMechanisms([([0, 1], "soft"), ([2, 3, 4, 5], "softmax")])
    assert not tied.tied and torch.equal(resolvent.torch.attend(q, k, v, tied), head_by_head(q, k, v, tied))
    one = HeadMechanisms([(range(6), "routed")])
    assert torch.equal(resolvent.torch.attend(q, k, v, one), resolvent.torch.attend(q, k, v, "routed"))
    assert HeadMechanisms([(range(6), "soft")]).tied
    pooled = HeadMechanisms([([0], Mechanism("linear-infsa", broadcast=False)), ([1, 2, 3, 4, 5], "softmax")])
    assert resolvent.torch.attend(q, k, v, pooled).shape == v.shape
    halves = HeadMechanisms([([0, 1, 2], "softmax"), ([3, 4, 5], Mechanism("softmax", causal=False, scale=8**-0.5))])
    same = [x[:1, :1].expand(1, 6, 20, 8) for x in (q, k, v)]
    dropped = resolvent.torch.attend(*same, halves, dropout=0.5, seed=3)
    assert torch.equal(dropped[:, :3], resolvent.torch.attend(*(x[:, :3] for x in same), dropout=0.5, seed=3))
    assert not torch.equal(dropped[:, 0], dropped[:, 3]), "groups leave out pairs of their own"


def test_calls_compile():
    q, k, v = tensors()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: resolvent.torch.attend(q, k, v, MIXED), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), resolvent.torch.attend(q, k, v, MIXED))


def test_what_a_call_refuses():
    q, k, v = tensors()
    few = tensors(kv_heads=2)
    for kind, call in (
        (resolvent.TensorError, lambda: resolvent.torch.attend(q[:, :4], k[:, :4], v[:, :4], MIXED)),
        (resolvent.TensorError, lambda: resolvent.torch.attend(few[0], few[1], few[2], MIXED)),
        (resolvent.UnsupportedError, lambda: resolvent.torch.attend(q, k, v, MIXED, parameters={"gamma": torch.ones(6)})),
        (resolvent.UnsupportedError, lambda: resolvent.torch.attend(q, k, v, MIXED, codebook=torch.ones(6, 2, 8))),
        (resolvent.ConfigurationError, lambda: resolvent.torch.HeadAttention(4, 8, MIXED)),
        (resolvent.ConfigurationError, lambda: resolvent.torch.HeadAttention(6, 8, MIXED, learned=["lambda"])),
        (resolvent.ConfigurationError, lambda: resolvent.transformers.register(MIXED)),
        (resolvent.UnsupportedError, lambda: resolvent.convert(MODELS["gpt2"](), HeadMechanisms([([0, 1], "soft"), ([2, 3], "softmax")]))),
        (resolvent.ConfigurationError, lambda: resolvent.convert(MODELS["gpt2"](), MIXED)),
    ):
        with pytest.raises(kind) as refused:
            call()
        assert refused.value.remedy


def test_the_value():
    assert MIXED.heads == 6 and MIXED.order == (0, 3, 2, 1, 4, 5)
    assert FOUR.groups[0].heads == (0, 3) and FOUR.of_head(2) == Mechanism("softmax")
    assert str(FOUR) == "0, 3: local window=3; 1-2: softmax"
    for other in (pickle.loads(pickle.dumps(FOUR)), copy.deepcopy(FOUR), eval(repr(FOUR))):
        assert other == FOUR and hash(other) == hash(FOUR)
    assert FOUR != MIXED and FOUR != "softmax"
    with pytest.raises(AttributeError):
        FOUR.groups = ()
    for groups, field in (
        ([([0], "softmax"), ([0], "fna")], "groups[1].heads"),
        ([([0, 2], "softmax")], "groups[0].heads"),
        ([([], "softmax")], "groups[0].heads"),
        ([(["a"], "softmax")], "groups[0].heads"),
        ([([0], "softmax"), ([1], Mechanism("fna", bias="alibi"))], "groups[1].mechanism"),
        ([([0, 1], Mechanism("linformer", count=4, per_head=True))], "groups[0].mechanism"),
        ([], "groups"),
    ):
        with pytest.raises(resolvent.ConfigurationError) as refused:
            HeadMechanisms(groups)
        assert refused.value.field == field and refused.value.remedy


def test_modules_learn_group_by_group():
    module = resolvent.torch.HeadAttention(6, 8, MIXED, learned=["alpha", "scale"])
    assert [name for name, _ in module.named_parameters()] == ["groups.0.scale_log", "groups.1.alpha_logit"]
    q, k, v = tensors()
    torch.testing.assert_close(module(q, k, v), resolvent.torch.attend(q, k, v, MIXED))
    module(q, k, v).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    module.dropout = 0.25
    assert all(part.dropout == 0.25 for part in module.groups)
    many = resolvent.torch.MultiheadAttention(48, 6, batch_first=True, mechanism=MIXED)
    x = torch.randn(2, 10, 48)
    assert many(x, x, x)[0].shape == x.shape
    tied = HeadMechanisms([([0, 1], "soft"), ([2, 3], "softmax")])
    crossed = resolvent.torch.MultiheadAttention(48, 4, batch_first=True, mechanism=tied)
    assert crossed(x, x, x)[0].shape == x.shape
    with pytest.raises(resolvent.UnsupportedError, match="tied"):
        crossed(x, x.clone(), x)


def inputs():
    ids, keep = torch.randint(2, 100, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    keep[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": keep}


@torch.no_grad()
def states(model, given):
    return model(**given)[0][given["attention_mask"].bool()]


def fit_of(name, *mechanisms):
    """A fit with these mechanisms in the first layers, as the program writes it."""
    layers = [{"name": NAMES[name].format(n), **each.to_dict()} for n, each in enumerate(mechanisms)]
    about = {"measure": "cosine", "target": 0.99, "cost": "time", "budget": None, "causal": name != "bert", "later": 1}
    return {"fit": 1, **about, "layers": layers}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_models_by_a_fit(name, implementation, tmp_path):
    model, given = MODELS[name]().eval(), inputs()
    model.set_attn_implementation(implementation)
    before, state = states(model, given), copy.deepcopy(model.state_dict())
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(fit_of(name, HeadMechanisms([(range(4), "softmax")]), FOUR)))
    conversion = resolvent.convert(model, fit=file, samples=given)
    assert [layer.mechanism for layer in conversion.layers] == [Mechanism("softmax"), FOUR]
    assert conversion.layers[0].change < 1e-3 < conversion.layers[1].change < 1.0
    assert conversion.layers[1].new == ("resolvent.groups.0.scale_log",)
    assert conversion.fit == resolvent.load_fit(file) and conversion.fit.target == 0.99
    lines = str(conversion).splitlines()
    assert len(lines) == 4 and "0, 3: local window=3" in lines[2] and lines[3].split()[:2] == ["1-2:", "softmax"]
    after = states(model, given)
    assert not torch.allclose(after, before, atol=1e-5)
    model(**given)[0].square().sum().backward()
    assert model.get_submodule(NAMES[name].format(1)).resolvent.groups[0].scale_log.grad.any()
    again = MODELS[name]().eval()
    again.set_attn_implementation(implementation)
    resolvent.convert(again, fit=conversion.fit)
    again.load_state_dict(model.state_dict())
    assert torch.equal(states(again, given), after)
    conversion.undo()
    assert torch.equal(states(model, given), before) and model.config._attn_implementation == implementation
    assert set(model.state_dict()) == set(state)


@pytest.mark.parametrize("name", MODELS)
def test_layers_attend_head_by_head(name):
    """What the layer makes of its heads is what each makes alone."""
    model, given, seen = MODELS[name]().eval(), inputs(), []
    from resolvent.models.layers import find
    from resolvent.models.recording import recording, show

    layer = find(model)[0]
    with recording(model, [layer], lambda layer, call: seen.append(call)):
        show(model, given)
    resolvent.convert(model, FOUR, layers=0, learned=())
    outs = []
    layer.module.register_forward_hook(lambda module, args, out: outs.append(out[0]))
    projection = {"gpt2": "c_proj", "llama": "o_proj"}.get(name)
    if projection:
        getattr(layer.module, projection).register_forward_pre_hook(lambda module, args: outs.append(args[0]))
    with torch.no_grad():
        model(**given)
        call = seen[0]
        expected = head_by_head(call.q, call.k, call.v, FOUR, causal=call.causal, key_mask=call.keep)
    keep = given["attention_mask"].bool()
    assert torch.equal(outs[0][keep], expected.transpose(1, 2).flatten(2)[keep])


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_of_softmax_alone_is_the_model(name):
    model, given = MODELS[name]().eval(), inputs()
    before = states(model, given)
    halves = HeadMechanisms([([0, 2], "softmax"), ([1, 3], Mechanism("softmax", scale=12**-0.5))])
    conversion = resolvent.convert(model, fit=fit_of(name, *[HeadMechanisms([(range(4), "softmax")])] * 3))
    whole = states(model, given)
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-5)
    conversion.undo()
    plain = resolvent.convert(model, "softmax")
    assert torch.equal(states(model, given), whole), "one group is one plain call"
    plain.undo()
    resolvent.convert(model, fit=fit_of(name, *[halves] * 3))
    torch.testing.assert_close(states(model, given), before, rtol=1e-4, atol=1e-5)


def test_decoders_write_with_a_cache():
    model, ids = MODELS["llama"]().eval(), inputs()["input_ids"]
    resolvent.convert(model, HeadMechanisms([([0, 3], Mechanism("local", window=64)), ([1, 2], "softmax")]))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_modules_of_torch_by_a_fit():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), 2).eval()
    x, padding = torch.randn(2, 10, 32), torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 7:] = True
    before = model(x, src_key_padding_mask=padding)
    softmax = HeadMechanisms([(range(4), "softmax")])
    both = resolvent.convert(model, fit=resolvent.Fit({"layers.0.self_attn": softmax, "layers.1.self_attn": FOUR}), learned=["scale"])
    assert [layer.new for layer in both.layers] == [(), ("attention.groups.0.scale_log",)]
    both.undo()
    fit = resolvent.Fit({"layers.1.self_attn": FOUR})
    conversion = resolvent.convert(model, fit=fit, samples=(x, None, padding))
    assert conversion.layers[0].name == "layers.1.self_attn" and conversion.layers[0].new == ("attention.groups.0.scale_log",)
    after = model(x, src_key_padding_mask=padding)
    assert not torch.allclose(after[~padding], before[~padding], atol=1e-5)
    other = model(x.masked_fill(padding[..., None], 3.0), src_key_padding_mask=padding)
    assert torch.equal(other[~padding], after[~padding])
    conversion.undo()
    assert torch.equal(model(x, src_key_padding_mask=padding), before)


def test_centroids_of_heads_with_clusters():
    model, given = MODELS["bert"]().eval(), inputs()
    mixed = HeadMechanisms([([1, 3], Mechanism("ssa", clusters=3)), ([0, 2], "softmax")])
    conversion = resolvent.convert(model, fit=fit_of("bert", mixed, HeadMechanisms([(range(4), "softmax")])), samples=given, codebook=True)
    assert [layer.new for layer in conversion.layers] == [("resolvent.groups.0.codebook",), ()]
    assert model.state_dict()[NAMES["bert"].format(0) + ".resolvent.groups.0.codebook"].shape == (2, 3, 12)


def test_implementations_of_transformers():
    resolvent.transformers.register(FOUR, "four")
    model, given = MODELS["bert"]().eval(), inputs()
    model.set_attn_implementation("resolvent:four")
    registered = states(model, given)
    model.set_attn_implementation("sdpa")
    resolvent.convert(model, FOUR, learned=())
    assert torch.equal(states(model, given), registered)
    pairs = torch.rand(2, 4, 14, 14) > 0.3
    assert model(given["input_ids"], attention_mask=pairs | torch.eye(14, dtype=torch.bool))[0].isfinite().all()


def test_what_is_wrong_with_a_fit(tmp_path):
    model = MODELS["bert"]()
    good = fit_of("bert", FOUR, FOUR)

    def refuse(field, change, **options):
        fit = copy.deepcopy(good)
        change(fit)
        with pytest.raises(resolvent.ConfigurationError) as refused:
            resolvent.convert(model, fit=fit, **options)
        assert refused.value.field == field and refused.value.remedy and field in str(refused.value)
        assert model.config._attn_implementation == "sdpa"

    refuse("fit", lambda fit: fit.update(fit=2))
    refuse("fit", lambda fit: fit.pop("fit"))
    refuse("layers", lambda fit: fit.pop("layers"))
    refuse("layers", lambda fit: fit.update(layers=[]))
    refuse("layers[1].name", lambda fit: fit["layers"][1].update(name="encoder.layer.7"))
    refuse("layers[1].name", lambda fit: fit["layers"][1].update(name=fit["layers"][0]["name"]))
    refuse("layers[0].heads", lambda fit: fit["layers"][0].update(heads="four"))
    refuse("layers[0].groups[1].heads", lambda fit: fit["layers"][0].update(heads=3, groups=[fit["layers"][0]["groups"][n] for n in (1, 0)]))
    refuse("layers[0].groups[1].heads", lambda fit: fit["layers"][0]["groups"][1].update(heads=[1, 2, 3]))
    refuse("layers[1].groups", lambda fit: fit["layers"][1]["groups"][1].update(heads=[1]))
    refuse("layers[0].groups[0].mechanism", lambda fit: fit["layers"][0]["groups"][0].update(mechanism={"mechanism": "nothing"}))
    small = HeadMechanisms([([0], "fna"), ([1, 2], "softmax")]).to_dict()
    refuse("layers[0].heads", lambda fit: fit["layers"][0].update(small))
    refuse("layers", lambda fit: None, layers=2)
    refuse("mechanism", lambda fit: None, mechanism="fna")
    refuse("budget", lambda fit: None, budget=0.5)
    refuse("learned", lambda fit: None, learned=["alpha"])
    for fit, field in ((tmp_path / "none.json", "fit"), (0.9, "samples"), (None, "mechanism")):
        with pytest.raises(resolvent.ConfigurationError) as refused:
            resolvent.convert(model, fit=fit)
        assert refused.value.field == field
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(resolvent.ConfigurationError, match="list"):
        resolvent.load_fit(tmp_path / "list.json")
    with pytest.raises(resolvent.UnsupportedError, match="converted"):
        resolvent.convert(model.eval(), "fna", layers=0)
        resolvent.convert(model, fit=good)


def test_fits_are_written_and_read(tmp_path):
    fit = resolvent.load_fit(fit_of("bert", FOUR))
    fit.save(tmp_path / "fit.json")
    assert resolvent.load_fit(tmp_path / "fit.json") == fit == resolvent.load_fit(fit.to_dict())
    assert str(fit) == "encoder.layer.0.attention.self  0, 3: local window=3; 1-2: softmax"


PROGRAM = """#!{python}
import json, pathlib, sys
args = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "analyze" and pathlib.Path(args["--input"]).exists()
if args["--fit"] == "2.0": sys.exit("error: fit is 2, must be 0 to 1")
fit = dict({fit!r}, budget=float(args["--budget"]) if "--budget" in args else None, target=float(args["--fit"]))
pathlib.Path(args["--out"], "fit.json").write_text(json.dumps(fit))
print(json.dumps({{"args": sys.argv[1:]}}))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "resolvent").write_text(PROGRAM.format(python=sys.executable, fit=fit_of("bert", FOUR)))
    (folder / "resolvent").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.skipif(os.name == "nt", reason="the program here is a script")
def test_a_fit_found_on_samples(program, tmp_path):
    model, given = MODELS["bert"]().eval(), inputs()
    conversion = resolvent.convert(model, fit=0.95, samples=given, budget=0.5)
    assert [layer.mechanism for layer in conversion.layers] == [FOUR] and conversion.layers[0].change is not None
    assert (conversion.fit.target, conversion.fit.budget) == (0.95, 0.5)
    conversion.undo()
    analysis = resolvent.analyze(model, given, tmp_path, fit=0.1, measure="error", cost="operations", mechanisms=["fna"])
    assert "--fit 0.1 --measure error --cost operations --mechanisms fna" in " ".join(analysis.command)
    assert analysis.fit.target == 0.1 and "local window=3" in str(analysis) and analysis.results["args"][0] == "analyze"
    for options in ({"fit": 0.9, "full": True}, {"budget": 0.5}):
        with pytest.raises(resolvent.ConfigurationError, match="|".join(options)):
            resolvent.analyze(model, given, tmp_path, **options)
    with pytest.raises(resolvent.Error, match="must be 0 to 1"):
        resolvent.convert(model, fit=2.0, samples=given)


def test_a_target_without_the_program(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(resolvent.UnsupportedError, match="install it"):
        resolvent.convert(MODELS["bert"]().eval(), fit=0.9, samples=inputs())
