"""Mechanisms whose rows depend on other rows, in models of transformers: where these rows are not at hand they are refused."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_transformers import DECODERS, ENCODER, of_t5, states, texts  # noqa: E402
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertModel  # noqa: E402

import resolvent  # noqa: E402
from resolvent import HeadMechanisms, Mechanism  # noqa: E402
from resolvent.transformers import register  # noqa: E402

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
#: Those that have a causal form, on a text as a whole.
SUMS = {
    "infsa": Mechanism("infsa"),
    "norms": Mechanism(score="dot-relu", normalisation="frobenius"),
    "hops": Mechanism(score="dot-exp", series=resolvent.Hops(2)),
    "degrees": Mechanism.fna(norm_exponent=0.5),
    "clusters": Mechanism("ssa"),
    "heads": HeadMechanisms([([0, 3], "softmax"), ([1, 2], "infsa")]),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    register()
    for name, mechanism in SUMS.items():
        register(mechanism, name)


def refused(what):
    return pytest.raises(resolvent.UnsupportedError, match=what)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_cache_has_no_queries_that_rows_could_depend_on(name, converted):
    model, (ids, _) = DECODERS["gpt2"]().eval(), texts()
    resolvent.convert(model, SUMS[name]) if converted else model.set_attn_implementation(f"resolvent:{name}")
    cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
    with refused("use_cache=False"):
        model(input_ids=ids[:, -1:], past_key_values=cache)
    with refused("use_cache=False"):
        model.generate(ids[:, :1], **GREEDY)
    whole = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(states(model, input_ids=whole[:, :-1])[:, -1].argmax(-1), whole[:, -1])


@pytest.mark.parametrize("decoder", ["gpt2", "mistral, sliding window"])
@pytest.mark.parametrize("name", ["linear-infsa", "laplacian", "laplacian-exact", "nystromformer", "linformer", "infsa-resolvent"])
def test_what_is_refused_of_a_text_is_refused_of_its_first_token(name, decoder):
    model, (ids, _) = DECODERS[decoder]().eval(), texts()
    model.set_attn_implementation(f"resolvent:{name}")
    with refused("not support"):
        model.generate(ids[:, :1], **GREEDY)


@pytest.mark.parametrize("name", ["softmax", "fna", "uniform", "linear", "performer", "local", "relu", "routed"])
def test_rows_of_their_own_go_on_from_a_cache(name):
    model, (ids, _) = DECODERS["gpt2"]().eval(), texts()
    model.set_attn_implementation(f"resolvent:{name}")
    cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
    step = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, 0]
    torch.testing.assert_close(step, states(model, input_ids=ids)[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["infsa", "infsa-resolvent", "ssa", "norms", "heads"])
def test_a_causal_mask_of_pairs_is_refused_where_it_would_leak(name):
    model, (ids, _) = DECODERS["llama, keys shared by heads"]().eval(), texts()
    model.set_attn_implementation(f"resolvent:{name}")
    packed = torch.arange(14).remainder(7)[None].expand(2, -1)
    with refused("mask of pairs"):
        model(input_ids=ids, position_ids=packed, use_cache=False)
    pairs = torch.ones(2, 1, 14, 14, dtype=torch.bool).tril()
    hidden = torch.zeros(2, 1, 14, 14).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for mask in (pairs, hidden):
        with refused("mask of pairs"):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    bert = BertModel(BertConfig(**ENCODER)).eval()
    bert.set_attn_implementation(f"resolvent:{name}")
    with refused("mask of pairs"):
        bert(input_ids=ids, attention_mask=pairs)


@pytest.mark.parametrize("name", ["softmax", "fna", "relu"])
def test_a_packed_text_is_what_it_is_alone(name):
    model, (ids, _) = DECODERS["llama, keys shared by heads"]().eval(), texts()
    model.set_attn_implementation(f"resolvent:{name}")
    packed = states(model, input_ids=ids[:1], position_ids=torch.arange(14).remainder(7)[None], use_cache=False)
    alone = states(model, input_ids=ids[:1].view(2, 7), use_cache=False)
    torch.testing.assert_close(packed.view(2, 7, -1), alone, rtol=1e-4, atol=1e-5)


def of_bart():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 48, "vocab_size": 100, "decoder_start_token_id": 1}
    return BartForConditionalGeneration(BartConfig(**sizes)).eval()


@pytest.mark.parametrize("model", [of_t5, of_bart])
@pytest.mark.parametrize("tokens", [9, 14])
def test_cross_attention_of_a_decoder_is_refused(model, tokens):
    model, (ids, keep) = model(), texts()
    inputs = {"input_ids": ids, "attention_mask": keep, "decoder_input_ids": ids[:, :tokens]}
    expected = states(model, **inputs)
    model.set_attn_implementation("resolvent:infsa")
    with refused("cross-attention"):
        model(**inputs)
    model.set_attn_implementation("resolvent:softmax")
    torch.testing.assert_close(states(model, **inputs), expected, rtol=1e-4, atol=1e-5)


def test_conversion_refuses_it_by_the_layers_name():
    for model, layer in ((of_t5(), "EncDecAttention"), (of_bart(), "encoder_attn"), (torch.nn.Transformer(48, 4, 1, 1, 64, dropout=0.0), "multihead_attn")):
        for mechanism in ("infsa", HeadMechanisms([([0, 3], "softmax"), ([1, 2], "infsa")])):
            with refused(f"{layer}.*cross-attention"):
                resolvent.convert(model, mechanism)
        resolvent.convert(model, "infsa", layers=lambda name, _: layer not in name).undo()
