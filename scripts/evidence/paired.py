"""Means, deviations, and the t-test of paired differences."""

import math
from statistics import fmean, stdev


def spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample deviation, which one value has not."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def t_test(differences: list[float]) -> float | None:
    """Two-sided p of a mean of zero, of at least two differences; none where they do not differ among themselves."""
    if len(differences) < 2:
        return None
    mean, deviation = spread(differences)
    if not deviation:
        return None
    return two_sided(mean / (deviation / math.sqrt(len(differences))), len(differences) - 1)


def two_sided(t: float, freedom: int) -> float:
    """The chance of Student's t beyond `|t|`, by the finite sums for whole degrees of freedom ("Handbook of Mathematical
    Functions", 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd, total = freedom % 2, 0.0
    term = math.cos(angle) if odd else 1.0
    for step in range((freedom - 1) // 2 if odd else freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1.0 - inside)
