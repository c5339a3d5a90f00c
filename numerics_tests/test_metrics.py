"""NE, calibration, calibration-free NE, log loss and AUC against closed forms and recorded torcheval values."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

import mxfp8_recipe
from mxfp8_recipe.monitors import metrics as M
from mxfp8_recipe.monitors import ranking
from mxfp8_recipe.monitors.student_t import cdf, quantile

P = torch.tensor([0.02, 0.10, 0.35, 0.35, 0.80, 0.05, 0.61, 0.01], dtype=torch.float64)
Y = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
W = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 0.0, 1.5, 0.25], dtype=torch.float64)

# Recorded from torcheval 0.0.7 on (P, Y, W): binary_normalized_entropy, weighted_calibration; binary_auroc on Y > 0.5.
TORCHEVAL = {
    "ne": 1.3139461522915232,
    "ne_weighted": 0.6373472686218141,
    "ne_reversed": 2.2167623593316432,
    "calibration": 0.6542857142857142,
    "calibration_weighted": 0.902777777777778,
    "auc": 0.5666666666666667,
    "auc_weighted": 0.8848484848484849,
}
STREAMS = {
    M.NormalizedEntropy: M.normalized_entropy,
    M.Calibration: M.calibration,
    M.CalibrationFreeNE: M.calibration_free_ne,
    M.LogLoss: M.log_loss,
    M.AUC: M.auc,
}


def rows(count: int, seed: int = 0, tasks: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(count, tasks, generator=generator).mul(8).round().div(8).clamp(0.01, 0.99)
    y = (torch.rand(count, tasks, generator=generator) < p).float()
    return p, y, torch.rand(count, tasks, generator=generator)


def test_equal_to_recorded_torcheval_values():
    got = {
        "ne": M.normalized_entropy(P, Y),
        "ne_weighted": M.normalized_entropy(P, Y, W),
        "ne_reversed": M.normalized_entropy(torch.stack([P, P.flip(0)], 1), torch.stack([Y, Y], 1))[1],
        "calibration": M.calibration(P, Y),
        "calibration_weighted": M.calibration(P, Y, W),
        "auc": M.auc(P, (Y > 0.5).double()),
        "auc_weighted": M.auc(P, (Y > 0.5).double(), W),
    }
    for name, value in got.items():
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(TORCHEVAL[name], rel=1e-14), name


def test_closed_forms():
    y = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert M.normalized_entropy(torch.full((4,), 0.25), y).item() == pytest.approx(1.0, rel=1e-15)
    assert M.log_loss(torch.full((4,), 0.5), y).item() == pytest.approx(math.log(2), rel=1e-15)
    assert M.calibration(torch.full((4,), 0.5), y).item() == 2.0
    entropy_quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert M.normalized_entropy(torch.full((4,), 0.5), y).item() == pytest.approx(math.log(2) / entropy_quarter)
    # A constant prediction, however biased, carries no information: calibration-free NE is exactly 1.
    assert M.calibration_free_ne(torch.full((4,), 0.9), y).item() == pytest.approx(1.0, rel=1e-14)


def test_predictions_are_clamped_at_1e_12():
    y = torch.tensor([1.0, 0.0])
    got = M.log_loss(torch.tensor([0.0, 1.0], dtype=torch.float64), y)
    # 1 - (1 - 1e-12) is 1.00009e-12 in fp64, hence the tolerance.
    assert got.item() == pytest.approx(-math.log(1e-12), rel=1e-5)


def test_calibration_free_ne_is_ne_when_calibrated():
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    y = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert M.calibration_free_ne(p, y).item() == M.normalized_entropy(p, y).item()


def test_auc_equals_all_pairs_with_ties_weights_and_soft_labels():
    p, y, w = rows(60, tasks=1)
    y = y * 0.75 + 0.1
    wins = total = 0.0
    for i, j in itertools.product(range(60), range(60)):
        pair = (w[i] * y[i]).double().item() * (w[j] * (1 - y[j])).double().item()
        total += pair
        wins += pair * (1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0)
    assert p.unique().numel() < 60
    assert M.auc(p, y, w).item() == pytest.approx(wins / total, rel=1e-6)


def test_one_class_is_nan_not_a_number():
    p, y = torch.tensor([0.2, 0.3]), torch.zeros(2)
    for value in (M.normalized_entropy(p, y), M.calibration_free_ne(p, y), M.calibration(p, y), M.auc(p, y)):
        assert value.isnan()
    assert M.log_loss(p, y).isfinite()


def test_weight_is_a_row_count():
    p, y, _ = rows(40)
    w = torch.randint(0, 4, (40, 1), generator=torch.Generator().manual_seed(1)).expand(40, 2).float()
    repeat = w[:, 0].long()
    for function in STREAMS.values():
        repeated = function(p.repeat_interleave(repeat, 0), y.repeat_interleave(repeat, 0))
        torch.testing.assert_close(function(p, y, w), repeated, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, y, w: (p, y.index_fill(0, torch.tensor([0, 1]), 2.0), w), r"4 of 10 labels lie outside \[0, 1\]"),
        (lambda p, y, w: (p, y.index_fill(0, torch.tensor([3]), math.nan), w), "2 of 10 labels"),
        (lambda p, y, w: (p.index_fill(0, torch.tensor([2]), math.nan), y, w), "2 of 10 predictions are NaN"),
        (lambda p, y, w: (p + 1, y, w), r"10 of 10 predictions lie outside"),
        (lambda p, y, w: (p, y, -w - 1), "10 of 10 weights are negative"),
        (lambda p, y, w: (p, y, w / 0), "10 of 10 weights"),
        (lambda p, y, w: (p, y[:, :1], w), r"labels have shape \(5, 1\), predictions \(5, 2\)"),
    ],
)
def test_invalid_rows_are_errors_with_counts(change, message):
    p, y, w = change(*rows(5))
    for function in STREAMS.values():
        with pytest.raises(ValueError, match=message):
            function(p, y, w)
    for metric in STREAMS:
        with pytest.raises(ValueError):
            metric(num_tasks=2).update(p, y, w)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ValueError, match=r"1 of 2 predictions are NaN; 1 of 2 labels"):
        M.normalized_entropy(torch.tensor([math.nan, 0.5]), torch.tensor([0.0, -1.0]))


@pytest.mark.parametrize("metric", STREAMS)
def test_streamed_equals_whole(metric):
    p, y, w = rows(100)
    stream = metric(num_tasks=2)
    for part in torch.arange(100).split(17):
        stream.update(p[part], y[part], w[part])
    torch.testing.assert_close(stream.compute(), STREAMS[metric](p, y, w), rtol=1e-12, atol=0)
    one = metric()
    batch_value = one(p[:, 0], y[:, 0])
    assert batch_value.shape == ()
    torch.testing.assert_close(one.compute(), STREAMS[metric](p[:, 0], y[:, 0]), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("metric", [m for m in STREAMS if m is not M.AUC])
def test_windowed_covers_the_most_recent_rows(metric):
    p, y, w = rows(100)
    stream = metric(num_tasks=2, window_rows=30)
    for part in torch.arange(100).split(10):
        batch_value = stream(p[part], y[part], w[part])
        torch.testing.assert_close(batch_value, STREAMS[metric](p[part], y[part], w[part]), equal_nan=True)
    torch.testing.assert_close(stream.compute(), STREAMS[metric](p[70:], y[70:], w[70:]), rtol=1e-12, atol=0)
    stream.reset()
    assert stream.compute().isnan().all()


def test_sums_are_fp64_and_add_over_a_million_rows():
    p = torch.full((100_000,), 0.1)
    y = torch.zeros(100_000)
    y[:10_000] = 1
    stream = M.Calibration()
    for _ in range(10):
        stream.update(p, y)
    assert stream.sums.dtype == torch.float64
    assert stream.compute().item() == pytest.approx(float(torch.tensor(0.1)) * 10, rel=1e-12)


def test_calibration_curve_bins_hold_equal_counts_and_the_totals():
    p, y, w = (t[:, 0] for t in rows(1000))
    w[:100] = 0
    curve = M.calibration_curve(p, y, w, bins=9)
    assert [b.rows for b in curve] == [100] * 9
    assert all(a.predicted <= b.predicted for a, b in itertools.pairwise(curve))
    assert all(abs(b.predicted - b.observed) < 5 * b.observed_error for b in curve)


# Roots of mpmath's regularized incomplete beta at 30 digits.
@pytest.mark.parametrize(
    ("probability", "df", "expected"),
    [
        (0.95, 1, 6.313751514675043),
        (0.95, 2, 2.919985580353726),
        (0.975, 3, 3.182446305284271),
        (0.9, 5, 1.475884048824481),
        (0.95, 30, 1.697260886593958),
        (0.025, 10, -2.2281388519862747),
        (0.95, math.inf, 1.6448536269514722),
    ],
)
def test_student_t(probability, df, expected):
    assert quantile(probability, df) == pytest.approx(expected, rel=1e-9)
    assert cdf(expected, df) == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("levels", [7, 10**9])
def test_a_known_order_changes_no_bit(levels):
    """One sort serves AUC, ECE and the curve; tied predictions and rows of weight 0 are among them."""
    generator = torch.Generator().manual_seed(0)
    p = (torch.rand(3 * ranking.CHUNK // 2, generator=generator, dtype=torch.float64) * levels).round() / levels
    y, w = torch.rand(2, len(p), generator=generator, dtype=torch.float64)
    w[::5] = 0
    order = p.argsort(stable=True)
    for metric in (M.auc, M.expected_calibration_error):
        assert torch.equal(metric(p, y, w, order=order), metric(p, y, w))
    assert M.calibration_curve(p, y, w, order=order) == M.calibration_curve(p, y, w)
    # In one piece and in the order of rows, as the definitions have it.
    _, score = p.unique(return_inverse=True)
    above, below = (torch.bincount(score, w * of) for of in (y, 1 - y))
    pairs = (above * (below.cumsum(0) - below + below / 2)).sum()
    assert torch.equal(M.auc(p, y, w), pairs / (above.sum() * below.sum()))
    kept = w > 0
    excess = (w * (p - y))[kept][p[kept].argsort(stable=True)]
    ece = torch.stack([part.sum().abs() for part in excess.tensor_split(100)]).sum() / w[kept].sum()
    assert torch.equal(M.expected_calibration_error(p, y, w), ece)


@pytest.mark.parametrize(
    ("module", "needs"),
    [("monitors/metrics.py", "torchmetrics"), ("ab/plots.py", "matplotlib"), ("ab/html.py", "jinja2")],
)
def test_a_missing_extra_says_what_to_install(monkeypatch, module, needs):
    for name in [name for name in sys.modules if name.split(".")[0] == needs]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needs, None)
    path = Path(mxfp8_recipe.__file__).parent / module
    spec = importlib.util.spec_from_file_location("without_the_extra", path)
    with pytest.raises(ModuleNotFoundError, match=rf'{needs}: pip install "mxfp8-recipe\[ab\]"') as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert caught.value.name == needs
