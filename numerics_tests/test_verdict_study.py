"""A fast part of the study of the verdict's errors, and the page that shows it."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from mxfp8_recipe.monitors.verdict import Outcome

ROOT = Path(__file__).resolve().parent.parent


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


study = script("verdict_study")


@pytest.mark.parametrize("harm", study.HARMS)
@pytest.mark.parametrize("kind", ["twins", "same weights"])
def test_it_neither_cries_wolf_nor_sleeps(kind, harm):
    """20 replicates of fewer rows: one wrong verdict would be 5 %, and the study at full size saw none in 200."""
    case = study.Case(kind, harm, rows=10_000, seeds=5 if kind == "twins" else 1, noise=0.01, shift=0.001)
    size = 0.0
    if harm != "none":
        size = study.size_of(harm, 2 * study.BUDGET) if case.trains else study.served_size(harm)
    outcomes = Counter(study.replicate(case, size, seed) for seed in range(20))
    wrong = Outcome.FAIL if harm == "none" else Outcome.PASS
    assert outcomes[wrong] <= 1
    right = Outcome.PASS if harm == "none" else Outcome.FAIL
    assert outcomes[right] >= 3, "a study in which nothing is decided shows nothing"


def test_harms_raise_ne_by_twice_the_budget():
    """On fresh rows, by the metric itself."""
    import numpy as np
    import torch

    from mxfp8_recipe.monitors import metrics

    rng = np.random.default_rng(5)
    logit, label = study.truth(2_000_000, rng)
    base = metrics.normalized_entropy(*(torch.from_numpy(t) for t in (study._sigmoid(logit), label))).item()
    for harm in ("logit bias", "label-correlated bias"):
        moved = study.harmed(logit, label, harm, study.size_of(harm, 0.002), rng)
        if harm == "logit bias":  # the noise of rows is antisymmetric in the bias
            other = study.harmed(logit, label, harm, -study.size_of(harm, 0.002), rng)
            found = [_ne(m, label, metrics, torch) / base - 1 for m in (moved, other)]
            assert sum(found) / 2 == pytest.approx(0.002, rel=0.1)
        else:
            assert _ne(moved, label, metrics, torch) / base - 1 == pytest.approx(0.002, rel=0.05)


def _ne(logit, label, metrics, torch):
    return metrics.normalized_entropy(torch.from_numpy(study._sigmoid(logit)), torch.from_numpy(label)).item()


def test_binomial_interval_by_known_values():
    assert study.binomial_interval(0, 200) == (0.0, pytest.approx(1 - 0.025 ** (1 / 200), rel=1e-6))
    assert study.binomial_interval(10, 10)[1] == 1.0
    # Clopper and Pearson 1934: 5 of 10.
    assert study.binomial_interval(5, 10) == (pytest.approx(0.1871, abs=1e-4), pytest.approx(0.8129, abs=1e-4))


def test_the_page_shows_the_results_that_are_committed():
    page = script("evidence_page")
    cells = json.loads(page.SUMMARY.read_text()) if page.SUMMARY.is_file() else []
    found = json.loads(page.STUDY.read_text()) if page.STUDY.is_file() else None
    text = page.PAGE.read_text()
    assert page.render(text, cells, found) == text, "run: python benchmarks/evidence_page.py"


def test_the_committed_study_keeps_its_promise():
    path = ROOT / "benchmarks" / "results" / "verdict_study.json"
    if not path.is_file():
        pytest.skip("the study has not been run yet")
    for case in json.loads(path.read_text())["cases"]:
        assert case["replicates"] >= 200
        assert case["wrong"]["rate"] <= 0.05, case["name"]
