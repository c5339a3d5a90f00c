"""Click logs in their public file formats: values, splits by time, malformed lines, what is fatal."""

from __future__ import annotations

import gzip
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxfp8_recipe.ab.data import DataError, load_dataset
from mxfp8_recipe.ab.data.checked import batch_problems
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.types import Batch


def column(batches, name):
    return torch.cat([getattr(b, name) for b in batches])


def lengths_of(batches):
    return torch.cat([b.history_offsets.diff() for b in batches])


def whole(batches) -> Batch:
    parts = list(batches)
    names = [f.name for f in fields(Batch) if f.name != "history_offsets" and getattr(parts[0], f.name) is not None]
    offsets = F.pad(lengths_of(parts).cumsum(0), (1, 0)) if parts[0].history is not None else None
    return Batch(**{n: column(parts, n) for n in names}, history_offsets=offsets)


def criteo_line(label="0", counts=None, categories=None):
    return "\t".join([label, *(counts or ["1"] * 13), *(categories or ["68fd1e64"] * 26)])


AVAZU_HEADER = "id,click,hour,C1,banner_pos,site_id,weight"


def avazu_line(click="0", hour="14102100", banner="0", site="1fbe01fe", weight="1"):
    return f"1,{click},{hour},1005,{banner},{site},{weight}"


def write(path, lines, *, packed=False):
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    return str(path)


def both(dataset):
    return whole([*dataset.train_batches(3), *dataset.heldout_batches(3)])


class TestCriteo:
    @pytest.mark.parametrize("packed", [False, True])
    def test_values(self, tmp_path, packed):
        first = criteo_line("1", ["", "-2", "0", "99", *["5"] * 9], ["", "aa", "aa", *["bb"] * 23])
        lines = [first, *[criteo_line()] * 9, criteo_line("1", categories=["", "aa", "cc", *["bb"] * 23])]
        path = write(tmp_path / ("train.txt.gz" if packed else "train.txt"), lines, packed=packed)
        dataset = load_dataset(f"criteo:{path}", extra={"buckets": "1000"})
        batch = both(dataset)
        assert batch_problems(batch, dataset.spec) == []
        assert (dataset.spec.num_dense, dataset.spec.cardinalities) == (26, (1000,) * 26)
        assert batch.labels[:, 0].tolist() == [1, *[0] * 9, 1]
        expected = [0, -np.log(3), 0, np.log(100), *[np.log(6)] * 9, 1, *[0] * 12]
        assert batch.dense[0].tolist() == pytest.approx(expected, rel=1e-6)
        assert batch.sparse[0, 0] == 0
        assert batch.sparse[0, 1] == batch.sparse[-1, 1] != 0
        assert batch.sparse[0, 1] != batch.sparse[0, 2]
        assert len(next(iter(dataset.train_batches(100)))) == 9
        assert dataset.optimal_ne == {}

    def test_malformed_lines_are_noted_once_with_their_numbers(self, tmp_path):
        lines = [criteo_line()] * 10
        lines[2] = "0\t1\t2"
        lines[4] = criteo_line("x")
        lines[6] = criteo_line(counts=["1"] * 12 + ["many"])
        path = write(tmp_path / "train.txt", [*lines, ""])
        dataset = load_dataset(f"criteo:{path}")
        for _ in range(2):
            assert len(both(dataset)) == 7
        (note,) = [n for n in dataset.notes if "malformed" in n]
        assert note.startswith("3 malformed lines")
        assert "line 3: 3 columns, expected 40" in note
        assert "line 5: label 'x' is not a number" in note
        assert "line 7: column I13: 'many' is not a number" in note
        with pytest.raises(DataError, match=r"line 3: 3 columns, expected 40 .*drop --strict"):
            load_dataset(f"criteo:{path}", strict=True)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (criteo_line("2"), r"line 4, column label: got 2, expected a number in \[0, 1\] \(2 such rows"),
            (criteo_line("-1"), r"line 4, column label: got -1"),
            (criteo_line("nan"), r"line 4, column label: got nan"),
            (criteo_line(counts=["1", "nan", *["1"] * 11]), r"line 4, column I2: got nan.*\(2 such rows"),
            (criteo_line(counts=["inf", *["1"] * 12]), r"line 4, column I1: got inf, expected a finite"),
        ],
    )
    def test_bad_labels_and_nan_features_are_fatal(self, tmp_path, line, message):
        lines = [criteo_line()] * 10
        lines[3] = lines[5] = line
        dataset = load_dataset(f"criteo:{write(tmp_path / 'train.txt', lines)}")
        with pytest.raises(DataError, match=message):
            both(dataset)

    def test_rows_caps_and_the_tail_is_held_out(self, tmp_path):
        path = write(tmp_path / "train.txt", [criteo_line(str(i % 2), [str(i)] * 13) for i in range(30)])
        dataset = load_dataset(f"criteo:{path}", rows=20, extra={"heldout": "0.25"})
        train, heldout = whole(dataset.train_batches(4)), whole(dataset.heldout_batches(4))
        assert train.dense[:, 0].expm1().round().tolist() == list(range(15))
        assert heldout.dense[:, 0].expm1().round().tolist() == list(range(15, 20))

    def test_another_format_is_recognized_as_such(self, tmp_path):
        path = write(tmp_path / "train.txt", ["0 1:2 3:4"] * 1200)
        with pytest.raises(DataError, match=r"0 rows of criteo found and \d+ malformed lines.*another format"):
            load_dataset(f"criteo:{path}")

    def test_broken_gzip(self, tmp_path):
        path = tmp_path / "train.txt.gz"
        path.write_bytes(gzip.compress(b"0\t" * 100_000)[:60])
        with pytest.raises(DataError, match="not a whole gzip file"):
            load_dataset(f"criteo:{path}")

    def test_no_weight_column(self, tmp_path):
        path = write(tmp_path / "train.txt", [criteo_line()] * 4)
        with pytest.raises(DataError, match="got 'w', but a Criteo file does not name its columns"):
            load_dataset(f"criteo:{path}", weight_column="w")


class TestAvazu:
    def test_split_by_hour_and_segments(self, tmp_path):
        hours = ["14102100"] * 4 + ["14102123"] * 3 + ["14102200"] * 3
        lines = [avazu_line(hour=h, banner=str(i % 3), site="" if i == 0 else "s") for i, h in enumerate(hours)]
        dataset = load_dataset(f"avazu:{write(tmp_path / 'train.csv', [AVAZU_HEADER, *lines])}")
        train, heldout = whole(dataset.train_batches(4)), whole(dataset.heldout_batches(4))
        assert train.sparse[:, 0].tolist() == [1] * 4 + [24] * 3
        assert heldout.sparse[:, 0].tolist() == [1] * 3
        assert train.segments.tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert (train.sparse[0, 3], train.sparse[1, 3] > 0) == (0, True)
        assert dataset.spec.num_dense == 0
        assert len(dataset.spec.cardinalities) == 5
        assert any("7 rows to train on, 3 from 14102200 on held out" in n for n in dataset.notes)

    def test_a_file_out_of_order_still_splits_by_hour(self, tmp_path):
        hours = ["14102205", "14102100", "14102100", "14102100", "14102101", "14102205"]
        dataset = load_dataset(f"avazu:{write(tmp_path / 't', [AVAZU_HEADER, *[avazu_line(hour=h) for h in hours]])}")
        assert whole(dataset.train_batches(9)).sparse[:, 0].tolist() == [1, 1, 1, 2]
        assert whole(dataset.heldout_batches(9)).sparse[:, 0].tolist() == [6, 6]
        assert any(n.startswith("1 rows") and "older than the row before" in n for n in dataset.notes)

    def test_one_hour_splits_by_order(self, tmp_path):
        dataset = load_dataset(f"avazu:{write(tmp_path / 'train.csv', [AVAZU_HEADER, *[avazu_line()] * 10])}")
        assert len(whole(dataset.train_batches(99))) == 8
        assert any("one time" in n for n in dataset.notes)

    def test_weights(self, tmp_path):
        lines = [AVAZU_HEADER, *[avazu_line(weight=w) for w in ("0.5", "2", "x", "0", "1", "1")]]
        dataset = load_dataset(f"avazu:{write(tmp_path / 'train.csv', lines)}", weight_column="weight")
        assert both(dataset).weights[:, 0].tolist() == [0.5, 2, 0, 1, 1]
        assert any("line 4: weight column 'weight'" in n for n in dataset.notes)
        assert len(dataset.spec.cardinalities) == 4
        with pytest.raises(DataError, match=r"weight_column: got 'weigth', expected one of .*mean 'weight'"):
            load_dataset(f"avazu:{tmp_path / 'train.csv'}", weight_column="weigth")
        write(tmp_path / "train.csv", [*lines, avazu_line(weight="-3")])
        dataset = load_dataset(f"avazu:{tmp_path / 'train.csv'}", weight_column="weight")
        with pytest.raises(DataError, match=r"line 8, column weight: got -3, expected a number in \[0, inf\)"):
            both(dataset)

    def test_malformed_lines(self, tmp_path):
        lines = [AVAZU_HEADER, *[avazu_line()] * 4, avazu_line(hour="2014-10-21"), "1,0", avazu_line(hour="14102199")]
        path = write(tmp_path / "train.csv", lines)
        dataset = load_dataset(f"avazu:{path}")
        assert len(both(dataset)) == 4
        (note,) = [n for n in dataset.notes if "malformed" in n]
        for part in ("line 6: hour '2014-10-21' is not YYMMDDHH", "line 7: 2 columns, expected 7", "line 8: hour"):
            assert part in note
        with pytest.raises(DataError, match="line 6"):
            load_dataset(f"avazu:{path}", strict=True)

    def test_a_file_without_the_header(self, tmp_path):
        path = write(tmp_path / "train.csv", [avazu_line()] * 4)
        with pytest.raises(DataError, match=r"line 1: header is '1,0.*expected id,click,hour"):
            load_dataset(f"avazu:{path}")


class TestLibsvm:
    def test_dense(self, tmp_path):
        lines = ["+1 1:0.5 3:-2", "-1 2:1 # a comment", "-1", "+1 3:1e2", "-1 1:1"]
        dataset = load_dataset(f"libsvm:{write(tmp_path / 'data', lines)}")
        batch = both(dataset)
        assert batch_problems(batch, dataset.spec) == []
        assert batch.labels[:, 0].tolist() == [1, 0, 0, 1, 0]
        assert batch.dense.tolist() == [[0, 0.5, 0, -2], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 100], [0, 1, 0, 0]]
        assert build_model("gem-small", dataset.spec)(batch).shape == (5, 1)

    def test_bags_of_tokens(self, tmp_path):
        lines = ["1 5:1 900000:1", "0 5:1 7:0.5", "0 7:0.5", "1 7:-0.5", "0"]
        dataset = load_dataset(f"libsvm:{write(tmp_path / 'data', lines)}")
        batch = both(dataset)
        assert batch_problems(batch, dataset.spec) == []
        assert dataset.spec.max_history == 2
        assert batch.history_offsets.tolist() == [0, 2, 4, 5, 6, 6]
        five, _, same_five, half, same_half, minus_half = batch.history.tolist()
        assert (five, half) == (same_five, same_half)
        assert len({five, half, minus_half}) == 3
        assert build_model("gem-small", dataset.spec)(batch).isfinite().all()

    def test_malformed_weights_and_bad_values(self, tmp_path):
        lines = ["1 1:1 # weight=2.5", "0 1:1 # weight=0", "0 1:one", "0 1:1", "x 1:1 # weight=1", "1 2:1 # weight=1"]
        path = write(tmp_path / "data", lines)
        dataset = load_dataset(f"libsvm:{path}", weight_column="weight")
        assert both(dataset).weights[:, 0].tolist() == [2.5, 0, 1]
        (note,) = [n for n in dataset.notes if "malformed" in n]
        for part in ("line 3: '1:one' is not index:value", "line 4: no '# weight=NUMBER'", "line 5: label 'x'"):
            assert part in note
        with pytest.raises(DataError, match="line 3"):
            load_dataset(f"libsvm:{path}", strict=True)
        with pytest.raises(DataError, match=r"line 2, column 3: got nan, expected a finite number \(1 such"):
            both(load_dataset(f"libsvm:{write(tmp_path / 'nan', ['1 1:1', '0 3:nan', '1 1:1'])}"))
        with pytest.raises(DataError, match=r"line 2, column label: got 5"):
            both(load_dataset(f"libsvm:{write(tmp_path / 'five', ['1 1:1', '5 3:1', '1 1:1'])}"))
