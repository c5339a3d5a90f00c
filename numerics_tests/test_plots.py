"""Marks of the report's logarithmic axes: round rates whose labels stay apart."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="the ab extra draws the plots")

from mxfp8_recipe.ab import plots

WIDTH_IN, LETTER_IN = 4.3, 0.085
"""Of the axis, at least, and of a letter of its labels at the default 10 points."""

CURVE = [
    {"predicted": rate, "observed": 1.02 * rate, "observed_error": 0.01 * rate} for rate in (0.131, 0.19, 0.25, 0.32)
]


@pytest.mark.parametrize("low", [1e-6, 0.0013, 0.049, 0.13, 0.225, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [1.001, 1.02, 1.1, 1.44, 2.4, 5.0, 11.0, 130.0, 4000.0, 900_000.0])
def test_labels_stay_apart(low: float, ratio: float) -> None:
    high = low * ratio
    marks = plots.round_rates(low, high)
    assert len(marks) >= 2
    for a, b in pairwise(marks):
        apart = WIDTH_IN * math.log(b / a) / math.log(max(high, marks[-1]) / min(low, marks[0]))
        assert apart > LETTER_IN * len(f"{100 * b:g} %"), (low, high, marks)


def test_one_rate_is_one_mark() -> None:
    assert plots.round_rates(0.2, 0.2) == [0.2]


def test_curves_of_a_narrow_range_are_marked_in_few_places() -> None:
    """Rates from 13 to 32 % hold one of 1, 2 and 5: matplotlib's own marks would print over each other."""
    marks = plots.round_rates(0.131, 1.02 * 0.32)
    assert len(marks) == 4
    drawn = re.findall(r"<!-- ([\d.]+ %) -->", plots.two_curves({"A": CURVE, "B": CURVE}, "curves"))
    assert drawn == 2 * [f"{100 * rate:g} %" for rate in marks], "on both axes"
