"""Student's t distribution, the two functions a small-sample verdict needs, without a scientific library.

    P(T <= t) = 1 - I_x(df / 2, 1 / 2) / 2        x = df / (df + t^2), t >= 0

I is the regularized incomplete beta function, by its continued fraction (Lentz's method; Abramowitz and Stegun 26.5.8).
"""

from __future__ import annotations

import functools
import math

_TINY = 1e-300


def cdf(t: float, df: float) -> float:
    """P(T <= t) for df > 0 degrees of freedom; df may be infinite or fractional."""
    if not df > 0:
        raise ValueError(f"degrees of freedom must be positive, got {df}")
    if math.isinf(df):
        return 0.5 * math.erfc(-t / math.sqrt(2))
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t >= 0 else tail


@functools.lru_cache(maxsize=4096)
def quantile(probability: float, df: float) -> float:
    """The t with `cdf(t, df) == probability`, by bisection to 1e-12 relative."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must lie inside (0, 1), got {probability}")
    if probability < 0.5:
        return -quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while cdf(high, df) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        if cdf(middle, df) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b); the continued fraction converges fast for x below (a + 1) / (a + b + 2), so mirror above it."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _continued_fraction(a, b, x) / a


def _continued_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _nonzero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
