"""What `resolvent.analyze` writes: names, shapes and values of every attention call; and what it makes of the program's answer."""

import json
import os
import pathlib
import shutil
import stat
import struct
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5Model,
)

import resolvent  # noqa: E402

PROGRAM = os.environ.get("RESOLVENT_PROGRAM") or shutil.which("resolvent")

WORDS = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(shutil, "which", lambda name, which=shutil.which: None if name == "resolvent" else which(name))


def read(path):
    """A safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    types = {"F32": np.float32, "U8": np.uint8}
    assert (8 + length) % 8 == 0
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        first, last = (8 + length + at for at in entry["data_offsets"])
        found[name] = np.frombuffer(data[first:last], types[entry["dtype"]]).reshape(entry["shape"])
    return found


def texts():
    ids, keep = torch.randint(2, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    keep[0, 7:] = 0
    return {"input_ids": ids, "attention_mask": keep}


def bert():
    return BertModel(BertConfig(**WORDS))


def test_the_calls_of_a_model_of_transformers(tmp_path):
    model, given = bert().train(), texts()
    analysis = resolvent.analyze(model, given, tmp_path)
    names = [f"encoder.layer.{n}.attention.self" for n in (0, 1)]
    assert analysis.layers == tuple(names) and analysis.results is None and analysis.path == tmp_path / "dump.safetensors"
    assert analysis.command == ("resolvent", "analyze", "--input", str(analysis.path), "--out", str(tmp_path))
    assert str(analysis.path) in str(analysis) and "resolvent analyze" in str(analysis)
    found = read(analysis.path)
    assert set(found) == {f"{name}.{part}" for name in names for part in ("q", "k", "v", "key_mask")}
    assert model.training and model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        states = model.eval().embeddings(given["input_ids"])
    keep = given["attention_mask"].numpy()
    for part in ("query", "key", "value"):
        own = getattr(model.encoder.layer[0].attention.self, part)(states).detach()
        expected = own.view(2, 12, 4, 12).transpose(1, 2).numpy() * keep[:, None, :, None]
        np.testing.assert_array_equal(found[f"{names[0]}.{part[0]}"], expected)
    np.testing.assert_array_equal(found[f"{names[1]}.key_mask"], keep)


def test_decoders_are_causal_and_texts_may_have_any_length(tmp_path):
    model = LlamaModel(LlamaConfig(**WORDS, num_key_value_heads=2))
    ids = texts()["input_ids"]
    analysis = resolvent.analyze(model, [ids, {"input_ids": ids[:1, :5]}, (ids[:, :9],)], tmp_path, layers=-1, full=True)
    assert analysis.command[-2:] == ("--causal", "--full")
    found = read(analysis.path)
    q, k, mask = (found[f"layers.1.self_attn.{part}"] for part in ("q", "k", "key_mask"))
    assert q.shape == (5, 4, 12, 12) and k.shape == (5, 2, 12, 12)
    assert mask.sum(1).tolist() == [12, 12, 5, 9, 9]
    assert not q[2, :, 5:].any() and q[2, :, :5].all() and len(found) == 4
    alone = read(resolvent.analyze(model, ids[:1, :5], tmp_path, layers=-1).path)
    assert "layers.1.self_attn.key_mask" not in alone
    np.testing.assert_allclose(alone["layers.1.self_attn.k"][0], k[2, :, :5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("converted", [False, True])
def test_modules_of_torch(tmp_path, converted):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x, padding = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 10, 32), torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 7:] = True
    if converted:
        resolvent.convert(model, "softmax")
    found = read(resolvent.analyze(model, (x, None, padding), tmp_path).path)
    weight, bias = model.layers[0].self_attn.in_proj_weight, model.layers[0].self_attn.in_proj_bias
    for part, own in zip("qkv", functional.linear(x, weight, bias).detach().chunk(3, -1)):
        expected = own.view(2, 10, 4, 8).transpose(1, 2).masked_fill(padding[:, None, :, None], 0.0)
        np.testing.assert_allclose(found[f"layers.0.self_attn.{part}"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["layers.1.self_attn.key_mask"], (~padding).numpy())
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_converted_layers(tmp_path):
    model = bert().eval()
    resolvent.convert(model, "soft", layers=0)
    found = read(resolvent.analyze(model, texts()["input_ids"], tmp_path).path)
    name = "encoder.layer.{}.attention.self.{}".format
    keys = "keys that are the queries are left out"
    assert set(found) == {name(0, "q"), name(0, "v"), *(name(1, part) for part in "qkv")}, keys
    single = resolvent.torch.Attention(2, 4, "fna")
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    found = read(resolvent.analyze(single, (q, k, v), tmp_path).path)
    assert all(np.array_equal(found[name], x) for name, x in (("q", q), ("k", k), ("v", v)))


def test_other_scales_are_the_queries(tmp_path):
    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=100, n_positions=64, scale_attn_by_inverse_layer_idx=True)
    model, ids = GPT2Model(config), texts()["input_ids"]
    found = read(resolvent.analyze(model, ids, tmp_path).path)
    model.h[1].attn.scaling *= 4
    scaled = read(resolvent.analyze(model, ids, tmp_path).path)
    np.testing.assert_allclose(scaled["h.1.attn.q"], 4 * found["h.1.attn.q"], rtol=1e-6)
    np.testing.assert_array_equal(scaled["h.0.attn.q"], found["h.0.attn.q"])


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    ids = texts()["input_ids"]

    def refuse(model, what, given, kind=resolvent.UnsupportedError, **options):
        with pytest.raises(kind, match=what) as refused:
            resolvent.analyze(model, given, tmp_path, **options)
        assert refused.value.remedy

    refuse(MistralModel(MistralConfig(**WORDS, num_key_value_heads=2, sliding_window=4)), "sliding window", ids)
    pairs = torch.rand(1, 1, 12, 12) > 0.5
    refuse(bert(), "single pairs", {"input_ids": ids, "attention_mask": pairs | torch.eye(12, dtype=torch.bool)})
    small = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100, decoder_start_token_id=0)
    refuse(T5Model(small), "is not supported|no attention", {"input_ids": ids, "decoder_input_ids": ids})
    refuse(bert(), "no layer", ids, resolvent.ConfigurationError, layers="decoder")
    refuse(bert(), "empty list", [], resolvent.ConfigurationError)
    refuse(nn.Linear(2, 2), "no attention", ids)
    refuse(bert(), "no preset", ids, resolvent.ConfigurationError, mechanisms=["fna", "nothing"])
    refuse(bert(), "no program", ids, resolvent.ConfigurationError, program=tmp_path / "nothing")
    refuse(bert(), "a file's", ids, resolvent.ConfigurationError, mechanisms={"a/b": "fna"})
    broken = bert()
    broken.encoder.layer[1].attention.self.query.weight.data[0] = float("nan")
    refuse(broken, "finite", ids, resolvent.NumericalError)


@pytest.mark.skipif(os.name == "nt", reason="the program here is a script")
def test_the_programs_answer(tmp_path):
    program = tmp_path / "program"
    answer = {"verdicts": [{"name": "mine", "finding": "replaces", "sentence": "mine can replace softmax here."}]}
    source = f"#!{sys.executable}\nimport json, sys\nif 'fail' in ' '.join(sys.argv): sys.exit('error: no')\nprint(json.dumps({{**{answer!r}, 'args': sys.argv[1:]}}))\n"
    program.write_text(source)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    mechanisms = {"mine": resolvent.Mechanism.fna(alpha=1.5), "two": "softmax"}
    analysis = resolvent.analyze(bert(), texts(), tmp_path / "out", mechanisms=mechanisms, program=program)
    assert analysis.results["args"] == [*analysis.command[1:], "--json", "--quiet"]
    files = analysis.command[-1].split(",")
    assert [pathlib.Path(file).name for file in files] == ["mine.json", "two.json"]
    assert resolvent.Mechanism.from_json(pathlib.Path(files[0]).read_text()) == mechanisms["mine"]
    assert "mine  replaces  mine can replace softmax here." in str(analysis)
    assert analysis.report == tmp_path / "out" / "report.html"
    with pytest.raises(resolvent.Error, match="error: no") as failed:
        resolvent.analyze(bert(), texts(), tmp_path / "fail", program=program, mechanisms=["fna"])
    assert "resolvent" in str(failed.value.remedy) or "program" in str(failed.value.remedy)


@pytest.mark.skipif(PROGRAM is None, reason="the program is not here; RESOLVENT_PROGRAM names it")
def test_the_program_reads_what_is_written(tmp_path):
    mechanisms = {"one": "softmax", "mean": "uniform"}
    analysis = resolvent.analyze(bert(), texts(), tmp_path, mechanisms=mechanisms, program=PROGRAM)
    assert [layer["name"] for layer in analysis.results["layers"]] == list(analysis.layers)
    assert all(layer["masked"] and layer["values"] and not layer["tied"] for layer in analysis.results["layers"])
    assert not analysis.results["unread"] and len(analysis.results["verdicts"]) == 2
    assert analysis.report.exists()


@pytest.mark.skipif(PROGRAM is None, reason="the program is not here; RESOLVENT_PROGRAM names it")
def test_the_program_fits_what_models_take(tmp_path):
    model = bert()
    found = resolvent.analyze(model, texts(), tmp_path, fit=0.9, cost="operations", program=PROGRAM)
    assert found.fit is not None and list(found.fit.layers) == list(found.layers)
    assert (found.fit.target, found.fit.cost, found.fit.causal) == (0.9, "operations", False)
    assert resolvent.load_fit(tmp_path / "fit.json") == found.fit
    resolvent.convert(model, fit=found.fit, dropout=0.0)
