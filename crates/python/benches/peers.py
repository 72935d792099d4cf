"""Softmax of the wheel beside PyTorch's, onnxruntime's and OpenVINO's, in turns.

    python benches/peers.py --shapes 1x8x1024x64,4x12x197x64 --rounds 15 --json peers.json
    python benches/peers.py --views --threads 1 --dtypes float32       # heads within tokens, as models have them

`accelerated` is PyTorch's function within `resolvent.torch.accelerate`; of tensors of bf16, `products` is ours with `precision="bf16"`.
Every way's output or gradients are compared with float64 before anything is timed, and one that is off is an error. Peers that are not
installed are left out, by name. Training, a forward and a backward pass, is timed of the wheel and of PyTorch; the others have no backward
pass.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any, Callable

import common
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import resolvent.torch

# What `resolvent bench --peers` asks of libraries that only infer is asked here too.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "lab/src/bench/rivals"))
import inference  # noqa: E402

#: How far an output may be from float64's, of its largest number.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Tensors = tuple[Tensor, Tensor, Tensor]
Way = Callable[[], Any]


def with_accelerated(ways: dict[str, Way], dtype: torch.dtype) -> dict[str, Way]:
    """The ways, and PyTorch's accelerated, which answers calls of float32."""
    return {**ways, "accelerated": common.accelerated(ways["pytorch"], [])} if dtype == torch.float32 else ways


def forward_ways(tensors: Tensors, dtype: torch.dtype, threads: int) -> tuple[dict[str, Way], list[str]]:
    """The ways to this output, and those that cannot be."""
    ways: dict[str, Way] = {
        "resolvent": lambda: resolvent.torch.attend(*tensors),
        "pytorch": lambda: scaled_dot_product_attention(*tensors),
    }
    rounded = dtype == torch.bfloat16
    if rounded:
        ways["products"] = lambda: resolvent.torch.attend(*tensors, precision="bf16")
    ways, missing = with_accelerated(ways, dtype), []
    peers: dict[str, Way] = {
        "onnxruntime": lambda: inference.onnxruntime(*tensors, threads),
        "openvino": lambda: inference.openvino(*tensors, threads, products="bf16" if rounded else "f32"),
    }
    # onnxruntime has no attention in bf16.
    for name in list(peers)[1:] if rounded else peers:
        try:
            ways[name] = peers[name]()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return ways, missing


def training_ways(tensors: Tensors, weights: Tensor) -> dict[str, Way]:
    """Forward and backward passes: gradients of q, k and v, the output weighed with `weights`."""
    leaves = [x.detach().requires_grad_() for x in tensors]

    def step(attend: Callable[..., Tensor]) -> Way:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, weights)

    ways = {"resolvent": step(resolvent.torch.attend), "pytorch": step(scaled_dot_product_attention)}
    if tensors[0].dtype == torch.bfloat16:
        ways["products"] = step(lambda *x: resolvent.torch.attend(*x, precision="bf16"))
    return with_accelerated(ways, tensors[0].dtype)


def check(ways: dict[str, Way], expected: list[Tensor], dtype: torch.dtype) -> dict[str, float]:
    """How far every way is from float64, of the largest number; an end where one is too far."""
    errors = {}
    for name, run in ways.items():
        got = run()
        parts = got if isinstance(got, tuple) else (got,)
        far = [(torch.as_tensor(x).double() - y).abs().max() / y.abs().max() for x, y in zip(parts, expected)]
        errors[name] = max(float(x) for x in far)
        if not errors[name] <= TOLERANCES[dtype]:
            raise SystemExit(f"error: {name} is off by {errors[name]:.1e} of its largest number in {dtype}")
    return errors


def problem(shape: tuple[int, ...], dtype: torch.dtype, views: bool) -> list[Tensor]:
    """q, k, v and what the output is weighed with; with `views` rows of ``[batch, tokens, heads, channels]``."""
    batch, heads, tokens, channels = shape
    generator = torch.Generator().manual_seed(0)
    if views:
        return [torch.randn((batch, tokens, heads, channels), generator=generator).to(dtype).transpose(1, 2) for _ in range(4)]
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]


def measure(shape: tuple[int, ...], dtype: torch.dtype, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One shape and type: a forward pass, and one with its backward pass."""
    q, k, v, weights = problem(shape, dtype, options.views)
    exact = (q.double(), k.double(), v.double())
    ways, missing = forward_ways((q, k, v), dtype, options.threads)
    for what in missing:
        print(f"left out: {what}", file=sys.stderr)
    passes = {
        "forward": (ways, [scaled_dot_product_attention(*exact)]),
        "training": (training_ways((q, k, v), weights), list(training_ways(exact, weights.double())["pytorch"]())),
    }
    results = []
    for kind, (these, expected) in passes.items():
        errors = check(these, expected, dtype)
        times = common.in_turns(these, options.rounds)
        row = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "pass": kind, "errors": errors, "seconds": times}
        processor = common.ratios(times, "resolvent", "processor")
        results.append({**row, "over_resolvent": common.ratios(times, "resolvent"), "processor_over_resolvent": processor})
    return results


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = common.parser_of(__doc__, rounds=15, threads=torch.get_num_threads())
    parser.add_argument("--shapes", default="1x8x1024x64,4x12x197x64,1x8x4096x64", help="batch x heads x tokens x channels, by commas")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--views", action="store_true", help="heads within tokens: transposed views, as models have them")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    versions = {"resolvent": resolvent.__version__, "pytorch": torch.__version__}
    results: dict[str, Any] = {"machine": common.machine(options.threads), "versions": versions, "views": options.views, "results": []}
    for shape in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            sizes = tuple(int(n) for n in shape.split("x"))
            for row in measure(sizes, getattr(torch, dtype), options):
                results["results"].append(row)
                over = ", ".join(f"{name} {x:.2f} ({row['processor_over_resolvent'][name]:.2f})" for name, x in row["over_resolvent"].items())
                seconds = row["seconds"]["resolvent"]["median"]
                print(f"{shape} {dtype} {row['pass']}: {seconds * 1e3:.2f} ms; over it (processor time): {over}")
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
