"""Mechanisms that never form all pairs, in a few lines of float64 PyTorch each, from their definitions: landmarks, clusters, features,
projected keys and pooled tokens. Pairs are formed here all the same.

Every formula is ``f(q, k, v, keep, causal, **parameters)``; `keep` says which keys are kept, ``[batch, keys]``, true everywhere if none.
"""

import math

import torch
from formulas import per_head, products, rows, squared_distances, visible


def linear_infsa(q, k, v, keep, causal, gamma=None):
    gamma = 0.7 if gamma is None else per_head(gamma)
    energies = q.norm(dim=-1)
    alpha = energies / (energies.sum(-1, keepdim=True) + 1e-6)
    pooled = alpha[..., None, :] @ q
    scores = products(pooled, k).relu() * keep[:, None, None]
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return (gamma * weights @ v).expand(*q.shape[:-1], v.shape[-1])


def means_of_windows(x, keep, length):
    """Means of the kept tokens of windows, ``[batch, heads, windows, channels]``, and which windows have any."""
    window = torch.arange(x.shape[-2]) // length
    members = (window[None, :] == torch.arange(int(window[-1]) + 1)[:, None]) & keep[:, None, :]
    counts = members.sum(-1)
    return members.double()[:, None] @ x / counts.clamp_min(1)[:, None, :, None], counts > 0


def between_landmarks(kernel, u, lives):
    """The matrix of landmarks; one that has no token meets itself alone."""
    both = (lives[:, :, None] & lives[:, None, :])[:, None]
    return torch.where(both, kernel(u, u), torch.eye(u.shape[-2], dtype=u.dtype))


def exact_inverse(a, ridge):
    return torch.linalg.inv(a + ridge * torch.eye(a.shape[-1], dtype=a.dtype))


def newton(a, ridge, steps=20, implicit=False):
    """``X <- 2 X - X M X`` from ``1.8 M / |M|_1^2``, the factor a constant. `implicit`: differentiated as the inverse that it tends to."""
    m = a + ridge * torch.eye(a.shape[-1], dtype=a.dtype)
    x = 1.8 / m.detach().abs().sum(-2, keepdim=True).amax(-1, keepdim=True).square() * m
    for _ in range(steps):
        x = 2 * x - x @ m @ x
    if implicit:
        x = x.detach()
        x = x - x @ (m - m.detach()) @ x
    return x


def gaussian(scale):
    return lambda x, y: torch.exp(-scale * squared_distances(x, y))


def soft(q, k, v, keep, causal, scale=None, inverse=exact_inverse, by_degrees=False):
    scale = 0.5 * q.shape[-1] ** -0.5 if scale is None else per_head(scale)
    u, lives = means_of_windows(q, keep, 4)
    kernel = gaussian(scale)
    a = between_landmarks(kernel, u, lives)
    p = kernel(u, q) * lives[:, None, :, None] * keep[:, None, None, :]
    c = a.sum(-1, keepdim=True) ** -0.5 if by_degrees else 1.0
    return p.mT @ (c * (inverse(a, 0.01) @ (c * (p @ v))))


def soft_pp(*tensors, **options):
    return soft(*tensors, **options, by_degrees=True)


def laplacian_kernel(length):
    return lambda x, y: torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).abs().sum(-1) / length)


def whitened(g, v, keep):
    """Columns about their means, over their deviations, and one over the number of keys."""
    mean = g.mean(-2, keepdim=True)
    variance = (g - mean).square().mean(-2, keepdim=True)
    keys = keep.sum(-1)[:, None, None, None]
    return (((g - mean) / (variance + 1e-5).sqrt() + 1 / keys) * keep[:, None, None, :]) @ v


def laplacian(q, k, v, keep, causal, **parameters):
    length = per_head(parameters["lambda"]) if "lambda" in parameters else 4.0
    kernel = laplacian_kernel(length)
    u, lives = means_of_windows(k, keep, 8)
    w = between_landmarks(kernel, u, lives)
    cq, ck = (kernel(x, u) * lives[:, None, None, :] for x in (q, k))
    return whitened(cq @ exact_inverse(w, 1e-3) @ ck.mT, v, keep)


def laplacian_exact(q, k, v, keep, causal, **parameters):
    length = per_head(parameters["lambda"]) if "lambda" in parameters else 4.0
    return whitened(laplacian_kernel(length)(q, k), v, keep)


def performer(q, k, v, keep, causal, scale=None, gamma=1.0, directions=None):
    """`directions` of the features, ``[features, channels]``, are given."""
    root = q.shape[-1] ** -0.25 if scale is None else per_head(scale).sqrt()
    phi_q, phi_k = (torch.exp(root * x @ directions.mT - (root * x).square().sum(-1, keepdim=True) / 2) for x in (q, k))
    gamma = gamma if isinstance(gamma, float) else per_head(gamma)
    return gamma * rows(phi_q @ phi_k.mT, visible(q, k, keep, causal)) @ v


def masked_softmax(logits, seen):
    logits = logits.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def pseudo_inverse(a, steps):
    sums = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = 1.8 / sums[..., None, None] * a.mT
    for _ in range(steps):
        z = 2 * z - z @ a @ z
    return z


def nystromformer(q, k, v, keep, causal, scale=None, gamma=1.0):
    scale = q.shape[-1] ** -0.5 if scale is None else per_head(scale)
    gamma = gamma if isinstance(gamma, float) else per_head(gamma)
    of_queries, _ = means_of_windows(q, torch.ones_like(keep), 4)
    of_keys, lives = means_of_windows(k, keep, 4)
    lives = lives[:, None, None, :]
    f, a = (masked_softmax(scale * x @ of_keys.mT, lives) for x in (q, of_queries))
    b = masked_softmax(scale * of_queries @ k.mT, keep[:, None, None, :])
    return gamma * (f @ (pseudo_inverse(a, 10) @ (b @ v)))


def linformer(q, k, v, keep, causal, key_map=None, value_map=None, scale=None, gamma=1.0):
    scale = q.shape[-1] ** -0.5 if scale is None else per_head(scale)
    gamma = gamma if isinstance(gamma, float) else per_head(gamma)
    k, v = (x.double() @ (y * keep[:, None, :, None]) for x, y in ((key_map, k), (value_map, v)))
    return gamma * torch.softmax(scale * q @ k.mT, -1) @ v


class Plan:
    """What a stored plan says of every pair."""

    def __init__(self, clusters, shape):
        """Of ``[batch, heads, queries, keys]``."""
        (label_q, label_k, blocks, edges, weights), = clusters.tensors()
        batch, heads, queries, keys = shape
        self.label_q = torch.tensor(label_q).reshape(batch, heads, queries)
        self.label_k = torch.tensor(label_k).reshape(batch, heads, keys)
        # Whether a query sees a cluster exactly, `[batch, heads, queries, clusters]`.
        of_block = torch.zeros(batch * heads, max(label_q) + 1, max(label_k) + 1, dtype=torch.bool)
        if blocks:
            of_block[tuple(torch.tensor(blocks).T)] = True
        own = self.label_q.reshape(batch * heads, queries).clamp_min(0)
        self.routes = torch.stack([block[label] for block, label in zip(of_block, own)]).reshape(batch, heads, queries, -1)
        self.routes = self.routes | (self.label_q == -1)[..., None]
        self.edges = torch.zeros(batch * heads, queries, keys, dtype=torch.float64)
        for (slice, i, j), weight in zip(edges, weights):
            self.edges[slice, i, j] += math.exp(weight)
        self.edges = self.edges.reshape(shape)


def sight(plan, pairs, causal, segment):
    """Which pairs are seen exactly, which keys a cluster has, and which clusters a query sees by their means. Causal, clusters are of
    segments, and a query's own segment is seen up to it."""
    # `[batch, heads, keys, clusters]`; masked keys have no label.
    members, position = plan.label_k[..., None] == torch.arange(plan.routes.shape[-1]), torch.arange(plan.label_k.shape[-1])
    seen = (plan.routes.double() @ members.double().mT > 0) | (plan.label_k == -1)[..., None, :]
    before = torch.ones_like(plan.routes)
    if causal:
        own = position // segment
        seen = seen | (own[:, None] == own[None, :])
        first = torch.where(members, position[:, None], len(position)).amin(-2)
        before = (first // segment)[..., None, :] < own[:, None]
    return seen & pairs, members, ~plan.routes & before & members.any(-2)[..., None, :]


def clustered(q, k, v, keep, causal, scale=None, gamma=1.0, plan=None, means=False, segment=None):
    """One softmax over the keys of a query's routes, those in no cluster, its sampled edges and, with `means`, one mean for every other
    cluster."""
    scale = q.shape[-1] ** -0.5 if scale is None else per_head(scale)
    gamma = gamma if isinstance(gamma, float) else per_head(gamma)
    pairs = visible(q, k, keep, causal)
    seen, members, unseen = sight(plan, pairs, causal, segment)
    weights = products(q, k, scale).exp() * (seen + plan.edges * pairs)
    sizes = members.sum(-2)
    mean_k, mean_v = (members.double().mT @ x / sizes.clamp_min(1)[..., None] for x in (k, v))
    far = products(q, mean_k, scale).exp() * sizes[..., None, :] * (unseen if means else 0.0)
    total = weights.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)
    return gamma * (weights @ v + far @ mean_v) / torch.where(total == 0, 1.0, total)
