"""What a call costs beside its computing: whole calls on so few numbers that the kernels have next to nothing to do.

    python benches/overhead.py --threads 1 --calls 2000 --rounds 9 --json overhead.json

The kernels take part in every number, so that the overhead of a call over the same one from Rust is below it. PyTorch's own function on the
same tensors stands beside. Microseconds per call, medians of rounds in turns.
"""

from __future__ import annotations

from typing import Any, Callable

import common
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import resolvent.torch

SHAPE = (1, 1, 4, 8)


def repeated(call: Callable[[], Any], times: int) -> Callable[[], None]:
    """The call, so often that a clock sees it."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = common.parser_of(__doc__, calls=2000, rounds=9, threads=1).parse_args(arguments)
    torch.set_num_threads(options.threads)
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    a, b, c = (x.numpy() for x in (q, k, v))
    out = np.empty(SHAPE, np.float32)
    leaves = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
    ones = torch.ones(SHAPE)
    ways: dict[str, Callable[[], Any]] = {
        "attend of arrays": lambda: resolvent.attend(a, b, c, threads=options.threads),
        "attend of arrays, out given": lambda: resolvent.attend(a, b, c, out=out, threads=options.threads),
        "torch.attend": lambda: resolvent.torch.attend(q, k, v),
        "torch.attend, recorded": lambda: resolvent.torch.attend(*leaves),
        "torch.attend and gradients": lambda: torch.autograd.grad(resolvent.torch.attend(*leaves), leaves, ones),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
        "sdpa and gradients": lambda: torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, ones),
    }
    results: dict[str, Any] = {"machine": common.machine(options.threads), "shape": SHAPE, "microseconds": {}}

    def measure(ways: dict[str, Callable[[], Any]]) -> None:
        times = common.in_turns({name: repeated(call, options.calls) for name, call in ways.items()}, options.rounds)
        for name, x in times.items():
            each = {part: 1e6 * x[part] / options.calls for part in ("median", "least", "processor")}
            results["microseconds"][name] = each
            print(f"{name}: {each['median']:.2f} us a call, {each['least']:.2f} at least, {each['processor']:.2f} of the processor")

    measure(ways)
    with resolvent.torch.accelerate():
        measure({f"accelerated {name}": ways[name] for name in ("sdpa", "sdpa and gradients")})
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
