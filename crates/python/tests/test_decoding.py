"""Generation by clusters that are kept beside the cache: what it gives is what the whole gives, whatever happens to the cache."""

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_transformers import DECODERS, SMALL  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

import resolvent  # noqa: E402
from resolvent import HeadMechanisms, Mechanism  # noqa: E402
from resolvent.decoding import Kept, decodes  # noqa: E402
from resolvent.transformers import register  # noqa: E402

SEGMENTS = {"kind": "segment", "size": 4}
ROUTED = Mechanism("routed", causal_clusters=SEGMENTS, clusters=2, routes=1)
OTHER = Mechanism("routed", causal_clusters={"kind": "segment", "size": 3}, clusters=2, routes=1, global_tokens=2)
GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """The tokens that were taken in by calls of what is kept: by each, those of the past and new ones."""
    found, rows, take = [], Kept.rows, resolvent.decoding._take

    def counted(self, *arguments):
        found.append([])
        return rows(self, *arguments)

    def taken(past, q, k, *rest):
        found[-1].append(k.shape[2])
        return take(past, q, k, *rest)

    monkeypatch.setattr(Kept, "rows", counted)
    monkeypatch.setattr(resolvent.decoding, "_take", taken)
    return found


def model_of(mechanism=ROUTED, decoder="llama, keys shared by heads"):
    model = DECODERS[decoder]().eval()
    for name, p in model.named_parameters():
        if "proj" in name or "c_attn" in name:
            p.data.mul_(6.0)  # so that it matters which keys are seen
    name = "ours" if isinstance(mechanism, (Mechanism, HeadMechanisms)) else mechanism
    if name == "ours":
        register(mechanism, name)
    model.set_attn_implementation(f"resolvent:{name}")
    return model


def ids_of(batch=2, tokens=23):
    return torch.randint(2, 100, (batch, tokens))


@torch.no_grad()
def rows(model, ids, past, **options):
    return model(input_ids=ids, past_key_values=past, use_cache=past is not None, **options).logits


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("decoder", ["gpt2", "llama, keys shared by heads"])
def test_a_token_takes_in_what_is_new(decoder, cache, calls):
    model, ids = model_of(decoder=decoder), ids_of()
    whole = rows(model, ids, None)
    past = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    got = [rows(model, ids[:, :7], past)]
    assert not calls, "a prompt is computed as a whole"
    for n in range(7, 23):
        got.append(rows(model, ids[:, n : n + 1], past))
    close(torch.cat(got, 1), whole)
    assert calls == [[7, 1]] * 2 + [[1]] * 2 * 15


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_others_are_computed_as_before(mechanism, calls):
    register(mechanism)
    model, ids = model_of(mechanism), ids_of()
    past = DynamicCache()
    got = [rows(model, part, past) for part in ids.split(1, 1)]
    close(torch.cat(got, 1), rows(model, ids, None))
    assert not calls and not decodes(Mechanism(mechanism))


def test_pieces_of_a_text_may_be_long(calls):
    model, ids, past = model_of(), ids_of(tokens=60), DynamicCache()
    got = [rows(model, part, past) for part in ids.split([5, 1, 20, 1, 3, 17, 13], 1)]
    close(torch.cat(got, 1), rows(model, ids, None))
    assert calls == [[5, 1]] * 2 + [[20, 1]] * 2 + [[3]] * 2 + [[17, 13]] * 2


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_is_left_out(padding, cache, calls):
    model, ids = model_of(), ids_of(tokens=14)
    keep = torch.ones(2, 14, dtype=torch.long)
    if padding != "left":
        keep[0, 9:] = 0
    if padding != "right":
        keep[1, :5] = 0
    results = []
    for junk in (0, 7):
        options = {**GREEDY, "attention_mask": keep, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
        texts = ids.masked_fill(keep == 0, junk)
        kept = model.generate(texts, cache_implementation=cache if cache == "static" else None, **options)
        # Behind its padding a text goes on, so that the mask has holes.
        plain = model.generate(texts, use_cache=False, **options)
        assert torch.equal(kept.sequences, plain.sequences)
        close(torch.stack(kept.logits), torch.stack(plain.logits))
        results.append(kept.sequences[:, 14:])
    assert [1] in calls
    if padding == "left":
        assert torch.equal(*results), "what is hidden changes nothing"


def test_a_mask_that_changes_is_noticed(calls):
    model, ids, past = model_of(), ids_of(tokens=20), DynamicCache()
    keep = torch.ones(2, 20, dtype=torch.long)
    for n in range(12):
        rows(model, ids[:, n : n + 1], past, attention_mask=keep[:, : n + 1])
    keep[0, 2:7] = 0
    positions = torch.arange(20).expand(2, 20)
    for n in range(12, 20):
        one = {"attention_mask": keep[:, : n + 1], "position_ids": positions[:, n : n + 1]}
        got = rows(model, ids[:, n : n + 1], past, **one)
    # The keys were made while the tokens were still there: only the last layers' rows can be asked for.
    apart = copy.deepcopy(past)
    apart.crop(-1)
    close(got, rows(model, ids[:, 19:], apart, **one))
    assert calls[-2:] == [[19, 1]] * 2 and [12, 1] in calls


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.3}])
def test_beams_are_those_of_whole_calls(options, calls, monkeypatch):
    model, ids = model_of(), ids_of(tokens=11)
    kept = model.generate(ids, max_new_tokens=14, **options, **GREEDY)
    assert calls
    of_whole_calls(monkeypatch)
    assert torch.equal(kept, model.generate(ids, max_new_tokens=14, **options, **GREEDY))


def of_whole_calls(monkeypatch):
    """Has nothing kept: every call clusters the past. Clusters are drawn by the place in the batch, so that sequences that have moved
    are not what they would be if they had begun where they are."""
    monkeypatch.setattr(resolvent.transformers, "beside", lambda *arguments: None)


CHANGES = {
    "reordered": (lambda past: past.reorder_cache(torch.tensor([1, 0])), lambda ids: ids.flip(0)),
    "one twice": (lambda past: past.reorder_cache(torch.tensor([1, 1])), lambda ids: ids[[1, 1]]),
    "chosen": (lambda past: past.batch_select_indices(torch.tensor([1])), lambda ids: ids[1:]),
    "repeated": (lambda past: past.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, 0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_sequences_are_noticed(change, calls, monkeypatch):
    model, ids, past = model_of(), ids_of(), DynamicCache()
    for n in range(17):
        rows(model, ids[:, n : n + 1], past)
    change, of_ids = CHANGES[change]
    change(past)
    apart, ids, done = copy.deepcopy(past), of_ids(ids), len(calls)
    got = [rows(model, ids[:, n : n + 1], past) for n in range(17, 23)]
    of_whole_calls(monkeypatch)
    expected = [rows(model, ids[:, n : n + 1], apart) for n in range(17, 23)]
    close(torch.cat(got, 1), torch.cat(expected, 1))
    assert calls[done:] == [[17, 1]] * 2 + [[1]] * 2 * 5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_that_are_taken_back_are_noticed(cache, calls):
    model, ids, other = model_of(), ids_of(), ids_of()
    past = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    for n in range(17):
        rows(model, ids[:, n : n + 1], past)
    past.crop(-6)
    text = torch.cat([ids[:, :11], other[:, 11:]], 1)
    got = [rows(model, text[:, n : n + 1], past) for n in range(11, 23)]
    close(torch.cat(got, 1), rows(model, text, None)[:, 11:])
    past.reset()
    got = [rows(model, other[:, n : n + 1], past) for n in range(23)]
    close(torch.cat(got, 1), rows(model, other, None))


@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_what_is_written_to_a_cache_is_noticed(tensor, calls):
    model, ids, past = model_of(), ids_of(), DynamicCache()
    for n in range(17):
        rows(model, ids[:, n : n + 1], past)
    with torch.no_grad():
        getattr(past.layers[1], tensor)[:, :, 3:7].mul_(-1.0)
    apart, done = copy.deepcopy(past), len(calls)
    got = rows(model, ids[:, 17:18], past)
    assert calls[done:] == [[1], [17, 1]], "the other layer goes on"
    close(got, rows(model, ids[:, 17:18], apart))
    assert calls[-1] == [17, 1], "a copy has nothing beside it"


def test_caches_take_turns(calls):
    model, texts, pasts = model_of(), [ids_of(), ids_of(1)], [DynamicCache(), DynamicCache()]
    got = [[], []]
    for n in range(23):
        for text, past, out in zip(texts, pasts, got):
            out.append(rows(model, text[:, n : n + 1], past))
    for text, out in zip(texts, got):
        close(torch.cat(out, 1), rows(model, text, None))
    assert calls.count([1]) >= 2 * 2 * 20


GROUPS = {
    "two settings": [([0, 2], ROUTED), ([1, 3], OTHER)],
    "beside softmax": [([0, 1, 3], OTHER), ([2], Mechanism("softmax"))],
    "one group": [([0, 1, 2, 3], OTHER)],
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("converted", [False, True])
def test_heads_of_their_own_go_on(groups, converted, calls):
    mechanisms = HeadMechanisms(GROUPS[groups])
    if converted:
        model = model_of("softmax")
        resolvent.convert(model, mechanisms)
    else:
        model = model_of(mechanisms)
    ids, past = ids_of(), DynamicCache()
    got = [rows(model, ids[:, :7], past)] + [rows(model, ids[:, n : n + 1], past) for n in range(7, 23)]
    close(torch.cat(got, 1), rows(model, ids, None))
    routed = sum(mechanism.id == "routed" for _, mechanism in GROUPS[groups])
    assert calls.count([1]) == 2 * 15 * routed


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_inference_mode(cache, calls):
    model, ids = model_of(), ids_of()
    whole = rows(model, ids, None)
    with torch.inference_mode():
        past = DynamicCache() if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
        got = [rows(model, ids[:, n : n + 1], past) for n in range(23)]
    close(torch.cat(got, 1), whole)
    # Nobody counts what is written to a static cache there.
    assert bool(calls) == (cache == "dynamic")


def test_gradients_reach_the_past(calls):
    model, ids = model_of(), ids_of()
    past = DynamicCache()
    first = model(input_ids=ids[:, :20], past_key_values=past, use_cache=True)
    last = model(input_ids=ids[:, 20:21], past_key_values=past, use_cache=True)
    assert not calls and first.logits.requires_grad
    last.logits.square().sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


def test_halves(calls):
    model, ids = model_of().bfloat16(), ids_of()
    past = DynamicCache()
    got = [rows(model, ids[:, n : n + 1], past) for n in range(23)]
    assert got[0].dtype == torch.bfloat16 and calls.count([1]) > 30
    error = (torch.cat(got, 1) - rows(model, ids, None)).float().norm() / torch.cat(got, 1).float().norm()
    assert error < 0.1


def test_nothing_outlives_its_cache():
    model, ids, past = model_of(), ids_of(), DynamicCache()
    for n in range(12):
        rows(model, ids[:, n : n + 1], past)
    keys, kept = weakref.ref(past.layers[1].keys), [weakref.ref(resolvent.decoding._KEPT[layer]) for layer in past.layers]
    del past
    gc.collect()
    assert keys() is None and all(found() is None for found in kept)


def test_a_long_text_is_generated_as_without_a_cache():
    config = LlamaConfig(**{**SMALL, "max_position_embeddings": 1024})
    model = LlamaForCausalLM(config).eval()
    register(Mechanism("routed", routes=2), "two-routes")
    model.set_attn_implementation("resolvent:two-routes")
    ids = ids_of(1, 505)
    options = {"max_new_tokens": 16, "output_logits": True, "return_dict_in_generate": True, **GREEDY}
    kept, plain = model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    assert torch.equal(kept.sequences, plain.sequences)
    close(torch.stack(kept.logits), torch.stack(plain.logits))
