"""What processes that share a sequence compute, for test_distributed.py: run in each of them, results in a file per process."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import resolvent
import resolvent.torch
from resolvent import Features, Mechanism, Nystrom
from resolvent.torch.distributed import attend, traffic

#: Tokens of every process.
LENGTHS = (11, 5, 8)
BATCH, HEADS, CHANNELS = 2, 3, 8
POOLED = {"kind": "pool", "count": 5}

#: Mechanism, and what of its parameters is given.
MECHANISMS = {
    "softmax": ("softmax", {}),
    "tied softmax": (Mechanism.softmax(tied=True), {}),
    "fna": ("fna", {"alpha": [1.2, 1.5, 1.8], "kappa": [3.0, 20.0, 50.0]}),
    "cosine": ("cosine", {"scale": [5.0, 8.0, 11.0]}),
    "sigmoid": ("sigmoid", {"scale": [0.1, 0.2, 0.4]}),
    "relu": ("relu", {}),
    "local": (Mechanism.local(window=4), {}),
    "wide window, one sink": (Mechanism(structure=resolvent.Dense(window=9, sinks=1)), {}),
    "wide window": (Mechanism(score="levy", structure=resolvent.Dense(window=9), bias="alibi"), {}),
    "alibi": (Mechanism("softmax", bias="alibi"), {}),
    "infsa": ("infsa", {"gamma": [0.3, 0.6, 0.9]}),
    "uniform": ("uniform", {}),
    "linear-infsa": ("linear-infsa", {"gamma": [0.3, 0.6, 0.9]}),
    "linear-infsa, steps": (Mechanism.linear_infsa(iterations=3, norm_bias="auto"), {}),
    "linear": ("linear", {}),
    "performer": (Mechanism.performer(structure=Features(map="favor", seed=3)), {}),
    "routed": (Mechanism.routed(clusters=3, routes=1, causal_clusters={"kind": "segment", "size": 4}), {}),
    "ssa": (Mechanism.ssa(clusters=4, samples=2), {}),
    "ssa, rows": (Mechanism.ssa(clusters=4, samples=2, sampler="row", cluster_on="keys"), {}),
    "ssa, means": (Mechanism.ssa(clusters=4, estimator="centroid", global_tokens=[0, 13], balance=1.5), {}),
    "ssa, blocks": (Mechanism.ssa(clusters=3, estimator="centroid", causal_clusters={"kind": "block", "size": 7}), {}),
    "ssa, two sides": (Mechanism.ssa(clusters=4, cluster_on="dual", estimator="centroid", routes=2), {}),
    "levy over clusters": (
        Mechanism("ssa", score=resolvent.Levy(1.5, kappa=3.0), structure=resolvent.Clustered(4, estimator="centroid")),
        {"kappa": [3.0, 4.0, 5.0]},
    ),
    "soft": (Mechanism.soft(landmarks=POOLED), {"scale": [0.1, 0.2, 0.3]}),
    "soft, exact": (Mechanism.soft(landmarks={"kind": "pool", "ratio": 3}, inverse="cholesky"), {}),
    "soft-pp": (Mechanism.soft_pp(landmarks=POOLED), {}),
    "soft-pp, tokens": (Mechanism.soft_pp(landmarks=POOLED, degree="token", gradient="unrolled"), {}),
    "laplacian": (Mechanism.laplacian(landmarks=POOLED, weight_scale="inv-n"), {"lambda": [3.0, 4.0, 6.0]}),
    "laplacian, rows": (Mechanism.laplacian(landmarks=POOLED, centering="per-query", inverse="cholesky"), {}),
    "laplacian, bare": (Mechanism.laplacian(landmarks=POOLED, centering="none", whitening="none"), {}),
    "linear, damped": (Mechanism("linear", series=resolvent.OneHop(0.5), tied=True), {"scale": [0.2, 0.4, 0.6]}),
    "cosine, damped": ("cosine", {"gamma": [0.3, 0.6, 0.9]}),
    "levy through landmarks": (
        Mechanism("nystromformer", score=resolvent.Levy(1.5, kappa=3.0), structure=Nystrom(landmarks=5), tied=True),
        {"kappa": [3.0, 4.0, 5.0], "gamma": [0.3, 0.6, 0.9]},
    ),
    "nystromformer": (Mechanism.nystromformer(structure=Nystrom(landmarks=5)), {}),
}
#: Those that are causal too.
CAUSAL = ("softmax", "fna", "cosine", "cosine, damped", "sigmoid", "relu", "local", "wide window", "wide window, one sink", "alibi", "infsa")
CAUSAL += ("uniform", "linear", "linear, damped", "performer", "routed", "ssa, rows", "ssa, means", "ssa, blocks")
CASES = [(n, causal, masked) for n in MECHANISMS for causal in (False, True) for masked in (False, True) if n in CAUSAL or not causal]
#: Mechanisms that also have all keys and values brought to every process.
GATHERED = ("softmax", "linear")
#: One of every exchange, to be computed of numbers in bfloat16.
HALVED = ("softmax", "linear", "infsa", "soft", "local", "ssa")


def problem(name, masked, seed=0):
    """The whole of a call: tensors, masks and parameters, and what the output is weighed with."""
    mechanism, given = MECHANISMS[name]
    mechanism = Mechanism.of(mechanism)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, weights = (torch.randn(BATCH, HEADS, sum(LENGTHS), CHANNELS, generator=generator) for _ in range(4))
    masks = {}
    if masked:
        keep = torch.rand(BATCH, sum(LENGTHS), generator=generator) > 0.25
        keep[0, :12] = False  # the first shard of the first sequence has no key
        one = mechanism.tied or mechanism._core.masks_tokens_once
        rows = keep if one else keep.roll(3, 1)
        hidden, idle = (~x[:, None, :, None].expand_as(k) for x in (keep, rows))
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        q, masks = q.masked_fill(idle, torch.nan), {"key_mask": keep, "query_mask": rows}
    parameters = {n: torch.tensor(x) for n, x in given.items()}
    return mechanism, (q, None if mechanism.tied else k, v), weights, masks, parameters


def halved(tensors):
    """The tensors in bfloat16."""
    return [None if x is None else x.bfloat16() for x in tensors]


def compute(call, tensors, parameters, weights):
    """The output, and the gradients of everything."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    own = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    out = call(*leaves, own)
    (out * weights).sum().backward()
    # What a mechanism makes no use of has no gradient.
    gradients = [None if x is None else torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return out.detach(), gradients, {n: p.grad for n, p in own.items()}


def shard(x, axis, rank):
    """Of a mask, whose last axis are the tokens, as its columns lie."""
    part = None if x is None else x.split(LENGTHS, axis)[rank]
    return part if part is None or axis == -1 else part.contiguous()


def _worker(rank, job, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(LENGTHS))
    try:
        torch.save(job(rank), os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def together(job, processes=len(LENGTHS)):
    """What `job` returns in each of the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (job, os.path.join(folder, "store"), folder), nprocs=processes)
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(processes)]


def every_case(rank):
    """All cases in one process of three, with the bytes sent."""
    results = {}
    for name, causal, masked in CASES:
        for exchange in ("auto", "gather") if name in GATHERED else ("auto",):
            mechanism, tensors, weights, masks, parameters = problem(name, masked)
            mine, masks = [shard(x, -2, rank) for x in tensors], {n: shard(x, -1, rank) for n, x in masks.items()}

            def call(q, k, v, own, masks=masks, mechanism=mechanism, causal=causal, exchange=exchange):
                return attend(q, k, v, mechanism, causal=causal, parameters=own, exchange=exchange, lengths=LENGTHS, **masks)

            with traffic() as sent:
                done = compute(call, mine, parameters, shard(weights, -2, rank))
            results[name, causal, masked, exchange] = (*done, sent.bytes)
    for name in HALVED:
        mechanism, tensors, weights, _, parameters = problem(name, False)
        mine = halved(shard(x, -2, rank) for x in tensors)
        done = compute(lambda q, k, v, own, m=mechanism: attend(q, k, v, m, parameters=own), mine, parameters, shard(weights, -2, rank))
        with torch.no_grad():
            alone = attend(*mine, mechanism, parameters=parameters)
        assert done[0].dtype == torch.bfloat16 and torch.equal(alone, done[0]), name
        results[name] = done
    return results


def whole(name, causal, masked, rounded=False):
    """The same in one process; of numbers that are `rounded` to bfloat16, if asked."""
    mechanism, tensors, weights, masks, parameters = problem(name, masked)
    tensors = [None if x is None else x.float() for x in halved(tensors)] if rounded else tensors

    def call(q, k, v, own):
        return resolvent.torch.attend(q, k, v, mechanism, causal=causal, parameters=own, **masks)

    return compute(call, tensors, parameters, weights)
