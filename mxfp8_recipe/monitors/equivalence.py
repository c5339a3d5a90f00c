"""Is the gap between two ways of training inside a budget? Two one-sided tests over seeds, placebos and rows.

Runs that differ only in rounding drift apart, so a gap means nothing until it is held against the gaps of *placebos*:
changes known to be harmless. The mean gap over n seeds has a standard error by each of two models of that drift,

    own       s^2 / n + V    s: standard deviation of the n gaps, n - 1 degrees of freedom
    placebo   r^2 / n + V    r: root mean square of the k n placebo gaps (about zero: they are harmless by definition)

and the interval is the wider of the two t intervals, so it covers whenever either model is right. Placebos of a seed
share the BF16 twin, so their gaps correlate (0.5 for equal variances); hence k n / (1 + (k - 1) / 4) degrees of
freedom.
V is the row noise that all seeds share (`bootstrap`), which no spread over seeds contains; its degrees of freedom join
those of the spread by Welch and Satterthwaite's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mxfp8_recipe.monitors import student_t
from mxfp8_recipe.monitors.bootstrap import BLOCKS
from mxfp8_recipe.monitors.multiplicity import level

POWER = 0.8
MAX_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True)
class TaskGaps:
    """Per-seed relative gaps to the BF16 twin of the same seed, e.g. 0.001 for 0.1 % worse.

    Attributes:
        mxfp8: gaps of the candidate.
        placebos: a placebo's name to its gaps, over the same seeds.
        shared_row_variance: variance of the mean gap over rows that all seeds share (`bootstrap.RowNoise.shared`).
        row_blocks: blocks that variance was estimated from.
        segment: the segment these gaps are of; empty for all rows.
        rows, positives, negatives: of the rows judged, by count and by weight of each class; None where unknown.
    """

    task: str
    mxfp8: tuple[float, ...]
    placebos: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shared_row_variance: float = 0.0
    row_blocks: int = BLOCKS
    segment: str = ""
    rows: int | None = None
    positives: float | None = None
    negatives: float | None = None

    @property
    def name(self) -> str:
        return f"{self.task}, {self.segment}" if self.segment else self.task

    @property
    def undefined(self) -> str:
        """Why NE of these rows is no number, or empty."""
        if self.positives is not None and not self.positives > 0:
            return f"{self._rows} hold no positive label, so NE is undefined"
        if self.negatives is not None and not self.negatives > 0:
            return f"{self._rows} hold no negative label, so NE is undefined"
        if any(math.isnan(g) for g in self.mxfp8):
            return "the gap is undefined: a run predicted NaN, or its rows hold one class only"
        return ""

    @property
    def _rows(self) -> str:
        return "the rows judged" if self.rows is None else f"the {self.rows:,} rows judged"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean gap with its two-sided 1 - 2 alpha interval; infinite where one seed gives no spread."""

    mean: float
    low: float
    high: float
    alpha: float = math.nan

    def inside(self, budget: float) -> bool:
        return -budget <= self.low and self.high <= budget

    def outside(self, budget: float) -> bool:
        return self.low > budget or self.high < -budget

    @property
    def confidence(self) -> str:
        """As text, such as `92 %`; empty where there is no interval."""
        return "" if math.isnan(self.alpha) else f"{100 * (1 - 2 * self.alpha):.3g} %"


@dataclass(frozen=True, kw_only=True)
class Power:
    """What these rows and seeds can decide.

    Attributes:
        ne_resolvable: the smallest relative NE budget that a truly harmless recipe would meet in 80 % of such runs;
            None when one seed gives no spread.
        seeds_needed: seeds of these rows, those at hand included, that would bring it down to the budget; the level of
            that next look is what this one leaves. None above 10,000, where rows are the limit, or unknown.
        rows_needed: rows of a new run (train and held out together, same split, same seeds) that would, if the
            spread falls with the square root of rows; None where unknown.
    """

    ne_resolvable: float | None
    seeds_needed: int | None
    rows_needed: int | None


NO_POWER = Power(ne_resolvable=None, seeds_needed=None, rows_needed=None)


@dataclass(frozen=True)
class _Error:
    """A standard error with its degrees of freedom."""

    size: float
    df: float

    def half_width(self, *probabilities: float) -> float:
        """The sum of t quantiles times the standard error."""
        if self.size == 0:
            return 0.0
        return self.size * sum(student_t.quantile(p, self.df) for p in probabilities)


@dataclass(frozen=True)
class _Spread:
    """Both estimates of the spread of a seed's gap, and the row noise that seeds share."""

    own: float
    placebo: float
    placebos: int
    shared: float
    row_blocks: int

    @classmethod
    def of(cls, gaps: TaskGaps) -> _Spread:
        n = len(gaps.mxfp8)
        mean = math.fsum(gaps.mxfp8) / n
        own = math.sqrt(math.fsum((g - mean) ** 2 for g in gaps.mxfp8) / (n - 1)) if n > 1 else 0.0
        harmless = [g for values in gaps.placebos.values() for g in values]
        placebo = math.sqrt(math.fsum(g * g for g in harmless) / len(harmless)) if harmless else 0.0
        return cls(own, placebo, len(gaps.placebos), gaps.shared_row_variance, gaps.row_blocks)

    def errors(self, seeds: int) -> Iterator[_Error]:
        """Of the mean of that many seeds' gaps, at least two, by each model."""
        yield self._with_rows(self.own**2 / seeds, seeds - 1)
        if self.placebos:
            df = self.placebos * seeds / (1 + (self.placebos - 1) / 4)
            yield self._with_rows(self.placebo**2 / seeds, df)

    def _with_rows(self, variance: float, df: float) -> _Error:
        """Welch and Satterthwaite: degrees of freedom of a sum of two independent variance estimates."""
        total = variance + self.shared
        if not total > 0 or self.shared == 0:
            return _Error(math.sqrt(total), df)
        return _Error(math.sqrt(total), total**2 / (variance**2 / df + self.shared**2 / max(self.row_blocks - 1, 1)))

    def half_width(self, seeds: int, *probabilities: float) -> float:
        """The wider model's; infinite for one seed."""
        if seeds < 2:
            return math.inf
        return max((e.half_width(*probabilities) for e in self.errors(seeds)), key=_nan_last)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def seed_interval(gaps: TaskGaps, looks: Sequence[int] = ()) -> Interval:
    """Mean gap and its interval, at the level of this look (`multiplicity.level`).

    Args:
        gaps: of at least one seed.
        looks: numbers of seeds at which this run was judged before.
    """
    n = len(gaps.mxfp8)
    mean = math.fsum(gaps.mxfp8) / n
    alpha = level(n, looks)
    half = _Spread.of(gaps).half_width(n, 1 - alpha) if n > 1 else math.inf
    return Interval(mean=mean, low=mean - half, high=mean + half, alpha=alpha)


def outside_p_value(gaps: TaskGaps, budget: float) -> float:
    """One-sided p-value of a gap inside the budget: small when the gap lies outside, on either side; 1 for one seed."""
    n = len(gaps.mxfp8)
    if n < 2:
        return 1.0
    beyond = abs(math.fsum(gaps.mxfp8) / n) - budget
    if math.isnan(beyond):
        return math.nan

    def tail(error: _Error) -> float:
        if error.size == 0:
            return 0.0 if beyond > 0 else 1.0
        return 1 - student_t.cdf(beyond / error.size, error.df)

    return max((tail(e) for e in _Spread.of(gaps).errors(n)), key=_nan_last)


def power(gaps: TaskGaps, *, budget: float, rows: int, looks: Sequence[int] = ()) -> Power:
    """The budget these rows and seeds resolve, and what would resolve the one asked for."""
    spread, n = _Spread.of(gaps), len(gaps.mxfp8)

    def resolvable(seeds: int, earlier: Sequence[int]) -> float:
        return spread.half_width(seeds, 1 - level(seeds, earlier), 1 - (1 - POWER) / 2) if seeds > 1 else math.inf

    now = resolvable(n, looks)
    if math.isnan(now) or (n < 2 and not any(map(len, gaps.placebos.values()))):
        return NO_POWER
    seeds: int | None = n
    if now > budget:
        seeds = _first(n + 1, lambda more: resolvable(more, (*looks, n)) <= budget)
    known = math.isfinite(now)
    return Power(
        ne_resolvable=now if known else None,
        seeds_needed=seeds,
        rows_needed=max(1, math.ceil(rows * (now / budget) ** 2)) if known else None,
    )


def _first(start: int, enough: Callable[[int], bool]) -> int | None:
    """Smallest number from `start` on that is enough, for a condition that stays true once it is."""
    if not enough(MAX_SEEDS):
        return None
    low, high = start - 1, MAX_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
