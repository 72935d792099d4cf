"""Mechanisms whose cost grows with the tokens and not with their square, beside PyTorch's softmax, in turns: forward, and with gradients.

    python benches/mechanisms.py --threads 2 --rounds 9 --json mechanisms.json                # [1, 8, 4096, 64]
    python benches/mechanisms.py --tokens 64 --heads 1 --rounds 1                             # does it run, and agree

`soft-pp` has 49 landmarks, `linear` and `performer` are features. What each computes is compared with its own reference in float64 on as
many of the tokens as that has room for, before anything is timed; PyTorch's softmax is another function, and costs what it costs.
"""

from __future__ import annotations

from typing import Any, Callable

import common
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import resolvent.torch
from resolvent import Mechanism

MECHANISMS = {
    "linear-infsa": Mechanism("linear-infsa"),
    "soft-pp": Mechanism.soft_pp(landmarks={"kind": "pool", "count": 49}),
    "linear": Mechanism("linear"),
    "performer": Mechanism("performer"),
    "uniform": Mechanism("uniform"),
}
#: How far an output may be from the reference's, of its largest number, and of how many tokens.
TOLERANCE, COMPARED = 1e-3, 512

Call = Callable[..., Tensor]


def call_of(mechanism: Mechanism) -> Call:
    """Attention of q, k and v by the mechanism."""
    return lambda q, k, v: resolvent.torch.attend(q, None if mechanism.tied else k, v, mechanism)


def check(mechanism: Mechanism, tensors: list[Tensor]) -> float:
    """How far the mechanism is from its reference; an end where it is too far."""
    q, k, v = (x[:, :, :COMPARED].contiguous() for x in tensors)
    expected = resolvent.attend(q, None if mechanism.tied else k, v, mechanism, strategy="reference")
    error = float((call_of(mechanism)(q, k, v) - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise SystemExit(f"error: {mechanism} is off by {error:.1e} of its largest number")
    return error


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    numbers = {"batch": 1, "heads": 8, "tokens": 4096, "channels": 64, "rounds": 9, "threads": torch.get_num_threads()}
    options = common.parser_of(__doc__, **numbers).parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = (options.batch, options.heads, options.tokens, options.channels)
    q, k, v, weights = (torch.randn(shape) for _ in range(4))
    errors = {name: check(mechanism, [q, k, v]) for name, mechanism in MECHANISMS.items()}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    calls = {"sdpa": scaled_dot_product_attention, **{name: call_of(mechanism) for name, mechanism in MECHANISMS.items()}}

    def training(call: Call) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(*leaves), leaves, weights, allow_unused=True)

    def forward(call: Call) -> Callable[[], Any]:
        return lambda: call(q, k, v)

    results: dict[str, Any] = {"machine": common.machine(options.threads), "shape": shape, "errors": errors, "results": {}}
    for kind, way in (("forward", forward), ("training", training)):
        times = common.in_turns({name: way(call) for name, call in calls.items()}, options.rounds)
        over = {name: times["sdpa"]["median"] / times[name]["median"] for name in MECHANISMS}
        used = {name: times["sdpa"]["processor"] / times[name]["processor"] for name in MECHANISMS}
        results["results"][kind] = {"seconds": times, "sdpa_over": over, "processor_sdpa_over": used}
        shown = ", ".join(f"{name} {x:.2f} ({used[name]:.2f})" for name, x in over.items())
        print(f"{kind}: SDPA takes {times['sdpa']['median'] * 1e3:.1f} ms; over (processor time): {shown}")
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
