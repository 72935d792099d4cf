"""Every mechanism but `ssa` as a PyTorch user would write it, from the equations of its paper: functions of q, k and v."""

import math
import os

import torch
import torch.nn.functional as F


class Refused(Exception):
    """There is no such way to this result."""


def future(n):
    """The pairs that causality forbids."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def scale_of(config, q):
    return config["scale"] or q.shape[-1] ** -0.5


def sdpa(q, k, v, config):
    shared = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=config["causal"], scale=config["scale"], enable_gqa=shared)


def softmax(q, k, v, config):
    scores = q @ k.mT * scale_of(config, q)
    if config["causal"]:
        scores = scores.masked_fill(future(q.shape[-2]), -math.inf)
    return scores.softmax(-1) @ v


def uniform(q, k, v, config):
    if config["causal"]:
        return v.cumsum(-2) / torch.arange(1, v.shape[-2] + 1)[:, None]
    return v.mean(-2, keepdim=True).expand(v.shape)


def affinities(q, k, config):
    """ "Infinite Self-Attention", equations 11 and 12, times the decay."""
    a = torch.relu(q @ k.mT * scale_of(config, q))
    if config["causal"]:
        a = a.tril()
        norm = a.square().sum(-1, keepdim=True).cumsum(-2).sqrt()
    else:
        norm = a.square().sum((-1, -2), keepdim=True).sqrt()
    return config["gamma"] * (a / (norm + config["eps"]))


def infsa(q, k, v, config):
    return affinities(q, k, config) @ v


def infsa_resolvent(q, k, v, config):
    """All hops, each factor of the Neumann series' product form twice as many as the one before: `torch.linalg.solve` on two
    threads never came back (PyTorch 2.15 with MKL)."""
    hops = affinities(q, k, config)
    solution = v + hops @ v
    reached = config["gamma"] ** 2
    while reached > config["tol"] * (1 - config["gamma"]):
        hops = hops @ hops
        solution = solution + hops @ solution
        reached = reached**2
    return solution - v


def linear_infsa(q, k, v, config):
    """ "Infinite Self-Attention", equations 16 to 21."""
    energy = q.norm(dim=-1)
    alpha = energy / (energy.sum(-1, keepdim=True) + config["eps"])
    pooled = alpha.unsqueeze(-2) @ q
    score = torch.relu(k @ pooled.mT * scale_of(config, q)).squeeze(-1)
    weight = score / (score.sum(-1, keepdim=True) + config["eps"])
    return (config["gamma"] * (weight.unsqueeze(-2) @ v)).expand(*q.shape[:-1], v.shape[-1])


def fna(q, k, v, config):
    """ "Fractional neural attention for efficient multiscale sequence processing", equation 13."""
    dim, alpha, kappa = q.shape[-1], config["alpha"], config["kappa"]
    if not isinstance(kappa, (int, float)):
        kappa = dim**0.5 / math.expm1(math.log(2) / dim)
    scores = -(dim + alpha) * torch.log1p(torch.cdist(q, k) / kappa)
    if config["causal"]:
        scores = scores.masked_fill(future(q.shape[-2]), -math.inf)
    return scores.softmax(-1) @ v


def pooled(x, config):
    """Means of windows along the sequence; the last may be short."""
    windows = F.avg_pool1d(x.flatten(0, 1).mT, config["landmarks"]["ratio"], ceil_mode=True)
    return windows.mT.unflatten(0, x.shape[:2])


def newton_schulz(a, x, steps):
    for _ in range(steps):
        x = 2 * x - x @ a @ x
    return x


def soft(q, k, v, config):
    """ "Softmax-free Linear Transformers", equations 7 and 17."""
    scale = config["scale"] or 0.5 / math.sqrt(q.shape[-1])
    u = pooled(q, config)
    a = torch.exp(-scale * torch.cdist(u, u).square())
    p = torch.exp(-scale * torch.cdist(u, q).square())
    m = a + config["ridge"] * torch.eye(u.shape[-2])
    alpha = 1.8 / m.detach().abs().sum(-2).amax(-1)[..., None, None].square()
    inverse = newton_schulz(m, alpha * m, config["newton_iterations"])
    z = p @ v
    if config["mechanism"] == "soft-pp":
        c = a.sum(-1, keepdim=True).rsqrt()
        return p.mT @ (c * (inverse @ (c * z)))
    return p.mT @ (inverse @ z)


def laplace(x, y, config):
    return torch.exp(-torch.cdist(x, y, p=1) / config["lambda"])


def weight_scale(n, config):
    return {"unit": 1.0, "inv-sqrt-n": n**-0.5, "inv-n": 1.0 / n}[config["weight_scale"]]


def laplacian(q, k, v, config):
    """ "LaplacianFormer: Rethinking Linear Attention with Laplacian Kernel", equations 5 to 9."""
    n, marks = k.shape[-2], pooled(k, config)
    cq, ck = laplace(q, marks, config), laplace(k, marks, config)
    w = laplace(marks, marks, config) + config["ridge"] * torch.eye(marks.shape[-2])
    start = torch.eye(w.shape[-1]) / w.detach().sum(-1).amax(-1)[..., None, None]
    x = newton_schulz(w, start.expand_as(w), config["newton_iterations"])
    centred = cq - cq.mean(-2, keepdim=True)
    s = centred.mT @ centred / q.shape[-2]
    a = ck @ x
    variance = (a * (a @ s)).sum(-1, keepdim=True)
    mixed = centred @ (x @ (ck.mT @ (v * (variance + config["whiten_eps"]).rsqrt())))
    return mixed * weight_scale(n, config) + v.mean(-2, keepdim=True)


def laplacian_exact(q, k, v, config):
    g = laplace(q, k, config)
    g = g - g.mean(-2, keepdim=True)
    variance = g.square().mean(-2, keepdim=True)
    g = g * (variance + config["whiten_eps"]).rsqrt()
    return (g * weight_scale(k.shape[-2], config)) @ v + v.mean(-2, keepdim=True)


FORMULAS = {
    "softmax": softmax,
    "uniform": uniform,
    "infsa": infsa,
    "infsa-resolvent": infsa_resolvent,
    "linear-infsa": linear_infsa,
    "fna": fna,
    "soft": soft,
    "soft-pp": soft,
    "laplacian": laplacian,
    "laplacian-exact": laplacian_exact,
}
LINEAR = ["uniform", "linear-infsa"]

# The fields in which a formula above takes one value only.
FIXED = {
    "activation": "relu", "iterations": 1, "norm_bias": 0.0, "broadcast": True, "manifold": "euclidean", "kernel": "levy",
    "norm_exponent": 0.0, "max_iter": None, "grid": None, "landmark_act": False, "inverse": "newton-schulz", "newton_init": "scaled",
    "value_conv": 0, "degree": "landmark", "centering": "per-key", "whitening": "diagonal", "bias_one_over_n": True,
}  # fmt: skip


def formula(config, way):
    """The function of q, k and v."""
    name = config["mechanism"]
    for field, value in FIXED.items():
        if config.get(field, value) != value:
            raise Refused(f"there is no formula of {name} with {field} {config[field]}")
    if config.get("landmarks", {"kind": "pool"})["kind"] != "pool":
        raise Refused(f"there is no formula of {name} with landmarks other than pooled ones")
    if name == "fna" and (config["alpha"] >= 2 or config["kappa"] == "vision" or config.get("intrinsic_dim") is not None):
        raise Refused("there is no formula of fna with these fields")
    if config["causal"] and name not in ("softmax", "uniform", "infsa", "fna"):
        raise Refused(f"there is no causal formula of {name}")
    plain = sdpa if way.startswith("sdpa") else FORMULAS[name]

    def apply(q, k, v):
        if plain is not sdpa and k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return plain(q, k, v, config)

    return torch.compile(apply, dynamic=False) if way == "compiled" else apply


def check_memory(config, shape):
    """Refuses what would fill the memory: a formula holds some matrices of all pairs, or of all pairs of tokens and landmarks."""
    batch, heads, n, channels = shape
    ratio = config.get("landmarks", {}).get("ratio", 1)
    columns = channels if config["mechanism"] in LINEAR else max(n // ratio, channels)
    bytes_held = 6 * 4 * batch * heads * n * columns
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if bytes_held > 0.8 * free:
        raise Refused(f"it would hold about {bytes_held / 2**30:.0f} GiB of {free / 2**30:.0f} GiB of free memory")
