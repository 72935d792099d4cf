"""Models that go to other processes, and what their conversions leave behind."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_transformers import ENCODER, states, texts  # noqa: E402
from transformers import BertConfig, BertModel  # noqa: E402

import resolvent  # noqa: E402
import resolvent.transformers  # noqa: E402

LOADED = """
import sys, torch
{first}
model, ids, expected = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    assert torch.equal(model(input_ids=ids)[0], expected)
"""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def bert(config=None):
    return BertModel(config or BertConfig(**ENCODER)).eval()


@pytest.mark.parametrize(("layers", "original"), [(None, "sdpa"), ([-1], "resolvent:infsa")])
def test_converted_models_are_loaded_in_another_process(tmp_path, layers, original):
    model, (ids, _) = bert(), texts()
    resolvent.transformers.register()
    model.set_attn_implementation(original)
    resolvent.convert(model, "fna", layers=layers)
    run(tmp_path, model, ids, "")


def test_models_with_an_implementation_are_loaded_where_it_is_imported(tmp_path):
    model, (ids, _) = bert(), texts()
    model.set_attn_implementation("resolvent:fna")
    run(tmp_path, model, ids, "import resolvent.transformers")


def run(tmp_path, model, ids, first):
    torch.save((model, ids, states(model, input_ids=ids)), tmp_path / "model.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = LOADED.format(first=first)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_layers_of_timm_are_pickled_and_copied():
    timm = pytest.importorskip("timm", reason="SKIPPED: timm is not installed: its layers are not tested")
    import resolvent.timm

    heads = resolvent.HeadMechanisms([([0], "softmax"), ([1, 2], "infsa")])
    for mechanism in ("fna", heads):
        options = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 48, "num_heads": 3}
        layer = resolvent.timm.attention_layer(mechanism)
        assert layer is resolvent.timm.attention_layer(mechanism)
        model, picture = timm.models.vision_transformer.VisionTransformer(**options, attn_layer=layer), torch.randn(1, 3, 16, 16)
        for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(again(picture), model(picture)) and type(again.blocks[0].attn) is layer
            assert again.state_dict().keys() == model.state_dict().keys()
        file = io.BytesIO()
        torch.save(model, file)


def test_models_that_share_a_configuration_are_converted_apart():
    one = bert()
    other, (ids, _) = bert(one.config), texts()
    before = states(other, input_ids=ids)
    first, second = resolvent.convert(one, "infsa"), resolvent.convert(other, "infsa")
    expected = states(other, input_ids=ids)
    assert not torch.allclose(expected, before, atol=1e-3)
    first.undo()
    assert torch.equal(states(other, input_ids=ids), expected)
    second.undo()
    assert torch.equal(states(other, input_ids=ids), before)
    assert one.config._attn_implementation == "sdpa"


def test_a_name_of_a_preset_is_the_presets():
    for mechanism in ('{"mechanism": "fna", "alpha": 1.7}', resolvent.Mechanism(score="dot-exp"), resolvent.Mechanism.local(window=3)):
        with pytest.raises(resolvent.ConfigurationError, match="name"):
            resolvent.transformers.register(mechanism)
    assert resolvent.transformers.register("fna") == ["resolvent:fna"]
    assert resolvent.transformers.register(resolvent.Mechanism.local(window=3), "near") == ["resolvent:near"]


def test_states_of_clustered_calls_are_pickled_and_copied():
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(2, 3, 24, 8).numpy() for _ in range(4))
    for mechanism in ("ssa", {"mechanism": "ssa", "estimator": "centroid", "clusters": 4}, {"mechanism": "routed", "clusters": 5, "routes": 2}):
        _, state = resolvent.attend(q, k, v, mechanism, return_state=True)
        expected = resolvent.attend_backward(q, k, v, dout, mechanism, state=state)
        for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
            got = resolvent.attend_backward(q, k, v, dout, mechanism, state=again)
            assert all((one == other).all() for one, other in zip(expected[:3], got[:3]))
    plan = resolvent.clusters(q, k, v, "ssa")
    assert pickle.loads(pickle.dumps(plan)).tensors() == plan.tensors()
    with pytest.raises(resolvent.Error, match="label_q"):
        type(plan).restored([(6, ([0], [], [], [], []))])
