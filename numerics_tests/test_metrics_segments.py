"""ECE, Field-RCE, segmented, windowed and sampling-corrected metrics, their sync over ranks, and recorded oracles."""

import math
import os
import socket
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mxfp8_recipe.monitors import metrics as M

# Recorded on `recipe_rows()`: torcheval 0.0.7 binary_normalized_entropy, weighted_calibration, binary_auroc; the
# functions compute_ne, compute_logloss (bits) and compute_calibration of torchrec 1.9.2's metrics package.
TORCHEVAL = {
    "ne": [0.9166010399003744, 0.9167412741045697],
    "calibration": [1.0682249725761312, 1.0065697436712886],
    "auc": [0.7054411040283701, 0.7009562190729387],
}
TORCHREC = {"ne": [0.9166010399003746, 0.91674127410457], "log_loss_bits": [0.5385269075498683, 0.5567894759745348]}


def recipe_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs of the recorded values, (2000, 2)."""
    g = torch.Generator().manual_seed(7)
    p = torch.rand(2, 2000, generator=g, dtype=torch.float64) * 0.3 + 0.001
    y = (torch.rand(2, 2000, generator=g, dtype=torch.float64) < p).double()
    w = torch.rand(2, 2000, generator=g, dtype=torch.float64) * 3
    return p.T, y.T, w.T


def segments_of(rows: int) -> torch.Tensor:
    return torch.arange(rows) * 7919 % 5 - 1


def test_recorded_oracle_values():
    p, y, w = recipe_rows()
    assert p.sum().item() == pytest.approx(601.3172695341532, rel=1e-14), "torch draws other numbers than recorded"
    got = {name: f(p, y, w).tolist() for name, f in (("ne", M.normalized_entropy), ("calibration", M.calibration))}
    assert got["ne"] == pytest.approx(TORCHEVAL["ne"], rel=1e-13)
    assert got["ne"] == pytest.approx(TORCHREC["ne"], rel=1e-13)
    assert got["calibration"] == pytest.approx(TORCHEVAL["calibration"], rel=1e-13)
    assert M.auc(p, y, w).tolist() == pytest.approx(TORCHEVAL["auc"], rel=1e-13)
    assert (M.log_loss(p, y, w) / math.log(2)).tolist() == pytest.approx(TORCHREC["log_loss_bits"], rel=1e-13)


def test_streams_give_the_recorded_values_too():
    p, y, w = recipe_rows()
    for metric, expected in (
        (M.NormalizedEntropy(2), TORCHEVAL["ne"]),
        (M.NormalizedEntropy(2, window_rows=2000), TORCHEVAL["ne"]),
        (M.Calibration(2), TORCHEVAL["calibration"]),
        (M.AUC(2), TORCHEVAL["auc"]),
    ):
        for part in torch.arange(2000).split(333):
            metric.update(p[part], y[part], w[part])
        assert metric.compute().tolist() == pytest.approx(expected, rel=1e-12)


def test_ece_by_hand_and_against_a_loop():
    p = torch.tensor([0.1, 0.3, 0.6, 0.8])
    y = torch.tensor([0.0, 1.0, 1.0, 0.0])
    # Two bins of two rows: |0.2 - 0.5| and |0.7 - 0.5|.
    assert M.expected_calibration_error(p, y, bins=2).item() == pytest.approx(0.25)
    assert M.expected_calibration_error(p, y, bins=1).item() == pytest.approx(0.05)
    p, y, w = recipe_rows()
    w[:300] = 0
    for task in (0, 1):
        kept = w[:, task] > 0
        order = np.argsort(p[kept, task].numpy(), kind="stable")
        a, b, c = (t[kept, task].numpy()[order] for t in (p, y, w))
        total = sum(abs((c[i] * (a[i] - b[i])).sum()) for i in np.array_split(np.arange(1700), 20))
        got = M.expected_calibration_error(p, y, w, bins=20)[task].item()
        assert got == pytest.approx(total / c.sum(), rel=1e-12)


def test_ece_finds_what_the_mean_hides():
    """Half the rows predicted too high and half too low: calibration is 1, ECE is not 0."""
    y = (torch.arange(1000) % 10 == 0).double()
    p = torch.where(torch.arange(1000) < 500, 0.05, 0.15).double()
    assert M.calibration(p, y).item() == pytest.approx(1)
    assert M.expected_calibration_error(p, y, bins=2).item() == pytest.approx(0.05)
    assert M.field_rce(p, y, (torch.arange(1000) < 500).long()).item() == pytest.approx(0.05 / (0.1 + 0.01))


def test_field_rce_against_a_loop():
    p, y, w = recipe_rows()
    field = segments_of(2000)
    for task in (0, 1):
        total = 0.0
        for value in field.unique():
            of = field == value
            a, b, c = (t[of, task].double() for t in (p, y, w))
            total += float(c.sum() * (c * (b - a)).sum().abs() / (c * (b + 0.01)).sum())
        assert M.field_rce(p, y, field, w)[task].item() == pytest.approx(total / w[:, task].sum().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("metric", "function"),
    [
        (M.SegmentedNE, M.normalized_entropy),
        (M.SegmentedCalibration, M.calibration),
        (M.SegmentedCalibrationFreeNE, M.calibration_free_ne),
        (M.SegmentedLogLoss, M.log_loss),
        (M.SegmentedAUC, M.auc),
        (M.SegmentedECE, M.expected_calibration_error),
    ],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("window", [None, 600])
def test_segmented_streams_equal_the_function_of_each_segments_rows(metric, function, window):
    p, y, w = recipe_rows()
    segments = segments_of(2000)
    stream = metric(2, window_rows=window)
    for part in torch.arange(2000).split(100):
        stream.update(p[part], y[part], segments[part], w[part])
    got = stream.compute()
    first = 0 if window is None else 2000 - window
    p, y, w, segments = p[first:], y[first:], w[first:], segments[first:]
    assert list(got) == segments.unique().tolist()
    for segment, value in got.items():
        rows = segments == segment
        torch.testing.assert_close(value, function(p[rows], y[rows], w[rows]), rtol=1e-11, atol=0)
    assert len(stream.kept) == (6 if window else 20 if isinstance(stream, M._SegmentedRows) else 1)
    stream.reset()
    assert stream.compute() == {}


def test_segmented_streams_of_one_task_give_scalars():
    p, y, _ = recipe_rows()
    stream = M.SegmentedNE()
    stream.update(p[:, 0], y[:, 0], torch.zeros(2000, dtype=torch.long))
    assert stream.compute()[0].shape == ()
    assert stream.compute()[0].item() == pytest.approx(M.normalized_entropy(p[:, 0], y[:, 0]).item(), rel=1e-13)


def test_windows_of_row_metrics():
    p, y, w = recipe_rows()
    for stream, function in (
        (M.AUC(2, window_rows=500), M.auc),
        (M.ECE(2, bins=7, window_rows=500), lambda *rows: M.expected_calibration_error(*rows, bins=7)),
    ):
        for part in torch.arange(2000).split(100):
            stream.update(p[part], y[part], w[part])
        torch.testing.assert_close(stream.compute(), function(p[1500:], y[1500:], w[1500:]), rtol=1e-12, atol=0)


STREAMS: tuple[Any, ...] = (
    M.NormalizedEntropy, M.Calibration, M.CalibrationFreeNE, M.LogLoss, M.AUC, M.ECE,
    M.FieldRCE, M.SegmentedNE, M.SegmentedCalibration, M.SegmentedCalibrationFreeNE, M.SegmentedLogLoss,
    M.SegmentedAUC, M.SegmentedECE,
)  # fmt: skip
BY_SEGMENT = M.FieldRCE | M._SegmentedEntropy | M._SegmentedRows


def update(stream, p, y, w):
    if isinstance(stream, BY_SEGMENT):
        stream.update(p, y, torch.zeros(len(p), dtype=torch.long), w)
    else:
        stream.update(p, y, w)


def batch(stream, part: slice) -> tuple[torch.Tensor, ...]:
    p, y, w = recipe_rows()
    segmented = isinstance(stream, BY_SEGMENT)
    return (p[part], y[part], segments_of(2000)[part], w[part]) if segmented else (p[part], y[part], w[part])


def assert_equal_values(got, expected) -> None:
    """Up to the order of sums; of dicts, value by value."""
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-14, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("metric", STREAMS)
def test_forward_reset_and_merge_keep_what_updates_keep(metric, window):
    """Lightning calls `forward`: its value is the batch's, and the window holds."""
    forwarded, updated = metric(2, window_rows=window), metric(2, window_rows=window)
    for start in range(0, 2000, 100):
        part = slice(start, start + 100)
        of_batch = forwarded(*batch(forwarded, part))
        updated.update(*batch(updated, part))
    assert_equal_values(forwarded.compute(), updated.compute())
    last, merged = metric(2), metric(2, window_rows=window)
    last.update(*batch(last, slice(1900, 2000)))
    assert_equal_values(of_batch, last.compute())
    if window is not None:
        assert len(forwarded.kept) == 5
    for start in range(0, 2000, 100):
        one = metric(2, window_rows=window)
        one.update(*batch(one, slice(start, start + 100)))
        one.merge_state(merged)
        merged = one
    assert_equal_values(merged.compute(), updated.compute())
    updated.reset()
    updated.update(*batch(updated, slice(1900, 2000)))
    assert_equal_values(updated.compute(), last.compute())


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("metric", STREAMS)
def test_no_rows_are_no_error_and_no_number(metric, tasks):
    stream = metric(tasks)
    none = torch.zeros(0) if tasks == 1 else torch.zeros(0, tasks)
    for _ in range(2):
        value = stream.compute()
        assert value == {} or bool(value.isnan().all())
        update(stream, none, none, none)


@pytest.mark.parametrize("metric", STREAMS)
def test_negative_sampling_correction_undoes_the_sampling(metric):
    """Whole rows, and every fourth negative of them with a model of those: the same numbers by construction."""
    rate = 0.25
    p = torch.tensor([0.02, 0.1, 0.3]).repeat_interleave(400)
    y = torch.zeros(1200)
    for start, positives in ((0, 40), (400, 80), (800, 120)):
        y[start : start + positives] = 1
    kept = (y == 1) | (torch.arange(1200) % 4 == 0)
    sampled = p[kept] / (p[kept] + (1 - p[kept]) * rate)
    whole, corrected = metric(), metric(negative_sampling_rate=rate)
    update(whole, p, y, None)
    update(corrected, sampled, y[kept], None)
    in_bins = metric in (M.ECE, M.SegmentedECE)
    tolerance = {"rtol": 1e-4, "atol": 1e-4 if in_bins else 0}
    if in_bins:
        whole.bins = corrected.bins = 1
    torch.testing.assert_close(corrected.compute(), whole.compute(), **tolerance)
    with pytest.raises(ValueError, match="negative_sampling_rate: got 0"):
        metric(negative_sampling_rate=0)


def test_sampling_rates_by_task():
    p, y, w = recipe_rows()
    stream = M.NormalizedEntropy(2, negative_sampling_rate=(0.1, 1.0))
    stream.update(p, y, w)
    assert stream.compute()[1].item() == pytest.approx(TORCHEVAL["ne"][1], rel=1e-12)
    assert abs(stream.compute()[0].item() - TORCHEVAL["ne"][0]) > 0.01
    with pytest.raises(ValueError, match="expected 1 or 2 rates"):
        M.NormalizedEntropy(2, negative_sampling_rate=(0.1, 1.0, 1.0))


@pytest.mark.parametrize("metric", STREAMS)
def test_invalid_rows_leave_every_stream_as_it_was(metric):
    p, y, w = recipe_rows()
    stream = metric(2)
    update(stream, p, y, w)
    before = stream.compute()
    with pytest.raises(ValueError, match=r"1 of 4000 predictions are NaN"):
        update(stream, p.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(math.nan).double()), y, w)
    stream._computed = None
    torch.testing.assert_close(stream.compute(), before, rtol=0, atol=0)


def test_a_field_must_be_one_integer_a_row():
    p, y, _ = recipe_rows()
    with pytest.raises(ValueError, match=r"field: got \(1999,\) torch.int64"):
        M.field_rce(p, y, segments_of(1999))
    with pytest.raises(ValueError, match=r"expected one integer per row"):
        M.field_rce(p, y, torch.rand(2000))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sync_over_two_ranks(rank: int, port: int, outcomes) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    p, y, w = recipe_rows()
    segments = segments_of(2000)
    mine = slice(0, 700) if rank == 0 else slice(700, 2000)  # ranks hold different numbers of rows, and of segments
    p, y, w, segments = p[mine], y[mine], w[mine], segments[mine].clamp(min=-1 + rank)
    found = {}
    for metric in STREAMS:
        stream = metric(2)
        for part in torch.arange(len(p)).split(100):
            if "Segmented" in metric.__name__ or metric is M.FieldRCE:
                stream.update(p[part], y[part], segments[part], w[part])
            else:
                stream.update(p[part], y[part], w[part])
        found[metric.__name__] = stream.compute()
    window = M.NormalizedEntropy(2, window_rows=400)
    for part in torch.arange(len(p)).split(100):
        window.update(p[part], y[part], w[part])
    found["window"] = window.compute()
    for metric in STREAMS:
        one_sided = metric(2, window_rows=10_000)
        if rank == 1:
            update(one_sided, p, y, w)
        found[f"one rank has no rows: {metric.__name__}"] = one_sided.compute()
    outcomes.put((rank, {k: ({s: v.tolist() for s, v in x.items()} if isinstance(x, dict) else x.tolist())
                         for k, x in found.items()}))  # fmt: skip
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_agree_with_one_process():
    context = mp.get_context("spawn")
    outcomes = context.Queue()
    workers = [
        context.Process(target=sync_over_two_ranks, args=(r, port, outcomes)) for port in [free_port()] for r in (0, 1)
    ]
    for worker in workers:
        worker.start()
    got = dict(outcomes.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    assert got[0] == got[1]
    p, y, w = recipe_rows()
    segments = segments_of(2000)
    segments[700:] = segments[700:].clamp(min=0)
    for metric in STREAMS:
        stream = metric(2)
        if "Segmented" in metric.__name__ or metric is M.FieldRCE:
            stream.update(p, y, segments, w)
        else:
            stream.update(p, y, w)
        expected = stream.compute()
        found = got[0][metric.__name__]
        if isinstance(expected, dict):
            assert found.keys() == expected.keys()
            assert all(found[s] == pytest.approx(expected[s].tolist(), rel=1e-11) for s in found)
        else:
            assert found == pytest.approx(expected.tolist(), rel=1e-11)
    recent = torch.cat([torch.arange(500, 700), torch.arange(1800, 2000)])
    expected = M.normalized_entropy(p[recent], y[recent], w[recent]).tolist()
    assert got[0]["window"] == pytest.approx(expected, rel=1e-11)
    for metric in STREAMS:
        alone = metric(2)
        update(alone, p[700:], y[700:], w[700:])
        expected = alone.compute()
        found = got[0][f"one rank has no rows: {metric.__name__}"]
        found, expected = (found[0], expected[0]) if isinstance(expected, dict) else (found, expected)
        assert found == pytest.approx(expected.tolist(), rel=1e-11)
