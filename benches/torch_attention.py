"""Eager PyTorch on the same formulas, for comparison: medians of interleaved runs as JSON on stdout.

    python benches/torch_attention.py [--shape 1,8,4096,64] [--threads 2] [--runs 7] [--causal] [--memory] [softmax infsa linear-infsa fna soft soft-pp laplacian]

`softmax` is `scaled_dot_product_attention`; `infsa` and `linear-infsa` are the equations of "Infinite Self-Attention"
(11, 12 and 16 to 21), `fna` that of "Fractional neural attention for efficient multiscale sequence processing" (13, with
`cdist`), as a PyTorch user would write them. `soft` and `soft-pp` are "Softmax-free Linear Transformers" (7, 17) and `laplacian`
"LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel" (5 to 9), all with 64 pooled landmarks and twenty Newton-Schulz
steps through autograd; queries are keys in the first two. `--memory` prints instead how far one first training pass of one mechanism raises the
process's peak memory.
"""

import argparse
import json
import math
import resource
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


MARKS = 64


def pooled(x):
    batch, heads, tokens, dim = x.shape
    return x.reshape(batch, heads, MARKS, tokens // MARKS, dim).mean(-2)


def newton_schulz(a, x, steps=20):
    for _ in range(steps):
        x = 2 * x - x @ a @ x
    return x


def soft(q, k, v, causal, degrees=False, ridge=0.01):
    scale = 0.5 / math.sqrt(q.shape[-1])
    u = pooled(q)
    a = torch.exp(-scale * torch.cdist(u, u).square())
    p = torch.exp(-scale * torch.cdist(u, q).square())
    m = a + ridge * torch.eye(MARKS)
    alpha = 1.8 / m.abs().sum(-2).amax(-1)[..., None, None].square()
    z = p @ v
    if degrees:
        c = a.sum(-1, keepdim=True).rsqrt()
        return p.transpose(-1, -2) @ (c * (newton_schulz(m, alpha * m) @ (c * z)))
    return p.transpose(-1, -2) @ (newton_schulz(m, alpha * m) @ z)


def soft_pp(q, k, v, causal):
    return soft(q, k, v, causal, degrees=True)


def laplacian(q, k, v, causal, bandwidth=4.0, ridge=1e-3, eps=1e-5):
    marks = pooled(k)
    cq, ck = [torch.exp(-torch.cdist(x, marks, p=1) / bandwidth) for x in (q, k)]
    w = torch.exp(-torch.cdist(marks, marks, p=1) / bandwidth) + ridge * torch.eye(MARKS)
    start = torch.eye(MARKS) / w.sum(-1).amax(-1)[..., None, None]
    x = newton_schulz(w, start.expand_as(w))
    centred = cq - cq.mean(-2, keepdim=True)
    s = centred.transpose(-1, -2) @ centred / q.shape[-2]
    a = ck @ x
    variance = (a * (a @ s)).sum(-1, keepdim=True)
    return centred @ (x @ (ck.transpose(-1, -2) @ (v * (variance + eps).rsqrt()))) + v.mean(-2, keepdim=True)


MECHANISMS = {
    "softmax": softmax,
    "infsa": infsa,
    "linear-infsa": linear_infsa,
    "fna": fna,
    "soft": soft,
    "soft-pp": soft_pp,
    "laplacian": laplacian,
}
CAUSAL = ["softmax", "infsa", "fna"]


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
    parser.add_argument("--memory", action="store_true", help="of one MECHANISM")
    args = parser.parse_args()
    chosen = args.mechanisms or list(MECHANISMS)
    for name in chosen:
        if name not in MECHANISMS or (args.causal and name not in CAUSAL):
            parser.error(f"{name}: choose from {', '.join(MECHANISMS)} (with --causal from {', '.join(CAUSAL)})")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = [int(n) for n in args.shape.split(",")]
    inputs, dout = [torch.rand(shape) * 2 - 1 for _ in range(3)], torch.rand(shape)
    if args.memory:
        if len(chosen) != 1:
            parser.error("--memory takes one MECHANISM: the peak is the process's")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        timed(MECHANISMS[chosen[0]], inputs, dout, args.causal, True)
        print(json.dumps({"mechanism": chosen[0], "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024}))
        return
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
