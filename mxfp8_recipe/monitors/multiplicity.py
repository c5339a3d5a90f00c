"""Many tests of one verdict: Holm's step-down over weighted hypotheses, and an error budget spent over looks.

**Passing** needs every task to pass, so no correction is due (an intersection-union test). **Failing** needs one, so
its tests share their error by Holm's procedure (Holm 1979, weighted form), valid under any dependence.

**Extending a run.** Each look at n seeds spends part of the level; what is spent in all never exceeds it, however many
looks there are and whatever made somebody look again:

    spent(n) = ALPHA * (1 - 1 / n)          level at n = spent(n) - spent(largest number of seeds looked at before)

a spending function of the information at hand (Lan and DeMets 1983). One seed spends nothing, since it decides nothing.
Levels add up by the union bound, so errors are held without a model of how looks depend on each other, at some cost in
width: a first look at 5 seeds uses a level of 0.04 instead of 0.05.
"""

from __future__ import annotations

from collections.abc import Sequence

ALPHA = 0.05


def spent(seeds: int) -> float:
    """The part of `ALPHA` that looks at up to `seeds` seeds may have used."""
    return ALPHA * (1 - 1 / seeds) if seeds > 1 else 0.0


def level(seeds: int, looks: Sequence[int] = ()) -> float:
    """One-sided level of the look at `seeds` seeds, after looks at fewer of them; looks at more do not count."""
    return spent(seeds) - spent(max((n for n in looks if n < seeds), default=1))


def holm(p_values: Sequence[float], weights: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses are rejected with a family-wise error of at most alpha.

    Args:
        p_values: NaN is never rejected.
        weights: positive; a hypothesis of twice the weight is tested at twice the level.
        alpha: in [0, 1].
    """
    if len(p_values) != len(weights) or not all(w > 0 for w in weights):
        raise ValueError(f"expected one positive weight for each of {len(p_values)} p-values, got {list(weights)}")
    rejected = [False] * len(p_values)
    remaining = sum(weights)
    for index in sorted(range(len(p_values)), key=lambda i: _or_one(p_values[i]) / weights[i]):
        if not p_values[index] <= alpha * weights[index] / remaining:
            break
        rejected[index] = True
        remaining -= weights[index]
    return rejected


def _or_one(p: float) -> float:
    return 1.0 if p != p else p
