"""Eager PyTorch on the same formulas, for comparison: medians of interleaved runs as JSON on stdout.

    python benches/torch_attention.py [--shape 1,8,4096,64] [--threads 2] [--runs 7] [--causal] [softmax infsa linear-infsa fna]

`softmax` is `scaled_dot_product_attention`; `infsa` and `linear-infsa` are the equations of "Infinite Self-Attention"
(11, 12 and 16 to 21), `fna` that of "Fractional neural attention for efficient multiscale sequence processing" (13, with
`cdist`), as a PyTorch user would write them.
"""

import argparse
import json
import math
import statistics
import time

import torch


def softmax(q, k, v, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def infsa(q, k, v, causal, gamma=0.7, eps=1e-6):
    a = torch.relu(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    if causal:
        a = a.tril()
        norm = a.square().sum(-1, keepdim=True).cumsum(-2).sqrt()
    else:
        norm = a.square().sum((-1, -2), keepdim=True).sqrt()
    return gamma * (a / (norm + eps)) @ v


def linear_infsa(q, k, v, causal, gamma=0.7, eps=1e-6):
    energy = q.norm(dim=-1)
    alpha = energy / (energy.sum(-1, keepdim=True) + eps)
    pooled = alpha.unsqueeze(-2) @ q
    score = torch.relu(k @ pooled.transpose(-1, -2) * q.shape[-1] ** -0.5).squeeze(-1)
    weight = score / (score.sum(-1, keepdim=True) + eps)
    return (gamma * (weight.unsqueeze(-2) @ v)).expand(*q.shape[:-1], v.shape[-1])


def fna(q, k, v, causal, alpha=1.2):
    dim = q.shape[-1]
    kappa = dim**0.5 / math.expm1(math.log(2) / dim)
    scores = -(dim + alpha) * torch.log1p(torch.cdist(q, k) / kappa)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


MECHANISMS = {"softmax": softmax, "infsa": infsa, "linear-infsa": linear_infsa, "fna": fna}


def timed(function, inputs, dout, causal, training):
    """Seconds of one run."""
    leaves = [x.detach().requires_grad_(training) for x in inputs]
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        out = function(*leaves, causal)
        if training:
            out.backward(dout)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mechanisms", nargs="*", metavar="MECHANISM", help="default: all")
    parser.add_argument("--shape", default="1,8,4096,64", help="batch,heads,tokens,channels")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    chosen = args.mechanisms or list(MECHANISMS)
    for name in chosen:
        if name not in MECHANISMS or (args.causal and name == "linear-infsa"):
            parser.error(f"{name}: choose from {', '.join(MECHANISMS)} (linear-infsa has no causal form)")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = [int(n) for n in args.shape.split(",")]
    inputs, dout = [torch.rand(shape) * 2 - 1 for _ in range(3)], torch.rand(shape)
    rows = {(name, training): [] for name in chosen for training in (False, True)}
    for run in range(args.runs + 1):
        for (name, training), times in rows.items():
            seconds = timed(MECHANISMS[name], inputs, dout, args.causal, training)
            if run > 0:  # the first is cold
                times.append(seconds)
    results = [
        {
            "mechanism": name,
            "pass": "forward+backward" if training else "forward",
            "median_s": statistics.median(times),
            "fastest_s": min(times),
        }
        for (name, training), times in rows.items()
    ]
    setting = {"torch": torch.__version__, "threads": args.threads, "shape": shape, "causal": args.causal}
    print(json.dumps({**setting, "results": results}, indent=1))


if __name__ == "__main__":
    main()
