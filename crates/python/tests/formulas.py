"""Mechanisms in a few lines of float64 PyTorch each, from their definitions: what the kernels are compared with."""

import math

import torch


def visible(q, k, key_mask=None, causal=False):
    """Which pairs meet, ``[batch, 1, queries, keys]``."""
    queries, keys = q.shape[-2], k.shape[-2]
    pairs = torch.ones(q.shape[0], 1, queries, keys, dtype=torch.bool)
    if causal:
        pairs = pairs & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return pairs if key_mask is None else pairs & key_mask[:, None, None, :]


def per_head(x):
    return x.double()[:, None, None]


def products(q, k, scale=None):
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def rows(weights, pairs):
    weights = weights * pairs
    sums = weights.sum(-1, keepdim=True)
    return weights / torch.where(sums == 0, 1.0, sums)


def squared_distances(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def softmax(q, k, v, pairs, **_):
    return rows(products(q, k).exp(), pairs) @ v


def uniform(q, k, v, pairs, **_):
    return rows(torch.ones_like(products(q, k)), pairs) @ v


def fna(q, k, v, pairs, alpha=None, kappa=None, **_):
    d = q.shape[-1]
    alpha = torch.tensor(1.2) if alpha is None else per_head(alpha)
    kappa = math.sqrt(d) / (2 ** (1 / d) - 1) if kappa is None else per_head(kappa)
    distance = squared_distances(q, k).clamp_min(1e-300).sqrt()
    return rows((1 + distance / kappa) ** -(d + alpha), pairs) @ v


def infsa_operator(q, k, pairs):
    affinity = products(q, k).relu() * pairs
    return affinity / (affinity.square().sum((-2, -1), keepdim=True).sqrt() + 1e-6)


def infsa(q, k, v, pairs, gamma=None, **_):
    gamma = 0.7 if gamma is None else per_head(gamma)
    return gamma * (infsa_operator(q, k, pairs) @ v)


def infsa_resolvent(q, k, v, pairs, gamma=None, **_):
    operator = (0.7 if gamma is None else per_head(gamma)) * infsa_operator(q, k, pairs)
    identity = torch.eye(operator.shape[-1], dtype=operator.dtype)
    return torch.linalg.solve(identity - operator, operator @ v)


def cosine(q, k, v, pairs, scale=None, **_):
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    scale = 10.0 if scale is None else per_head(scale)
    return rows(((q @ k.mT) * scale).exp(), pairs) @ v


def sigmoid(q, k, v, pairs, scale=None, **_):
    offset = -pairs.sum(-1, keepdim=True).double().log()
    scores = products(q, k, None if scale is None else per_head(scale))
    return (torch.sigmoid(scores + offset) * pairs) @ v


def relu(q, k, v, pairs, scale=None, **_):
    scores = products(q, k, None if scale is None else per_head(scale))
    return (scores.relu() * pairs / pairs.sum(-1, keepdim=True)) @ v


def linear(q, k, v, pairs, **_):
    scale = q.shape[-1] ** -0.25
    phi_q, phi_k = (torch.nn.functional.elu(x * scale) + 1 for x in (q, k))
    return rows(phi_q @ phi_k.mT, pairs) @ v


def local(q, k, v, pairs, **_):
    return softmax(q, k, v, pairs)


FORMULAS = {
    "softmax": softmax,
    "uniform": uniform,
    "fna": fna,
    "infsa": infsa,
    "infsa-resolvent": infsa_resolvent,
    "cosine": cosine,
    "sigmoid": sigmoid,
    "relu": relu,
    "linear": linear,
    "local": local,
}
