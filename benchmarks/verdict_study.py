"""How often the verdict is wrong: replicates of placebo against placebo, and of harms of twice the budget.

    python benchmarks/verdict_study.py --jobs 2      # some minutes; writes benchmarks/results/verdict_study.json
    python benchmarks/evidence_page.py               # puts its table into docs/numerics.md

A replicate draws rows and, for each seed, a reference run, a candidate and two placebos. All runs drift from the truth
in their own way: noise on each logit, and a shift of each of eight groups of rows that stays for the run. The candidate
is harmed on top, so that its expected NE rises by twice the budget:

    logit noise               more independent noise on each logit
    logit bias                a constant added to each logit
    label-correlated bias     each logit moved away from the row's label, by a multiple of y - p

Everything runs through `RowSums`, `gaps_of` and `decide`, as prediction logs do in `mxfp8 compare`. The same harms
without drift go through the gates and `decide_same_weights`, at twice their limits.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxfp8_recipe.ab.compare import change_of
from mxfp8_recipe.monitors.bootstrap import relative_ne_gap
from mxfp8_recipe.monitors.gates import GateLimits
from mxfp8_recipe.monitors.row_sums import RowSums, gaps_of
from mxfp8_recipe.monitors.shadow import _LogitErrors
from mxfp8_recipe.monitors.verdict import Evidence, Outcome, decide, decide_same_weights

RESULTS = Path(__file__).parent / "results" / "verdict_study.json"
BUDGET = 0.001
GROUPS = 8
HARMS = ("none", "logit noise", "logit bias", "label-correlated bias")


@dataclass(frozen=True)
class Case:
    """Twins or one set of weights, a harm, and how much data there is."""

    kind: str
    harm: str
    rows: int = 40_000
    seeds: int = 5
    noise: float = 0.03
    shift: float = 0.004

    @property
    def trains(self) -> bool:
        return self.kind.endswith("twins")

    @property
    def name(self) -> str:
        return f"{self.kind}: {'placebo against placebo' if self.harm == 'none' else self.harm}"


CASES = [
    *(Case("twins", harm) for harm in HARMS),
    *(Case("noisy twins", harm, rows=10_000, seeds=3, noise=0.1, shift=0.03) for harm in HARMS),
    *(Case("same weights", harm, rows=40_000, seeds=1, noise=0.01, shift=0.0) for harm in HARMS),
]


def truth(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Logits at a rate of about 10 %, and labels drawn from them."""
    logit = rng.normal(-2.6, 1.0, rows)
    return logit, (rng.random(rows) < _sigmoid(logit)).astype(np.float64)


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))


def harmed(logit: np.ndarray, label: np.ndarray, harm: str, size: float, rng: np.random.Generator) -> np.ndarray:
    """Logits after a harm of a size in the harm's own unit."""
    if harm == "logit noise":
        return logit + size * rng.normal(size=len(logit))
    if harm == "logit bias":
        return logit + size
    return logit - size * (label - _sigmoid(logit)) if harm == "label-correlated bias" else logit


@functools.lru_cache
def size_of(harm: str, budget: float) -> float:
    """The size that raises NE by `budget` in expectation: bisection on 200,000 rows."""
    rng = np.random.default_rng(0)
    logit, _ = truth(200_000, rng)
    p = _sigmoid(logit)

    def rise(size: float) -> float:
        if harm == "label-correlated bias":
            moved = [logit - size * (y - p) for y in (0.0, 1.0)]
        else:
            moved = [harmed(logit, p, harm, size, np.random.default_rng(1))] * 2
        entropy = [_entropy(p, *(_sigmoid(m) for m in pair)) for pair in ([logit, logit], moved)]
        return entropy[1] / entropy[0] - 1

    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(middle) < budget else (low, middle)
    return (low + high) / 2


def _entropy(p: np.ndarray, if_negative: np.ndarray, if_positive: np.ndarray) -> float:
    """Expected cross entropy where the prediction may depend on the label."""
    return float(-(p * np.log(if_positive) + (1 - p) * np.log1p(-if_negative)).mean())


def replicate(case: Case, size: float, seed: int) -> Outcome:
    """One verdict."""
    rng = np.random.default_rng([seed, CASES.index(case) if case in CASES else 99])
    logit, label = truth(case.rows, rng)
    return (_twins if case.trains else _served)(case, logit, label, size, rng)


def _twins(case: Case, logit: np.ndarray, label: np.ndarray, size: float, rng: np.random.Generator) -> Outcome:
    group = rng.integers(0, GROUPS, case.rows)

    def run(harm: str = "none") -> np.ndarray:
        drifted = logit + case.noise * rng.normal(size=case.rows) + (case.shift * rng.normal(size=GROUPS))[group]
        return RowSums.of(_sigmoid(harmed(drifted, label, harm, size, rng)), label, None).blocks

    reference = [run() for _ in range(case.seeds)]
    candidate = [run(case.harm) for _ in range(case.seeds)]
    placebos = {n: [float(relative_ne_gap(r.sum(0), run().sum(0))) for r in reference] for n in ("one", "two")}
    gaps = gaps_of("label", reference, candidate, placebos, rows=case.rows)
    return decide(Evidence(gaps=(gaps,), same_weights=(), rows=case.rows, twins_only=True), budget=BUDGET).outcome


def _served(case: Case, logit: np.ndarray, label: np.ndarray, size: float, rng: np.random.Generator) -> Outcome:
    """Rounding noise well inside the gates, and the harm on top."""
    rounded = harmed(logit + case.noise * rng.normal(size=case.rows), label, case.harm, size, rng)
    errors = _LogitErrors("label")
    reference, candidate = torch.from_numpy(logit), torch.from_numpy(rounded)
    weights = torch.ones(case.rows, dtype=torch.float64)
    errors.add(torch.stack([reference, candidate, reference]), torch.from_numpy(label), weights, None)
    one, other = (RowSums.of(_sigmoid(x), label, None) for x in (logit, rounded))
    return decide_same_weights(
        [("0", errors.record())], [change_of(one, other, "label")], rows=case.rows, budget=BUDGET
    ).outcome


def served_size(harm: str) -> float:
    """Twice the gate's limit where a gate is made for the harm, else twice the budget."""
    limits = GateLimits()
    sizes = {"logit noise": 2 * limits.logit_rms, "logit bias": 2 * limits.logit_mean}
    return sizes.get(harm) or size_of(harm, 2 * BUDGET)


def binomial_interval(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's exact interval, by bisection."""

    def at_most(k: int, p: float) -> float:
        return sum(math.comb(total, i) * p**i * (1 - p) ** (total - i) for i in range(k + 1))

    tail = (1 - confidence) / 2

    def root(condition) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if condition(middle) else (low, middle)
        return low

    lower = 0.0 if count == 0 else root(lambda p: 1 - at_most(count - 1, p) < tail)
    upper = 1.0 if count == total else root(lambda p: at_most(count, p) > tail)
    return lower, upper


def measure(case: Case, replicates: int) -> dict[str, Any]:
    """Outcomes of a case; wrong is FAIL without harm and PASS with it."""
    torch.set_num_threads(1)
    size = 0.0
    if case.harm != "none":
        size = size_of(case.harm, 2 * BUDGET) if case.trains else served_size(case.harm)
    counts = Counter(replicate(case, size, seed).value for seed in range(replicates))
    wrong = counts["fail" if case.harm == "none" else "pass"]
    low, high = binomial_interval(wrong, replicates)
    return {
        "name": case.name,
        "harm": _describe(case, size),
        "replicates": replicates,
        "wrong": {"count": wrong, "rate": wrong / replicates, "low": low, "high": high},
        **{k: {"count": counts[k]} for k in ("pass", "fail", "inconclusive")},
        "case": asdict(case),
        "size": size,
    }


def _describe(case: Case, size: float) -> str:
    if case.harm == "none":
        return "none"
    unit = {"logit noise": "RMS", "logit bias": "logits", "label-correlated bias": "of y - p"}[case.harm]
    twice = "twice the NE budget"
    if not case.trains and case.harm != "label-correlated bias":
        twice = "twice the gate's limit"
    return f"{size:.3g} {unit}, {twice}"


def _conditions(case: Case) -> str:
    drift = f"{case.noise} RMS on each logit and {case.shift} on each of {GROUPS} groups of rows"
    if not case.trains:
        return f"{case.kind.capitalize()}: {case.rows:,} rows, one seed, rounding noise of {case.noise} RMS."
    return f"{case.kind.capitalize()}: {case.rows:,} rows, {case.seeds} seeds, two placebos a seed, drift of {drift}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        futures = [pool.submit(measure, case, options.replicates) for case in CASES]
        cases = []
        for future in futures:
            cases.append(future.result())
            print({k: cases[-1][k] for k in ("name", "harm", "pass", "fail", "inconclusive", "wrong")}, flush=True)
    conditions = (
        f"Positive rate of about 10 %, budget {BUDGET:.1%}; wrong is FAIL without a harm and PASS with one. "
        + " ".join(_conditions(case) for case in CASES if case.harm == "none")
    )
    options.out.write_text(json.dumps({"conditions": conditions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
