"""Data sets of the A/B check: the simulator's ground truth, time order without leaks, names and contracts."""

from __future__ import annotations

import re
import zipfile
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mxfp8_recipe.ab.data import CHOICES, DataError, load_dataset
from mxfp8_recipe.ab.data.checked import batch_problems
from mxfp8_recipe.ab.data.ml100k import earlier_items, past_rate
from mxfp8_recipe.ab.data.rows import Rows, concat, ranges, rebatch, time_cut
from mxfp8_recipe.ab.data.stream import hash_ids
from mxfp8_recipe.ab.data.synthetic import CHUNK, BayesEntropy, SyntheticDataset
from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.types import Batch, FeatureSpec


def column(batches, name):
    return torch.cat([getattr(b, name) for b in batches])


def lengths_of(batches):
    return torch.cat([b.history_offsets.diff() for b in batches])


def same(first: Batch, second: Batch) -> bool:
    pairs = [(getattr(first, f.name), getattr(second, f.name)) for f in fields(Batch)]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def whole(batches) -> Batch:
    parts = list(batches)
    names = [f.name for f in fields(Batch) if f.name != "history_offsets" and getattr(parts[0], f.name) is not None]
    offsets = F.pad(lengths_of(parts).cumsum(0), (1, 0)) if parts[0].history is not None else None
    return Batch(**{n: column(parts, n) for n in names}, history_offsets=offsets)


@pytest.fixture(scope="module")
def simulated():
    return load_dataset("synthetic", rows=30_000, seed=3)


class TestSynthetic:
    def test_keeps_the_contract(self, simulated):
        for batch in [*simulated.train_batches(1024), *simulated.heldout_batches(1024)]:
            assert batch_problems(batch, simulated.spec) == []
            assert batch.segments.min() >= 0
            assert batch.segments.max() <= 7

    def test_split_and_rates(self, simulated):
        train, heldout = whole(simulated.train_batches(1024)), whole(simulated.heldout_batches(1024))
        assert (len(train), len(heldout)) == (24_000, 6_000)
        click, conversion = train.labels.T
        assert 0.04 < click.mean() < 0.06
        assert 0.1 < conversion.sum() / click.sum() < 0.35
        assert torch.equal(train.weights[:, 1], click)
        assert (conversion <= click).all()
        assert len(train.segments.unique()) == 8

    def test_histories_are_jagged_with_a_fill_of_one_half(self, simulated):
        lengths = lengths_of(simulated.train_batches(512))
        assert (lengths.min(), lengths.max()) == (0, simulated.spec.max_history)
        assert abs(lengths.double().mean() / simulated.spec.max_history - 0.5) < 0.01
        assert column(simulated.train_batches(512), "history").min() >= 1

    def test_ids_follow_a_power_law(self, simulated):
        counts = column(simulated.train_batches(4096), "sparse")[:, 0].bincount().sort(descending=True).values
        assert counts[:40].sum() > 0.3 * counts.sum()
        assert (counts > 0).sum() > 1_000

    def test_rows_depend_on_the_seed_alone(self, simulated):
        again = load_dataset("synthetic", rows=30_000, seed=3)
        other = load_dataset("synthetic", rows=30_000, seed=4)
        first = next(iter(simulated.train_batches(777)))
        assert same(first, next(iter(again.train_batches(777))))
        assert not same(first, next(iter(other.train_batches(777))))
        assert again.optimal_ne == simulated.optimal_ne

    def test_rows_do_not_depend_on_batch_size_or_number_of_rows(self, simulated):
        assert same(whole(simulated.train_batches(5_000)), whole(simulated.train_batches(1_111)))
        longer = load_dataset("synthetic", rows=3 * CHUNK + 30_000, seed=3)
        assert same(whole(simulated.heldout_batches(512)), whole(rebatch([_rows_of(longer, 24_000, 30_000)], 512)))

    def test_true_probabilities_are_calibrated(self, simulated):
        for t, weight in ((0, None), (1, 0)):
            rows, truth = zip(*simulated.chunks("train"), strict=True)
            labels = np.concatenate([r.labels for r in rows])
            p, y = np.concatenate(truth)[:, t], labels[:, t]
            if weight is not None:
                p, y = p[labels[:, weight] > 0], y[labels[:, weight] > 0]
            assert abs(y.sum() - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum())

    def test_no_prediction_beats_the_optimum(self, simulated):
        for part in ("train", "heldout"):
            rows, truth = zip(*simulated.chunks(part), strict=True)
            rows, p = concat(list(rows)), np.concatenate(truth)[:, 0]
            optimum = ne(p, rows)
            logit = np.log(p / (1 - p))
            noise = np.random.default_rng(0).normal(size=len(p))
            worse = [logit + 0.4, logit - 0.4, 1.4 * logit, 0.7 * logit, logit + 0.6 * noise]
            assert all(ne(1 / (1 + np.exp(-z)), rows) > optimum for z in worse)
        assert optimum == pytest.approx(simulated.optimal_ne["ctr"], rel=1e-12)

    def test_a_trained_model_lies_between_the_optimum_and_the_base_rate(self, simulated):
        torch.manual_seed(0)
        model = build_model("dcnv2", simulated.spec)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for batch in simulated.train_batches(512):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch.labels, weight=batch.weights).backward()
            optimizer.step()
        heldout = whole(simulated.heldout_batches(6_000))
        with torch.no_grad():
            p = model(heldout)[:, 0].double().sigmoid().numpy()
        rows = Rows(dense=p, sparse=p, labels=heldout.labels.numpy(), weights=heldout.weights.numpy())
        assert simulated.optimal_ne["ctr"] + 0.02 < ne(p, rows) < 0.99

    def test_down_sampled_negatives(self, simulated):
        sampled = load_dataset("synthetic", rows=30_000, seed=3, negative_sampling_rate=0.25)
        labels, all_labels = (column(d.train_batches(4096), "labels")[:, 0] for d in (sampled, simulated))
        assert labels.sum() == all_labels.sum()
        kept = (labels == 0).sum() / (all_labels == 0).sum()
        assert abs(kept - 0.25) < 0.01
        assert sampled.optimal_ne["ctr"] == pytest.approx(simulated.optimal_ne["ctr"], rel=0.03)
        assert sampled.optimal_ne["cvr"] == pytest.approx(simulated.optimal_ne["cvr"], rel=1e-12)

    def test_two_million_rows_are_not_held(self):
        late = SyntheticDataset(rows=2_000_000, heldout=0.005, seed=1)
        assert len(next(iter(late.heldout_batches(100)))) == 100
        assert sum(a.nbytes for a in vars(late).values() if isinstance(a, np.ndarray)) == 0

    def test_without_histories(self):
        plain = load_dataset("synthetic", rows=2_000, extra={"max_history": "0"})
        batch = next(iter(plain.train_batches(64)))
        assert plain.spec.history_field is None
        assert batch.history is None
        assert build_model("gem-small", plain.spec)(batch).shape == (64, 2)


def _rows_of(dataset, start, stop):
    return concat([rows for rows, _ in dataset.chunks("train")]).slice(start, stop)


def ne(p, rows):
    sums = BayesEntropy()
    sums.update(p, rows.labels[:, 0].astype(np.float64), rows.weights[:, 0].astype(np.float64))
    return sums.normalized_entropy()


class TestBayesEntropy:
    def test_closed_form_of_two_groups(self):
        """4 rows at p = 1/2 with 2 clicks, 8 at p = 1/4 with 2; the base rate is 1/3."""
        p = np.asarray([0.5] * 4 + [0.25] * 8)
        y = np.asarray([1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0])
        sums = BayesEntropy()
        for part in (slice(0, 5), slice(5, 12)):
            sums.update(p[part], y[part], np.ones(12)[part])
        cross_entropy = 4 * np.log(2) + 2 * np.log(4) + 6 * np.log(4 / 3)
        assert sums.normalized_entropy() == pytest.approx(cross_entropy / (4 * np.log(3) + 8 * np.log(1.5)), rel=1e-14)

    def test_the_base_rate_itself_has_one(self):
        sums = BayesEntropy()
        sums.update(np.full(8, 0.25), np.asarray([1, 1, 0, 0, 0, 0, 0, 0]), np.ones(8))
        assert sums.normalized_entropy() == pytest.approx(1.0, rel=1e-14)

    def test_agrees_with_the_metric_the_report_uses(self):
        metrics = pytest.importorskip("mxfp8_recipe.monitors.metrics")
        rng = np.random.default_rng(0)
        p, y, w = rng.random(500), (rng.random(500) < 0.3).astype(float), rng.random(500)
        sums = BayesEntropy()
        sums.update(p, y, w)
        theirs = metrics.EntropySums.of(*map(torch.from_numpy, (p, y, w))).normalized_entropy
        assert sums.normalized_entropy() == pytest.approx(float(theirs), rel=1e-12)

    def test_one_class_has_none(self):
        sums = BayesEntropy()
        sums.update(np.full(3, 0.5), np.zeros(3), np.ones(3))
        assert np.isnan(sums.normalized_entropy())


class TestRows:
    def test_ranges(self):
        positions, offsets = ranges(np.asarray([2, 5, 0]), np.asarray([4, 5, 3]))
        assert positions.tolist() == [2, 3, 0, 1, 2]
        assert offsets.tolist() == [0, 2, 2, 5]

    @pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
    def test_rebatch_keeps_rows_and_order(self, batch_size):
        rows = jagged_rows(17)
        chunks = [rows.slice(0, 5), rows.slice(5, 5), rows.slice(5, 6), rows.slice(6, 17)]
        batches = list(rebatch(chunks, batch_size))
        assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert same(whole(batches), rows.to_batch())

    def test_take(self):
        rows = jagged_rows(9)
        index = np.asarray([7, 0, 3])
        expected = concat([rows.slice(i, i + 1) for i in index])
        assert same(rows.take(index).to_batch(), expected.to_batch())

    def test_time_cut_never_splits_a_timestamp(self):
        assert time_cut(np.asarray([1, 1, 2, 2, 2, 2, 2, 3]), 0.5, "x") in (2, 7)
        with pytest.raises(DataError, match="one timestamp"):
            time_cut(np.asarray([5, 5, 5]), 0.5, "x")


def jagged_rows(n):
    rng = np.random.default_rng(n)
    lengths = rng.integers(0, 4, n)
    return Rows(
        dense=rng.normal(size=(n, 2)),
        sparse=rng.integers(0, 9, (n, 3)),
        labels=rng.random((n, 1)),
        weights=np.ones((n, 1)),
        history=rng.integers(1, 9, lengths.sum()),
        history_offsets=np.append(0, np.cumsum(lengths)),
        segments=rng.integers(0, 3, n),
    )


def make_wheel(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def movielens(events):
    folder = "recbole/dataset_example/ml-100k/ml-100k"
    lines = [f"{u}\t{m}\t{r}\t{t}" for u, m, r, t in events]
    return {
        f"{folder}.inter": "\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines, ""]),
        f"{folder}.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "7\t24\tM\ttechnician\t85711\n8\t53\tF\tother\t94043\n",
        f"{folder}.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "10\tToy Story\t1995\tAnimation Comedy\n11\tGoldenEye\t1995\tAction\n12\tOld\t\t\n13\tX\tV\tComedy Action\n",
    }


EVENTS = [(7, 12, 4, 300), (7, 10, 5, 100), (8, 11, 2, 150), (7, 11, 3, 200), (7, 13, 5, 200), (8, 10, 1, 400)]


class TestMovieLens:
    @pytest.fixture
    def dataset(self, tmp_path):
        make_wheel(tmp_path / "recbole-1.2.1-py3-none-any.whl", movielens(EVENTS))
        return load_dataset("ml-100k", offline=True, extra={"cache_dir": str(tmp_path), "heldout": "0.3"})

    def test_rows_histories_and_labels(self, dataset):
        batch = whole([*dataset.train_batches(10), *dataset.heldout_batches(10)])
        assert batch_problems(batch, dataset.spec) == []
        assert batch.sparse[:, :2].tolist() == [[1, 1], [2, 2], [2, 1], [4, 1], [3, 1], [1, 2]]
        assert batch.labels[:, 0].tolist() == [1, 0, 0, 1, 1, 0]
        history = [h.tolist() for h in batch.history.split(batch.history_offsets.diff().tolist())]
        assert history == [[], [], [1], [1], [1, 2, 4], [2]]
        assert (len(dataset.train), len(dataset.heldout)) == (4, 2)
        assert any("GroupLens" in note for note in dataset.notes)

    def test_rows_caps_the_earliest(self, tmp_path):
        make_wheel(tmp_path / "recbole-1.2.1-py3-none-any.whl", movielens(EVENTS))
        first = load_dataset("ml-100k", rows=3, offline=True, extra={"cache_dir": str(tmp_path)})
        assert len(first.train) + len(first.heldout) == 3

    def test_features_come_from_strictly_earlier_events(self):
        """Against a loop over all pairs, on data where half the timestamps are shared."""
        rng = np.random.default_rng(0)
        n = 300
        user, item, time = rng.integers(1, 6, n), rng.integers(1, 40, n), np.sort(rng.integers(0, 120, n))
        label = rng.integers(0, 2, n).astype(float)
        history, offsets = earlier_items(user, item, time, 4)
        rate = past_rate(user, time, label)
        for row in range(n):
            earlier = np.flatnonzero((user == user[row]) & (time < time[row]))
            assert history[offsets[row] : offsets[row + 1]].tolist() == item[earlier[-4:]].tolist()
            smoothed = (label[earlier].sum() + 2.5) / (len(earlier) + 5)
            assert rate[row].tolist() == pytest.approx([4 * (smoothed - 0.5), (np.log1p(len(earlier)) - 3) / 2])

    def test_changing_the_present_and_the_future_changes_nothing_before(self):
        rng = np.random.default_rng(1)
        user, item, time = rng.integers(1, 4, 200), rng.integers(1, 40, 200), np.sort(rng.integers(0, 60, 200))
        label = rng.integers(0, 2, 200).astype(float)
        now = time[120]
        later = time >= now
        changed_item, changed_label = np.where(later, 41 - item, item), np.where(later, 1 - label, label)
        before = np.flatnonzero(time <= now)
        old, offsets = earlier_items(user, item, time, 8)
        new, _ = earlier_items(user, changed_item, time, 8)
        assert np.array_equal(old[: offsets[before[-1] + 1]], new[: offsets[before[-1] + 1]])
        for key in (user, item):
            assert np.array_equal(past_rate(key, time, label)[before], past_rate(key, time, changed_label)[before])
        assert not np.array_equal(past_rate(user, time, label), past_rate(user, time, changed_label))

    def test_a_short_line_is_named(self, tmp_path):
        members = movielens(EVENTS)
        members["recbole/dataset_example/ml-100k/ml-100k.inter"] += "7\t12\n"
        make_wheel(tmp_path / "recbole-1.2.1-py3-none-any.whl", members)
        with pytest.raises(DataError, match=r"ml-100k.inter line 8: 2 columns, expected 4"):
            load_dataset("ml-100k", offline=True, extra={"cache_dir": str(tmp_path)})


def bandit_log(start, rows):
    header = ",timestamp,item_id,position,click,propensity_score," + ",".join(f"user_feature_{i}" for i in range(4))
    lines = [header + ",user-item_affinity_0,user-item_affinity_1"]
    for n, (item, click, clicks) in enumerate(rows):
        stamp = f"2019-11-24 00:{start:02d}:{n:02d}+00:00"
        lines.append(f"{n},{stamp},{item},{1 + n % 3},{click},0.5,a,b,c,d{n},{clicks[0]},{clicks[1]}")
    return "\n".join(lines) + "\n"


class TestOpenBandit:
    def test_six_logs_in_time_order(self, tmp_path):
        members = {}
        for c, campaign in enumerate(("all", "men", "women")):
            context = ",item_id,item_feature_0\n0,0,-0.5\n1,1,0.5\n"
            members[f"obp/dataset/obd/bts/{campaign}/item_context.csv"] = context
            for p, policy in enumerate(("random", "bts")):
                log = bandit_log(10 * c + p, [(0, 0, (0.0, 0.0)), (1, 1, (2.0, 1.0))])
                members[f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv"] = log
        make_wheel(tmp_path / "obp-0.4.1-py3-none-any.whl", members)
        dataset = load_dataset("obd", offline=True, extra={"cache_dir": str(tmp_path), "heldout": "0.5"})
        batch = whole([*dataset.train_batches(4), *dataset.heldout_batches(4)])
        assert batch_problems(batch, dataset.spec) == []
        assert batch.sparse[:, 0].tolist() == [1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6]
        assert batch.labels[:, 0].tolist() == [0, 1] * 6
        assert batch.segments.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert batch.history.tolist() == [2, 1, 2, 1, 4, 3, 4, 3, 6, 5, 6, 5]
        assert any("CC BY 4.0" in note for note in dataset.notes)


class TestWheels:
    def test_pip_fetches_into_the_cache_once(self, tmp_path, monkeypatch):
        make_wheel(tmp_path / "index" / "recbole-1.2.1-py3-none-any.whl", movielens(EVENTS))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
        extra = {"cache_dir": str(tmp_path / "cache")}
        assert len(load_dataset("ml-100k", extra=extra).train) > 0
        assert [p.name for p in (tmp_path / "cache").iterdir()] == ["recbole-1.2.1-py3-none-any.whl"]
        assert len(load_dataset("ml-100k", offline=True, extra=extra).train) > 0

    def test_failed_download_and_offline_say_where_to_put_the_wheel(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        extra = {"cache_dir": str(tmp_path)}
        with pytest.raises(DataError, match=r"could not download.*put obp-0.4.1-py3-none-any.whl into"):
            load_dataset("obd", extra=extra)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(DataError, match=r"downloads are off; put recbole-1.2.1-py3-none-any.whl into"):
            load_dataset("ml-100k", offline=True, extra=extra)

    @pytest.mark.parametrize("content", [b"no zip", None])
    def test_a_broken_wheel_is_said(self, tmp_path, content):
        path = tmp_path / "recbole-1.2.1-py3-none-any.whl"
        if content is None:
            make_wheel(path, {"other": ""})
        else:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"delete"):
            load_dataset("ml-100k", offline=True, extra={"cache_dir": str(tmp_path)})


class TestNames:
    def test_unknown_name_lists_the_choices_and_the_near_miss(self):
        with pytest.raises(DataError) as error:
            load_dataset("ml_100k_")
        assert all(choice in str(error.value) for choice in CHOICES)
        assert "Did you mean 'ml-100k'?" in str(error.value)
        assert "\n" not in str(error.value)

    def test_missing_file_and_missing_path(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"criteo: no file at .*nothing.txt, looked from"):
            load_dataset(f"criteo:{tmp_path / 'nothing.txt'}")
        with pytest.raises(DataError, match="got no path, expected --data avazu:PATH"):
            load_dataset("avazu")
        with pytest.raises(DataError, match="is a folder"):
            load_dataset(f"libsvm:{tmp_path}")

    def test_every_bad_option_in_one_error(self):
        with pytest.raises(DataError, match=r"'bucket'.*rows: got 1.*negative_sampling_rate: got 0.*weight_column"):
            load_dataset("synthetic", rows=1, negative_sampling_rate=0, weight_column="w", extra={"bucket": "3"})
        with pytest.raises(DataError, match="source: got 'x' after the colon"):
            load_dataset("synthetic:x")
        with pytest.raises(DataError, match="heldout: got '2'"):
            load_dataset("synthetic", extra={"heldout": "2"})

    def test_hashed_ids_are_fixed_for_good(self):
        """Checkpoints depend on them: a change here is a change of format."""
        assert hash_ids([[b"68fd1e64", b"68fd1e64", b""]], 16_384).tolist() == [[6305, 13786, 0]]
        many = hash_ids([[b"%d" % i] for i in range(20_000)], 101)
        counts = np.bincount(many[:, 0], minlength=101)
        assert counts[0] == 0
        assert counts[1:].min() > 130
        assert counts[1:].max() < 280


OWN = """
import torch
from mxfp8_recipe.ab.types import Batch, DataRequest, FeatureSpec

class Own:
    name, spec, optimal_ne, notes = "own", FeatureSpec(num_dense=1, cardinalities=(3,)), {{}}, []
    def __init__(self, request):
        self.rows = request.rows
    def train_batches(self, batch_size):
        yield Batch(dense=torch.ones(2, 1), sparse=torch.zeros(2, 1, dtype=torch.long), labels={labels},
                    weights=torch.ones(2, 1))
    heldout_batches = train_batches

def load(request: DataRequest):
    return Own(request)

def wrong(request):
    return [1, 2]
"""


class TestOwnFunction:
    def test_from_the_current_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own_ctr_data.py").write_text(OWN.format(labels="torch.ones(2, 1)"))
        dataset = load_dataset("own_ctr_data:load", rows=5)
        assert dataset.name == "own"
        assert len(next(iter(dataset.train_batches(2)))) == 2
        with pytest.raises(DataError, match="returned list without name, spec"):
            load_dataset("own_ctr_data:wrong")
        with pytest.raises(DataError, match="no 'laod'; did you mean load"):
            load_dataset("own_ctr_data:laod")

    def test_its_batches_are_held_to_the_contract(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "bad_ctr_data.py").write_text(OWN.format(labels="torch.tensor([[0.], [3.]])"))
        dataset = load_dataset("bad_ctr_data:load")
        message = r"bad_ctr_data:load, held-out batch 0: labels of ctr: got 3.0 at row 1, .*\(1 such rows\)"
        with pytest.raises(DataError, match=message):
            next(iter(dataset.heldout_batches(2)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dense": torch.full((3, 2), torch.nan)}, r"dense\[:, 0\]: got nan at row 0.*\(3 such rows\)"),
            ({"sparse": torch.full((3, 3), 9)}, r"sparse\[:, 0\]: got 9 .*0..8"),
            ({"weights": -torch.ones(3, 1)}, "weights of ctr: got -1"),
            ({"labels": torch.ones(3, 2)}, r"labels: shape \(3, 2\), expected \(3, 1\)"),
            ({"history_offsets": torch.tensor([0, 2, 1, 3])}, "history_offsets: expected to rise"),
            ({"history_offsets": torch.tensor([0, 3, 3])}, r"history_offsets: shape \(3,\)"),
            ({"history_offsets": torch.tensor([0, 3, 3, 3])}, "history lengths: got 3 at row 0"),
            ({"history": torch.tensor([1, 2, 9])}, "history: got 9 at row 2"),
            ({"history": None}, "history: none"),
        ],
    )
    def test_every_breach_is_named(self, change, message):
        spec = FeatureSpec(num_dense=2, cardinalities=(9, 9, 9), history_field=0, max_history=2)
        good = {
            "dense": torch.zeros(3, 2),
            "sparse": torch.zeros(3, 3, dtype=torch.int64),
            "labels": torch.ones(3, 1),
            "weights": torch.ones(3, 1),
            "history": torch.tensor([1, 2, 8]),
            "history_offsets": torch.tensor([0, 2, 2, 3]),
        }
        assert batch_problems(Batch(**good), spec) == []
        (problem, *_) = batch_problems(Batch(**{**good, **change}), spec)
        assert re.search(message, problem)
