"""The examples run, and do what they say: data-parallel training in two processes, and the notebook."""

import argparse
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
SIZES = {"steps": 6, "batch": 4, "tokens": 32, "width": 64, "layers": 2, "lr": 3e-3, "mechanism": "infsa"}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the package")


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_processes_train_as_one(tmp_path):
    result = tmp_path / "result.json"
    options = [f"--{name}={value}" for name, value in SIZES.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, EXAMPLES / "data_parallel.py", *options, f"--json={result}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    together = json.loads(result.read_text(encoding="utf-8"))
    alone = loaded(EXAMPLES / "data_parallel.py").train(argparse.Namespace(**SIZES))
    assert together["processes"] == 2 and alone["processes"] == 1
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert alone["losses"][-1] < alone["losses"][0] - 0.05, "it learns"
