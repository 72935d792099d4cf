"""Whole models on other mechanisms: chosen layers compute them and learn, the others are as they were, and undo is exact."""

import copy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402

SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
WORDS = {**SIZES, "vocab_size": 100, "pad_token_id": 0}
MODELS = {
    "bert": lambda: BertModel(BertConfig(**WORDS)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES, image_size=32, patch_size=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=100, n_positions=64, eos_token_id=None)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WORDS, num_key_value_heads=2)),
}
LAYERS = {
    "bert": "encoder.layer.{}.attention.self",
    "vit": "layers.{}.attention",
    "gpt2": "transformer.h.{}.attn",
    "llama": "model.layers.{}.self_attn",
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def inputs(model):
    if isinstance(model, ViTModel):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids, keep = torch.randint(2, 100, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    keep[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": keep}


@torch.no_grad()
def states(model, given):
    return model(**given)[0]


def encoder(**options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **{"dropout": 0.0, **options})
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_chosen_layers_and_exact_undo(name, implementation):
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    given = inputs(model)
    before, state = states(model, given), {key: x.clone() for key, x in model.state_dict().items()}
    conversion = resolvent.convert(model, "fna", layers=[0, -1], samples=given)
    chosen = [layer.name for layer in conversion.layers]
    assert chosen == [LAYERS[name].format(n) for n in (0, 2)]
    assert all(layer.new == ("resolvent.alpha_logit", "resolvent.kappa_log") for layer in conversion.layers)
    assert all(0.0 < layer.change < 0.1 for layer in conversion.layers), "random weights attend to all tokens alike"
    assert set(model.state_dict()) - set(state) == {f"{layer}.{new}" for layer in chosen for new in conversion.layers[0].new}
    after = states(model, given)
    assert not torch.allclose(after, before, atol=1e-6) and torch.isfinite(after).all()
    printed = str(conversion)
    assert printed.splitlines()[0].split() == ["layer", "mechanism", "kept", "new", "unused", "change"]
    assert chosen[1] in printed and len(printed.splitlines()) == 3
    conversion.undo()
    conversion.undo()
    assert torch.equal(states(model, given), before)
    assert set(model.state_dict()) == set(state) and all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_other_layers_compute_what_they_did(name, implementation):
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    given = {**inputs(model), "output_hidden_states": True}
    before = model(**given).hidden_states
    resolvent.convert(model, "fna", layers=-1)
    after = model(**given).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(before[:3], after[:3]))
    assert len(before) == 4 and not torch.equal(before[3], after[3])


@pytest.mark.parametrize("name", MODELS)
def test_softmax_is_the_models_own(name):
    model = MODELS[name]().eval()
    given = inputs(model)
    keep = given.get("attention_mask", torch.ones(2, 17)).bool()
    before = states(model, given)
    resolvent.convert(model, "softmax", layers=slice(1, 3))
    torch.testing.assert_close(states(model, given)[keep], before[keep], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mechanism", resolvent.mechanisms())
def test_every_mechanism_in_an_encoder(mechanism):
    model = MODELS["bert"]().eval()
    given = inputs(model)
    before = states(model, given)
    mechanism = Mechanism.linformer(structure=resolvent.Projected(max_tokens=32)) if mechanism == "linformer" else Mechanism(mechanism)
    conversion = resolvent.convert(model, mechanism, samples=given)
    tied = mechanism.tied
    assert all(layer.unused == (("key.weight", "key.bias") if tied else ()) for layer in conversion.layers)
    assert all(len(layer.kept) == (4 if tied else 6) for layer in conversion.layers)
    out, other = states(model, given), {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][0, 9:] = 7
    keep = given["attention_mask"].bool()
    assert torch.equal(out[keep], states(model, other)[keep]), "padded tokens change nothing"
    conversion.undo()
    assert torch.equal(states(model, given), before)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decoders_learn_and_write(name):
    model = MODELS[name]()
    conversion = resolvent.convert(model, "infsa", layers="*.1.*", dropout=0.0)
    ids = inputs(model)["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    learned = {key: x for key, x in model.named_parameters() if "resolvent" in key}
    assert set(learned) == {f"{conversion.layers[0].name}.resolvent.gamma_logit"}
    assert all(x.grad.any() for x in learned.values())
    model.eval()
    other = ids.clone()
    other[:, 10:] = 3
    assert torch.equal(states(model, {"input_ids": ids})[:, :10], states(model, {"input_ids": other})[:, :10])
    loaded = MODELS[name]().eval()
    resolvent.convert(loaded, "infsa", layers="*.1.*")
    loaded.load_state_dict(model.state_dict())
    again = copy.deepcopy(loaded)
    written = [m(input_ids=ids, use_cache=False)[0] for m in (model, loaded, again)]
    assert torch.equal(written[0], written[1]) and torch.equal(written[0], written[2])


def test_centroids_are_found_among_the_samples():
    model, clustered = MODELS["bert"]().eval(), Mechanism("ssa", clusters=3)
    given = inputs(model)
    conversion = resolvent.convert(model, clustered, layers=1, samples=given, codebook=True)
    assert conversion.layers[0].new == ("resolvent.codebook",) and conversion.layers[0].change < 1.0
    codebook = model.state_dict()["encoder.layer.1.attention.self.resolvent.codebook"]
    assert codebook.shape == (4, 3, 12) and codebook.isfinite().all()
    fixed = states(model, given)
    conversion.undo()
    again = resolvent.convert(model, clustered, layers=1, samples=given, codebook=True)
    assert torch.equal(states(model, given), fixed)
    again.undo()
    refuse(model, clustered, "samples", resolvent.ConfigurationError, codebook=True)
    refuse(model, "fna", "no number of them", resolvent.ConfigurationError, codebook=True, samples=given)
    many = Mechanism("ssa", clusters=30)
    refuse(model, many, "23 tokens for 30 clusters", resolvent.ConfigurationError, codebook=True, samples=given)
    torch_model = encoder().eval()
    conversion = resolvent.convert(torch_model, clustered, samples=torch.randn(2, 10, 32), codebook=True)
    assert conversion.layers[0].new == ("attention.codebook",)


def test_converted_models_compile():
    model = MODELS["bert"]().eval()
    resolvent.convert(model, "fna", layers=0)
    given = inputs(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model)(**given)[0], model(**given)[0], rtol=1e-4, atol=1e-5)


def test_conversions_add_up_and_are_undone_in_any_order():
    model = MODELS["bert"]().eval()
    given = inputs(model)
    before = states(model, given)
    first = resolvent.convert(model, "infsa", layers=0)
    one = states(model, given)
    second = resolvent.convert(model, lambda name, module: {"mechanism": "fna", "alpha": 1.5}, layers=lambda name, module: ".1." in name)
    assert str(second.layers[0].mechanism) == str(Mechanism.fna(alpha=1.5))
    both = states(model, given)
    assert not torch.equal(one, both)
    first.undo()
    assert not torch.equal(states(model, given), before)
    second.undo()
    assert torch.equal(states(model, given), before)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "fna", "infsa", "soft", "linear"])
def test_modules_of_torch(mechanism, grad):
    model, x, padding = encoder().eval(), torch.randn(2, 10, 32), torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 7:] = True
    with torch.set_grad_enabled(grad):
        before = model(x, src_key_padding_mask=padding)
        conversion = resolvent.convert(model, mechanism, samples=(x, None, padding))
        assert [layer.name for layer in conversion.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
        after = model(x, src_key_padding_mask=padding)
        other = model(x.masked_fill(padding[..., None], 3.0), src_key_padding_mask=padding)
    assert torch.allclose(after[~padding], before[~padding], rtol=1e-4, atol=1e-5) == (mechanism == "softmax")
    torch.testing.assert_close(other[~padding], after[~padding])
    assert torch.equal(other[~padding], after[~padding]), "encoders' own path of softmax is not taken"
    conversion.undo()
    with torch.set_grad_enabled(grad):
        assert torch.equal(model(x, src_key_padding_mask=padding), before)


def test_weights_are_shared_and_new_ones_train():
    model = encoder()
    weight = model.layers[1].self_attn.in_proj_weight
    conversion = resolvent.convert(model, "infsa", layers=1)
    attention = model.layers[1].self_attn
    assert attention.in_proj_weight is weight and conversion.layers[0].new == ("attention.gamma_logit",)
    model(torch.randn(2, 10, 32)).square().sum().backward()
    assert attention.attention.gamma_logit.grad.any() and weight.grad.any()
    assert "layers.1.self_attn.attention.gamma_logit" in model.state_dict()


def test_encoder_and_decoder_of_torch():
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True).eval()
    x, mask = torch.randn(2, 10, 32), nn.Transformer.generate_square_subsequent_mask(10)
    call = {"src": x, "tgt": x, "tgt_mask": mask}
    before = model(**call)
    conversion = resolvent.convert(model, "fna", samples=call)
    assert len(conversion.layers) == 3 and not torch.allclose(model(**call), before, atol=1e-4)
    conversion.undo()
    assert torch.equal(model(**call), before)
    refuse(model, "infsa", "multihead_attn.*has not written", samples=call)
    refuse(model, "linear-infsa", "causal", samples=call, layers="*.self_attn")
    refuse(model, "soft", "multihead_attn.*tied")
    assert torch.equal(model(**call), before), "what is refused changes nothing"


def refuse(model, mechanism, what, kind=resolvent.UnsupportedError, **options):
    with pytest.raises(kind, match=what) as refused:
        resolvent.convert(model, mechanism, **options)
    assert refused.value.remedy


def test_what_cannot_be_honoured_is_refused():
    bert, gpt2 = MODELS["bert"](), MODELS["gpt2"]().eval()
    refuse(bert.train(), "infsa", r"layer `encoder.layer.0.attention.self`.*dropout")
    resolvent.convert(bert, "fna").undo()
    resolvent.convert(bert, "infsa", dropout=0.0).undo()
    refuse(encoder(dropout=0.1), "infsa", "dropout")
    conversion = resolvent.convert(bert.eval(), "infsa")
    with pytest.raises(resolvent.UnsupportedError, match="dropout"):
        bert.train()(**inputs(bert))
    bert.eval()
    refuse(bert, "fna", "has been converted")
    conversion.undo()
    refuse(gpt2, "linear-infsa", r"transformer.h.0.attn.*causal")
    refuse(gpt2, "soft", "causal")
    refuse(nn.Sequential(nn.Linear(4, 4)), "fna", "no attention that is known")
    refuse(nn.MultiheadAttention(8, 2), "fna", "from_torch")
    refuse(nn.ModuleList([nn.MultiheadAttention(8, 2, add_bias_kv=True)]), "fna", "add_bias_kv")
    for layers in (3, -4, "encoder.layer.9", slice(5, 9), lambda name, module: False, 1.5, [0, "none"]):
        refuse(bert, "fna", "there are 3: encoder.layer.0", resolvent.ConfigurationError, layers=layers)
    refuse(bert, "fna", "no parameter `gamma`", resolvent.ConfigurationError, learned=["gamma"])
    refuse(bert, "fna", "dropout", resolvent.ConfigurationError, dropout=1.0)
    assert bert.config._attn_implementation == gpt2.config._attn_implementation == "sdpa"


def test_the_report_is_printed_where_it_is_asked_for(capsys):
    first = resolvent.convert(encoder(), "fna")
    assert not capsys.readouterr().out
    second = resolvent.convert(encoder(), "fna", report=True)
    assert capsys.readouterr().out == f"{second}\n" == f"{first}\n"


def test_tied_mechanisms_refuse_other_keys():
    model = MODELS["llama"]().eval()
    tied = Mechanism("infsa", tied=True)
    conversion = resolvent.convert(model, tied)
    assert all(layer.unused == ("k_proj.weight",) for layer in conversion.layers)
    ids = inputs(model)["input_ids"]
    assert torch.isfinite(states(model, {"input_ids": ids})).all()
    with pytest.raises(resolvent.UnsupportedError, match="tied"):
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_torch_comes_with_the_first_question():
    code = "import sys, resolvent; assert 'torch' not in sys.modules; resolvent.convert; assert 'torch' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError):
        resolvent.transform  # noqa: B018
