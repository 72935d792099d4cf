"""The examples run, and do what they say: data-parallel training in two processes, and the notebook."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

HERE = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES, BENCHES = HERE / "examples", HERE / "benches"
SIZES = {"steps": 6, "batch": 4, "tokens": 32, "width": 64, "layers": 2, "mechanism": "infsa", "processes": 2, "rounds": 1}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the package")


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_two_processes_train_as_one(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    result = loaded(BENCHES / "processes.py").main([f"--{name}={value}" for name, value in SIZES.items()])
    assert result["losses_apart"] <= 1e-4 and result["ratio"] > 0 and result["tokens_per_second"].keys() == {1, 2}
    assert result["losses"][-1] < result["losses"][0] - 0.05, "it learns"


def test_the_notebook_runs():
    book = json.loads((EXAMPLES / "three_models.ipynb").read_text(encoding="utf-8"))
    names, threads = {"__name__": "notebook"}, torch.get_num_threads()
    try:
        for n, cell in enumerate(book["cells"]):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {n}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
    assert names["trained"] > 0.95
    for mechanism in ("fna", "infsa"):
        lost, recovered = names["results"][mechanism]
        assert lost < 0.9 < recovered, mechanism


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_benches_agree_before_they_time(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHES))
    written = tmp_path / "peers.json"
    results = loaded(BENCHES / "peers.py").main(["--shapes=1x2x40x16", "--views", "--rounds=1", "--threads=1", f"--json={written}"])
    assert json.loads(written.read_text(encoding="utf-8"))["machine"] == results["machine"]
    found = {(row["dtype"], row["pass"]): row for row in results["results"]}
    assert len(found) == 4 and all("pytorch" in row["over_resolvent"] for row in found.values())
    assert all("accelerated" in row["over_resolvent"] for (dtype, _), row in found.items() if dtype == "float32")
    assert all(row["errors"].keys() == row["seconds"].keys() for row in found.values())
    sizes = {"width": 64, "layers": 1, "tokens": 32, "batch": 2, "rounds": 1, "threads": 1}
    whole = loaded(BENCHES / "encoder.py").main([f"--{name}={value}" for name, value in sizes.items()])
    assert {name: row["taken"] for name, row in whole["results"].items()} == {"inference": 1, "training step": 2}
    beside = loaded(BENCHES / "mechanisms.py").main(["--tokens=64", "--heads=1", "--channels=8", "--rounds=1", "--threads=1"])
    assert all(len(row["sdpa_over"]) == 5 for row in beside["results"].values()) and len(beside["results"]) == 2
    calls = loaded(BENCHES / "overhead.py").main(["--calls=2", "--rounds=1"])
    assert len(calls["microseconds"]) == 9 and all(row["least"] > 0 for row in calls["microseconds"].values())


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_a_language_model_with_other_attention(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHES))
    text, written = tmp_path / "text.txt", tmp_path / "language.json"
    text.write_text(" ".join(str(n * n) for n in range(300)), encoding="utf-8")
    bench = loaded(BENCHES / "language.py")
    sizes = ["--tokens", "600", "--facts=1", "--rounds=1", "--threads=1", f"--json={written}"]
    results = bench.main(["--random", "--text", f"numbers={text}", *sizes])
    assert json.loads(written.read_text(encoding="utf-8"))["curves"] == results["curves"]
    curves = {row["way"]: row for row in results["curves"]}
    assert list(curves) == list(bench.WAYS) and abs(curves["softmax"]["over"] - 1) < 1e-4
    assert curves["softmax"]["exact"] == 1 and 0 < curves["routed"]["exact"] < curves["routed, 8 routes"]["exact"] < 1
    assert curves["routed, 8 routes, no means"]["means"] == 0 < curves["routed"]["means"]
    near = sum(min(n, 256) + min(max(n - 256, 0), 4) for n in range(1, 601)) / (600 * 601 / 2)
    assert abs(curves["window 256 + 4 sinks"]["exact"] - near) < 1e-9
    assert len(results["retrieval"]) == len(curves) and len(results["generation"]) == len(curves) - 1
    found = loaded(BENCHES / "language_curves.py").medians(results["curves"], 600)
    assert list(found) == list(curves) and found["softmax"]["time"] == 1
    assert found["routed"]["share"] == curves["routed"]["exact"] + curves["routed"]["means"]
    assert found["routed"]["over"] == [curves["routed"]["over"]]


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
@pytest.mark.parametrize("means", [True, False])
def test_shares_are_of_what_is_seen(monkeypatch, means):
    monkeypatch.syspath_prepend(str(BENCHES))
    import resolvent
    from formulas import visible
    from formulas_of_structures import Plan, sight

    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    fields = {} if means else {"estimator": "importance", "samples": 0}
    fields |= {"causal_clusters": {"kind": "segment", "size": 16}, "clusters": 4, "routes": 2, "global_tokens": 3}
    mechanism = resolvent.Mechanism.from_dict({"mechanism": "routed", "structure": fields})
    plan = Plan(resolvent.clusters(q, k, v, mechanism, causal=True), (1, 2, 70, 70))
    seen, _, far = sight(plan, visible(q, k, causal=True), True, 16)
    every = 2 * 70 * 71 / 2
    got = loaded(BENCHES / "language.py").share(mechanism, (q, k, v))
    assert got == pytest.approx((float(seen.sum()) / every, float(far.sum()) / every if means else 0.0), abs=1e-12)


#: In place of a checkout: softmax by the names of MonarchAttention, which tells how it has been made.
RIVAL = """
import enum
from torch.nn.functional import scaled_dot_product_attention

PadType = enum.Enum("PadType", "pre post")
made = []

class MonarchAttention:
    def __init__(self, block_size, num_steps, pad_type, impl):
        made.append((block_size, num_steps, pad_type.name, impl))

    def __call__(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)
"""


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
@pytest.mark.parametrize("kind", ["text", "vision"])
def test_attention_dropped_into_trained_models(monkeypatch, tmp_path, kind):
    monkeypatch.syspath_prepend(str(BENCHES))
    bench = importlib.import_module("drop_in")
    weights, written = tmp_path / "model.safetensors", tmp_path / "drop_in.json"
    sizes = {"tokens": 64, "width": 32, "layers": 1, "samples": 3, "measured": 4, "seeds": 2, "rounds": 1}
    arguments = ["--model", kind, *(f"--{name}={value}" for name, value in sizes.items()), "--fit", "--weights", str(weights)]
    (tmp_path / "ma").mkdir()
    (tmp_path / "ma/monarch_attention.py").write_text(RIVAL, encoding="utf-8")
    for name in ("ma", "ma.monarch_attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    results = bench.main([*arguments, f"--json={written}", f"--monarch={tmp_path}"])
    stored = json.loads(written.read_text(encoding="utf-8"))
    assert stored["rows"] == results["rows"] and sum(stored["training"]["examples"].values()) > 0
    assert all(abs(row["cosine"] - 1) < 1e-9 and row["agreement"] == 1 for row in results["rows"]["softmax"])
    rivals = {name: results["rows"].pop(name) for name in list(results["rows"]) if name.startswith("MonarchAttention")}
    assert len(rivals) == 5 and all(abs(row["tokens"] - 1) < 1e-9 for rows in rivals.values() for row in rows)
    padded = {"text": "post", "vision": "pre"}[kind]
    assert sys.modules["ma.monarch_attention"].made[:2] == [(8, 1, padded, "torch"), (8, 2, padded, "torch")]
    near, far = (results["rows"][name][0]["tokens"] for name in ("routed, 128 clusters, 8 routes, 8 outliers", "uniform"))
    assert far < near <= 1 + 1e-9
    assert results["cost"]["softmax"]["exact"] == 1 and 0 < results["cost"]["routed"]["exact"] < 1
    assert bench.main(arguments)["rows"] == results["rows"], "weights that were written are read again"


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_a_model_trained_through_other_attention(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHES))
    bench = importlib.import_module("training")
    sizes = {"tokens": 64, "width": 32, "layers": 1, "short": 2, "whole": 2, "further": 1, "measured": 6, "seeds": 2}
    written = tmp_path / "training.json"
    results = bench.main([*(f"--{name}={value}" for name, value in sizes.items()), f"--json={written}"])
    assert json.loads(written.read_text(encoding="utf-8"))["seeds"] == results["seeds"] and len(results["seeds"]) == 2
    for ways in results["seeds"]:
        assert ways["softmax"]["start"] == ways["softmax"]["in place"], "what softmax has trained is what the others stand in"
        assert all(0 <= row[key] <= 1 for row in ways.values() for key in bench.MEASURED)
    rows = capsys.readouterr().out.splitlines()[-len(bench.ways_of()) :]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in bench.ways_of()]


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_shares_of_both_directions_are_of_what_is_seen(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import resolvent
    from formulas import visible
    from formulas_of_structures import Plan, sight

    bench = importlib.import_module("drop_in")
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    for fields in ({"clusters": 9, "routes": 2}, {"clusters": 9, "routes": 3, "outlier_globals": 4}):
        mechanism = resolvent.Mechanism.from_dict({"mechanism": "routed", "structure": fields})
        seen, _, _ = sight(Plan(resolvent.clusters(q, k, v, mechanism), (1, 2, 70, 70)), visible(q, k), False, None)
        assert bench.share(mechanism, (q, k, v)) == pytest.approx(float(seen.sum()) / (2 * 70 * 70), abs=1e-12)
    every = sum(abs(i - j) < 5 for i in range(70) for j in range(70)) / 70**2
    assert bench.share(resolvent.Mechanism("local", window=5), (q, k, v)) == pytest.approx(every, abs=1e-12)
    assert bench.window_of(every, 70) == 5
    heads = resolvent.HeadMechanisms([([1], resolvent.Mechanism("local", window=5)), ([0], "softmax")])
    assert bench.share(heads, (q, k, v)) == pytest.approx((1 + every) / 2, abs=1e-12)
    assert bench.paired([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])["p"] == pytest.approx(0.11808, abs=1e-4)


@pytest.mark.skipif(not BENCHES.is_dir(), reason="the benches are not beside the package")
def test_shards_tell_what_they_send(tmp_path):
    written = tmp_path / "shards.json"
    sizes = ["--tokens=98", "--heads=1", "--channels=8", f"--json={written}"]
    done = subprocess.run([sys.executable, BENCHES / "shards.py", *sizes], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sent = json.loads(written.read_text(encoding="utf-8"))
    assert {row["exchange"] for row in sent} == {"sums", "landmarks", "norm", "ring", "edges", "gather", "clusters"}
    assert all(0 < row["forward"]["most_of_a_process"] <= row["forward"]["all"] for row in sent)
