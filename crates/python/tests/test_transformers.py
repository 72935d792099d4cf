"""Models of Hugging Face transformers, small and with random weights, on mechanisms of this package."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import resolvent  # noqa: E402
from resolvent import Mechanism  # noqa: E402
from resolvent.transformers import register  # noqa: E402

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ENCODER = {**SMALL, "num_key_value_heads": None}
WINDOWED = {**SMALL, "sliding_window": 5}
DECODERS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=None)
    ),
    "llama, keys shared by heads": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**WINDOWED)),
    "gemma2, windows and softcaps": lambda: sharpened(Gemma2ForCausalLM(Gemma2Config(**WINDOWED, head_dim=12, attn_logit_softcapping=2.0))),
    "gpt-oss, windows and sinks": lambda: with_sinks(
        GptOssForCausalLM(GptOssConfig(**WINDOWED, head_dim=12, num_local_experts=2, num_experts_per_tok=1))
    ),
}


def sharpened(model):
    """Weights that make attention differ from a mean, so that what is done to logits shows."""
    for name, p in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            p.data.mul_(12.0)
    return model


def with_sinks(model):
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.data.normal_(1.0)
    return sharpened(model)


TIED = [name for name in resolvent.mechanisms() if Mechanism(name).tied]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    assert len(register()) == len(resolvent.mechanisms())


def texts():
    ids, keep = torch.randint(2, 100, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    keep[0, 9:] = 0
    return ids, keep


@torch.no_grad()
def states(model, **inputs):
    return model(**inputs)[0]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_softmax_is_the_models_own_and_generates_the_same(decoder, padding):
    model, (ids, keep) = DECODERS[decoder]().eval(), texts()
    keep = {"none": torch.ones_like(keep), "right": keep, "left": keep.flip(1)}[padding]
    results = []
    for implementation in ("eager", "resolvent:softmax"):
        model.set_attn_implementation(implementation)
        # Behind padding on the right a model would write on from a padded token, of which nothing is defined.
        texts_to_go_on = keep if padding != "right" else torch.ones_like(keep)
        written = model.generate(ids, attention_mask=texts_to_go_on, max_new_tokens=8, do_sample=False, pad_token_id=0)
        results.append((states(model, input_ids=ids, attention_mask=keep)[keep.bool()], written))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("mechanism", [name for name in resolvent.mechanisms() if name not in TIED])
def test_a_padded_token_changes_nothing_in_an_encoder(mechanism):
    model, (ids, keep) = BertModel(BertConfig(**ENCODER)).eval(), texts()
    own = states(model, input_ids=ids, attention_mask=keep)
    model.set_attn_implementation(f"resolvent:{mechanism}")
    got = states(model, input_ids=ids, attention_mask=keep)
    other = ids.clone()
    other[0, 9:] = 7
    assert torch.equal(got[keep.bool()], states(model, input_ids=other, attention_mask=keep)[keep.bool()])
    if mechanism != "ssa":  # as many clusters as suit the tokens, padding among them
        alone = states(model, input_ids=ids[:1, :9])
        torch.testing.assert_close(alone[0], got[0, :9], rtol=1e-4, atol=1e-5)
    same = torch.allclose(got[keep.bool()], own[keep.bool()], atol=1e-5)
    assert same == (mechanism in ("softmax", "local")), "the mechanism is the one that was asked for"


@pytest.mark.parametrize("mechanism", ["fna", "softmax", "linear", "relu"])
def test_later_tokens_change_nothing_in_a_decoder(mechanism):
    model, (ids, _) = DECODERS["gpt2"]().eval(), texts()
    model.set_attn_implementation(f"resolvent:{mechanism}")
    other = ids.clone()
    other[:, 10:] = 3
    assert torch.equal(states(model, input_ids=ids)[:, :10], states(model, input_ids=other)[:, :10])
    long = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    slow = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(long, slow)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if "window" not in name])
def test_clusters_of_the_past_are_the_same_with_a_cache(decoder):
    model, (ids, _) = DECODERS[decoder]().eval(), texts()
    segments = {"kind": "segment", "size": 4}
    routed = resolvent.Mechanism("routed", causal_clusters=segments, clusters=2, routes=1)
    resolvent.convert(model, routed)
    other = ids.clone()
    other[:, 10:] = 3
    assert torch.equal(states(model, input_ids=ids)[:, :10], states(model, input_ids=other)[:, :10])
    whole = states(model, input_ids=ids)
    first = model(input_ids=ids[:, :5], use_cache=True)
    past, rows = first.past_key_values, [first[0]]
    for n in range(5, ids.shape[1]):
        step = model(input_ids=ids[:, n : n + 1], past_key_values=past, use_cache=True)
        past = step.past_key_values
        rows.append(step[0])
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, use_cache=False, **options))


def test_clusters_of_queries_are_refused_a_cache():
    model, (ids, _) = DECODERS["gpt2"]().eval(), texts()
    model.set_attn_implementation("resolvent:ssa")
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(resolvent.UnsupportedError, match="use_cache=False"):
        model.generate(ids, **options)
    assert model.generate(ids, use_cache=False, **options).shape[1] == ids.shape[1] + 3


def test_vision_and_training():
    model = ViTModel(ViTConfig(**{k: v for k, v in ENCODER.items() if k.endswith("s") or k.endswith("size")}, image_size=32, patch_size=8))
    pictures = torch.randn(2, 3, 32, 32)
    own = states(model.eval(), pixel_values=pictures)
    model.set_attn_implementation("resolvent:softmax")
    torch.testing.assert_close(states(model, pixel_values=pictures), own, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation("resolvent:infsa")
    model.train()(pixel_values=pictures)[0].square().sum().backward()
    attention = [p for n, p in model.named_parameters() if ("query" in n or "q_proj" in n) and n.endswith("weight")]
    assert len(attention) == 2 and all(p.grad.any() for p in attention)


def test_a_mechanism_of_ones_own():
    mine = Mechanism(score=resolvent.Levy(1.5), series=resolvent.Hops(2))
    assert register(mine, "two-hops") == ["resolvent:two-hops"]
    model, (ids, keep) = BertModel(BertConfig(**ENCODER)).eval(), texts()
    results = []
    for name in ("two-hops", "fna"):
        model.set_attn_implementation(f"resolvent:{name}")
        results.append(states(model, input_ids=ids, attention_mask=keep))
    assert not torch.allclose(*results, atol=1e-5)
    with pytest.raises(resolvent.ConfigurationError):
        register(name="nothing")


def test_what_a_mechanism_cannot_honour_is_refused():
    ids, keep = texts()

    def refuse(model, name, what, **inputs):
        model.eval().set_attn_implementation(f"resolvent:{name}")
        with pytest.raises(resolvent.UnsupportedError, match=what):
            states(model, input_ids=ids, **inputs)

    refuse(DECODERS["gemma2, windows and softcaps"](), "fna", "scale of the products")
    refuse(DECODERS["mistral, sliding window"](), "linear", "sliding window")
    refuse(DECODERS["gpt2"](), "linear-infsa", "caus")
    refuse(BertModel(BertConfig(**ENCODER)), "soft", "tied")
    refuse(BertModel(BertConfig(**ENCODER)), "softmax", "output_attentions", output_attentions=True)
    refuse(DECODERS["gpt-oss, windows and sinks"](), "fna", "s_aux")
    pairs = torch.ones(2, 1, 14, 14, dtype=torch.bool).tril()
    refuse(BertModel(BertConfig(**ENCODER)), "linear-infsa", "pairs", attention_mask=pairs)


def test_masks_of_single_pairs_are_honoured():
    model, (ids, _) = BertModel(BertConfig(**ENCODER)).eval(), texts()
    pairs = torch.rand(2, 1, 14, 14) > 0.5
    pairs |= torch.eye(14, dtype=torch.bool)
    expected = states(model, input_ids=ids, attention_mask=pairs)
    model.set_attn_implementation("resolvent:softmax")
    got = states(model, input_ids=ids, attention_mask=pairs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, states(model, input_ids=ids), atol=1e-3)


@pytest.mark.parametrize("mechanism", ["softmax", "fna"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_static_cache_is_no_cache(decoder, mechanism):
    if mechanism == "fna" and decoder.startswith(("gemma2", "gpt-oss")):
        mechanism = "dot-exp"  # the distances of `fna` have no place for softcaps and sinks
        register(Mechanism(score="dot-exp"), mechanism)
    model, (ids, keep) = DECODERS[decoder]().eval(), texts()
    keep = keep.flip(1)
    model.set_attn_implementation(f"resolvent:{mechanism}")
    options = {"attention_mask": keep, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    static = model.generate(ids, cache_implementation="static", **options)
    without = model.generate(ids, use_cache=False, **options)
    assert torch.equal(static.sequences, without.sequences)
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(without.logits), rtol=1e-4, atol=1e-5)


def of_t5():
    torch.manual_seed(0)
    config = T5Config(vocab_size=100, d_model=48, d_kv=12, num_heads=4, d_ff=64, num_layers=2, decoder_start_token_id=0, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config).eval()
    for name, p in model.named_parameters():
        if "relative_attention_bias" in name:
            p.data.normal_()
    return model


def test_position_biases_and_their_gradients_are_the_models_own():
    model, (ids, keep) = of_t5(), texts()
    results = []
    for implementation in ("eager", "resolvent:softmax"):
        model.set_attn_implementation(implementation)
        logits = model(input_ids=ids, attention_mask=keep, decoder_input_ids=ids[:, :9]).logits
        model.zero_grad()
        logits.square().mean().backward()
        bias = [p.grad.clone() for name, p in model.named_parameters() if "relative_attention_bias" in name]
        written = model.generate(ids, attention_mask=keep, max_new_tokens=6, do_sample=False)
        results.append((logits.detach(), *bias, written))
    assert len(results[0]) == 4 and all(x.any() for x in results[0][1:3])
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_sinks_learn():
    model, (ids, _) = DECODERS["gpt-oss, windows and sinks"]().train(), texts()
    gradients = []
    for implementation in ("eager", "resolvent:softmax"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids).logits.square().mean().backward()
        gradients.append([p.grad.clone() for name, p in model.named_parameters() if "sinks" in name])
    assert len(gradients[0]) == 2 and all(x.any() for x in gradients[0])
    for theirs, ours in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_sinks_of_heads_with_mechanisms_of_their_own():
    model, (ids, _) = DECODERS["gpt-oss, windows and sinks"]().eval(), texts()
    expected = states(model, input_ids=ids)
    halves = resolvent.HeadMechanisms([([0, 3], "softmax"), ([1, 2], Mechanism(score="dot-exp"))])
    register(halves, "halves")
    model.set_attn_implementation("resolvent:halves")
    torch.testing.assert_close(states(model, input_ids=ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_models_compile_as_a_whole(name):
    torch._dynamo.reset()
    (ids, keep), options = texts(), {} if name == "bert" else {"use_cache": False}
    model = (BertModel(BertConfig(**ENCODER)) if name == "bert" else DECODERS["llama, keys shared by heads"]()).eval()
    model.set_attn_implementation("resolvent:fna")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = states(model, input_ids=ids, attention_mask=keep, **options)
    torch.testing.assert_close(states(compiled, input_ids=ids, attention_mask=keep, **options), expected)
