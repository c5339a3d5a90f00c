"""`mxfp8 compare`: the same numbers as the metrics, rows joined and sorted, mismatches told, mistakes in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from mxfp8_recipe.ab import compare, compare_files, tables
from mxfp8_recipe.ab.compare_command import compare_command
from mxfp8_recipe.monitors import metrics

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SEEDS, ROWS = 4, 6000


def columns(harm=0.0, drift=0.02, seed=0, seeds=SEEDS, rows=ROWS) -> dict[str, np.ndarray]:
    """Predictions of `seeds` trainings of the same rows, in time order."""
    truth, run = np.random.default_rng(0), np.random.default_rng(seed + 1)
    logit = truth.normal(-1, 1, rows)
    label = (truth.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    segment = truth.integers(0, 3, rows)
    prediction = [1 / (1 + np.exp(-(logit + harm + drift * run.normal(size=rows)))) for _ in range(seeds)]
    return {
        "id": np.tile(np.arange(rows) * 7, seeds),
        "label": np.tile(label, seeds),
        "prediction": np.concatenate(prediction),
        "time": np.tile(np.arange(rows), seeds),
        "segment": np.tile(segment, seeds),
        "seed": np.repeat(np.arange(seeds), rows),
        "weight": np.tile(truth.random(rows) + 0.5, seeds),
    }


def shuffled(table: dict, seed: int = 0) -> dict:
    order = np.random.default_rng(seed).permutation(len(table["label"]))
    return {name: np.asarray(values)[order] for name, values in table.items()}


def write(path: Path, table: dict) -> str:
    if path.suffix == ".csv":
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*(v.tolist() for v in table.values())))]
        path.write_text("\n".join(lines) + "\n")
    else:
        pq.write_table(pa.table(dict(table)), path)
    return str(path)


def run(*arguments: str):
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, list(arguments))


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.parquet", columns())
    write(tmp_path / "b.parquet", columns(seed=10))
    write(tmp_path / "p.parquet", columns(seed=20))
    return tmp_path


def test_harmless_passes_and_the_numbers_are_the_metrics(files):
    result = run("a.parquet", "b.parquet", "--placebo", "p.parquet", "--ne-budget", "0.005", "--out", "out")
    assert result.exit_code == 0, result.output
    found, a, b = report(files / "out"), columns(), columns(seed=10)
    gaps = []
    for seed in range(SEEDS):
        rows = slice(seed * ROWS, (seed + 1) * ROWS)
        of = [
            [torch.from_numpy(np.ascontiguousarray(t[c][rows])) for c in ("prediction", "label", "weight")]
            for t in (a, b)
        ]
        gaps.append((metrics.normalized_entropy(*of[1]) / metrics.normalized_entropy(*of[0])).item() - 1)
    assert found["gap"][0]["gap"] == pytest.approx(np.mean(gaps), rel=1e-9)
    assert found["seeds"] == ["0", "1", "2", "3"]
    assert found["rows"] == [ROWS] * SEEDS
    assert [s["segment"] for s in found["segments"]] == ["segment 0", "segment 1", "segment 2"] or len(
        found["segments"]
    ) == 3
    assert len(found["placebo_gaps"][0]) == SEEDS
    assert found["metrics"]["A"]["auc"] > 0.7
    assert found["mismatches"] == []
    page = (files / "out" / "report.html").read_text()
    assert found["headline"] in page
    assert "<script" not in page


def test_harm_fails_and_one_seed_is_inconclusive(files):
    write(files / "h.parquet", columns(harm=0.4, seed=10))
    assert run("a.parquet", "h.parquet", "--out", "out").exit_code == 1
    one = {name: values[:ROWS] for name, values in columns().items() if name != "seed"}
    other = {name: values[:ROWS] for name, values in columns(seed=10).items() if name != "seed"}
    write(files / "a1.parquet", one)
    write(files / "b1.parquet", other)
    result = run("a1.parquet", "b1.parquet", "--out", "out")
    assert result.exit_code == 3
    assert "use more seeds" in result.output


def test_same_weights_decide_with_one_seed(files):
    one = {name: values[:ROWS] for name, values in columns(drift=0.0).items() if name != "seed"}
    write(files / "a1.parquet", one)
    for harm, drift, code in ((0.0, 0.01, 0), (0.01, 0.0, 1), (0.0, 0.1, 1)):
        moved = {n: v[:ROWS] for n, v in columns(harm=harm, drift=drift, seed=3).items() if n != "seed"}
        write(files / "b1.parquet", moved)
        result = run("a1.parquet", "b1.parquet", "--same-weights", "--ne-budget", "0.002", "--out", "out")
        assert result.exit_code == code, result.output
    assert "logit RMS error" in (files / "out" / "report.html").read_text()


def test_each_seed_of_the_same_weights_has_a_row_of_its_own(files):
    run("a.parquet", "b.parquet", "--same-weights", "--out", "out")
    found = report(files / "out")
    cells = tables.comparison(found).rows
    assert [row[0] for row in cells] == [f"label, seed {seed}" for seed in range(SEEDS)]
    assert [row[-1] for row in cells] == [tables.percent(g, sign=True) for g in found["calibration_gap"]["per_seed"]]
    assert len({row[-1] for row in cells}) == SEEDS


def test_a_harm_that_follows_the_label_breaks_a_gate_of_its_own(files):
    """Mean and RMS of the logits hold; NE moves by eight times the budget."""
    one = {name: values[:ROWS] for name, values in columns(drift=0.0).items() if name != "seed"}
    write(files / "a1.parquet", one)
    logit = np.log(one["prediction"] / (1 - one["prediction"]))
    harmed = 1 / (1 + np.exp(-(logit - 0.03 * (one["label"] - one["prediction"]))))
    write(files / "b1.parquet", one | {"prediction": harmed})
    result = run("a1.parquet", "b1.parquet", "--same-weights", "--out", "out")
    assert result.exit_code == 1
    broken = [g["name"] for g in report(files / "out")["gates"] if not g["holds"]]
    assert broken == ["label: cross entropy change"]


def test_threads_change_no_bit(files, monkeypatch):
    """Files are worked on beside each other, and yet every figure is that of one after the other."""
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(compare, "THREADS", threads)
        run("a.parquet", "b.parquet", "--placebo", "p.parquet", "--out", f"out{threads}")
        found.append(report(files / f"out{threads}") | {"command": "", "environment": {}})
    assert found[0] == found[1]
    assert found[0]["metrics"]["A"] != found[0]["metrics"]["B"]


def test_order_and_format_do_not_matter(files):
    assert run("a.parquet", "b.parquet", "--out", "sorted").exit_code in (0, 3)
    write(files / "b.csv", shuffled(columns(seed=10)))
    write(files / "a.csv", shuffled(columns(), 5))
    assert run("a.csv", "b.csv", "--out", "shuffled").exit_code in (0, 3)
    one, other = report(files / "sorted"), report(files / "shuffled")
    for key in ("gap", "segments", "metrics", "curves", "row_noise"):
        assert json.dumps(one[key]) == json.dumps(other[key]), key


def test_time_order_decides_the_blocks(files):
    table = columns(seeds=1)
    backwards = {n: v[::-1] for n, v in table.items()}
    write(files / "a1.parquet", table)
    write(files / "b1.parquet", columns(seeds=1, seed=10))
    write(files / "back.parquet", {n: v for n, v in backwards.items() if n != "time"})
    run("a1.parquet", "b1.parquet", "--out", "one")
    run("back.parquet", "b1.parquet", "--out", "two")
    noise = [report(files / name)["row_noise"]["one_seed"] for name in ("one", "two")]
    assert noise[0] > 0
    assert noise[0] == pytest.approx(noise[1], rel=0.5)


def test_text_ids_seeds_segments_and_times(files):
    table, other = columns(seeds=2), columns(seeds=2, seed=10)
    for t in (table, other):
        t["id"] = np.array([f"user-{i}" for i in t["id"]])
        t["seed"] = np.array([f"run {s}" for s in t["seed"]])
        t["segment"] = np.array(["new", "old", "Zürich"])[t["segment"]]
        t["time"] = np.datetime64("2024-01-01T00:00:00", "ms") + t["time"].astype("timedelta64[ms]")
    write(files / "a1.parquet", table)
    write(files / "b1.parquet", shuffled(other))
    assert run("a1.parquet", "b1.parquet", "--out", "out").exit_code in (0, 3)
    found = report(files / "out")
    assert found["seeds"] == ["run 0", "run 1"]
    assert {s["segment"] for s in found["segments"]} == {"segment new", "segment old", "segment Zürich"}
    plain = columns(seeds=2), columns(seeds=2, seed=10)
    write(files / "a2.parquet", plain[0])
    write(files / "b2.parquet", plain[1])
    run("a2.parquet", "b2.parquet", "--out", "plain")
    assert report(files / "plain")["gap"] == found["gap"]


def test_rows_of_one_file_are_left_out_and_told(files):
    write(files / "b.parquet", {n: v[5:] for n, v in columns(seed=10).items()})
    extra = columns(seed=20)
    extra["id"][-2:] = [10**6, 10**6 + 1]
    write(files / "p.parquet", extra)
    result = run("a.parquet", "b.parquet", "--placebo", "p.parquet", "--out", "out")
    assert result.exit_code in (0, 3), result.output
    notes = report(files / "out")["mismatches"]
    assert (
        notes[0]
        == "5 rows of a.parquet are not in b.parquet, left out: "
        + ", ".join(f"id {i * 7} of seed 0" for i in range(3))
        + ", ..."
    )
    assert any(n.startswith("2 rows of a.parquet are not in p.parquet") for n in notes)
    assert any(n.startswith("7 rows of p.parquet are none of the rows of a.parquet that are compared") for n in notes)
    assert report(files / "out")["rows"] == [ROWS - 5, ROWS, ROWS, ROWS - 2]
    strict = run("a.parquet", "b.parquet", "--strict", "--out", "out")
    assert strict.exit_code == 2
    assert "5 rows of a.parquet" in strict.stderr


def test_negative_sampling_is_corrected(files):
    table = columns(seeds=1)
    kept = (table["label"] > 0) | (np.arange(ROWS) % 4 == 0)
    sampled = {n: v[kept] for n, v in table.items() if n != "weight"}
    sampled["prediction"] = sampled["prediction"] / (sampled["prediction"] + (1 - sampled["prediction"]) * 0.25)
    write(files / "a1.parquet", sampled)
    run("a1.parquet", "a1.parquet", "--negative-sampling-rate", "0.25", "--out", "out")
    whole = columns(seeds=1)
    expected = metrics.normalized_entropy(
        torch.from_numpy(whole["prediction"]), torch.from_numpy(whole["label"])
    ).item()
    assert report(files / "out")["metrics"]["A"]["ne"] == pytest.approx(expected, rel=0.03)
    assert report(files / "out")["verdict"] == "pass"  # the same file twice


def test_labels_of_one_class_are_said_in_words(files):
    write(files / "a1.parquet", columns() | {"label": np.zeros(SEEDS * ROWS)})
    write(files / "b1.parquet", columns(seed=10) | {"label": np.zeros(SEEDS * ROWS)})
    result = run("a1.parquet", "b1.parquet", "--out", "out")
    assert result.exit_code == 3
    assert "hold no positive label, so NE is undefined" in " ".join(result.output.split())
    assert "nan" not in result.output.lower()


def small(**changes) -> dict:
    table = {n: v[:4] for n, v in columns(seeds=1).items()} | {"label": np.array([0.0, 1, 0, 1])}
    return {n: v for n, v in (table | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({}, None, "b.csv: no such file"),
        ({"prediction": None, "predictions": np.ones(4)}, {}, "no column 'prediction'; .*did you mean 'predictions'"),
        ({"prediction": np.array([0.1, np.nan, np.nan, 0.2])}, {}, "prediction: 2 of 4 values are NaN or missing"),
        ({"prediction": np.array([0.1, 2.5, -1, 0.2])}, {}, "2 of 4 values lie outside .0, 1.: probabilities"),
        ({"label": np.array([0, 1, 2, 3.0])}, {}, "label: 2 of 4 values lie outside"),
        ({"weight": np.array([0, -1, 2, 3.0])}, {}, "weight: 1 of 4 values are negative or not finite"),
        ({"label": np.array(["0", "1", "yes", "0"])}, {}, "column label: got 'yes' in row 3, expected a number"),
        ({}, {"label": np.array([0.0, 1, 1, 1])}, "column label: 1 of 4 values differ .* id 14: 1.0 instead of 0.0"),
        ({}, {"id": None}, "b.csv: no column 'id', which a.csv has"),
        ({}, {"id": np.arange(4) + 100}, "none of its 4 rows is in a.csv: .*; write ids alike in both, or say"),
        ({"weight": np.zeros(4)}, {"weight": np.zeros(4)}, "a.csv: column weight: all values are 0, so that no row "),
        (
            {"weight": np.array([1.0, 1, 0, 0]), "seed": np.array([0, 0, 1, 1])},
            {"weight": np.array([1.0, 1, 0, 0]), "seed": np.array([0, 0, 1, 1])},
            "a.csv: column weight: all values of seed 1 are 0, so that no row counts; give weights",
        ),
        ({}, {"weight": None}, "b.csv: no column 'weight', which a.csv has"),
        ({"id": np.array([1, 1, 2, 3])}, {"id": np.array([1, 1, 2, 3])}, "1 ids occur more than once"),
        ({}, {"id": np.arange(4) + 1000}, "none of its 4 rows is in a.csv"),
        ({"id": None}, {n: v[:3] for n, v in small(id=None, seed=None).items()} | {"id": None}, "got 3 rows"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_and_column(tmp_path, monkeypatch, a, b, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.csv", small(**({"seed": None} | a)))
    if b is not None:
        write(tmp_path / "b.csv", small(**({"seed": None} | b)))
    result = run("a.csv", "b.csv", "--out", "out")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ne-budget", "2", "--looks", "a"], "--ne-budget: got 2.0.*--looks: got 'a'"),
        (["--column", "nonsense"], "--column: got 'nonsense', expected COLUMN=NAME"),
        (["--column", "label=clicked"], "no column 'clicked'"),
        (["--column", "label=prediction"], "--column: got 'prediction' for both label and prediction"),
        (["--looks", "³"], "--looks: got '³'"),
        (["--placebo", "a.parquet"], "--placebo: a.parquet: got the predictions of a.parquet, row by row"),
        (
            ["--placebo", "p.parquet", "--placebo", "b.parquet"],
            "--placebo: b.parquet: got the predictions of b.parquet",
        ),
        (["--same-weights", "--placebo", "b.parquet"], "--placebo: with --same-weights"),
    ],
)
def test_bad_options(files, arguments, message):
    result = run("a.parquet", "b.parquet", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


def test_errors_of_a_join_name_the_column_as_the_file_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = ["--column", "id=key", "--column", "label=clicked"]

    def written(name: str, **changed: np.ndarray) -> str:
        table = small(seed=None, **changed)
        return write(tmp_path / name, {{"id": "key", "label": "clicked"}.get(c, c): v for c, v in table.items()})

    first = written("a.csv")
    twice = run(first, written("b.csv", id=np.array([1, 1, 2, 3])), *named)
    assert "b.csv: column key (id): 1 ids occur more than once" in twice.stderr
    other = run(first, written("b.csv", label=np.ones(4)), *named)
    assert re.search(r"b.csv: column clicked \(label\): \d of 4 values differ from", other.stderr), other.stderr


@pytest.mark.parametrize("out", ["taken", "taken/below/it"])
def test_out_that_is_a_file(files, out):
    (files / "taken").write_text("kept")
    result = run("a.parquet", "b.parquet", "--out", out)
    assert result.exit_code == 2
    assert "--out: got taken, which is a file, expected a directory; name another" in result.stderr
    assert (files / "taken").read_text() == "kept"


def test_files_that_are_no_tables(files):
    (files / "x.parquet").write_text("label,prediction\n")
    (files / "x.csv").write_bytes((files / "a.parquet").read_bytes())
    (files / "empty.csv").write_text("label,prediction\n")
    (files / "ragged.csv").write_text("label,prediction\n0,0.5\n1\n")
    for name, message in (
        ("x.parquet", "not a parquet file"),
        ("x.csv", "not UTF-8 text"),
        ("empty.csv", "it has no rows"),
        ("ragged.csv", "ragged.csv line 3: 1 columns, expected 2"),
    ):
        result = run(name, "a.parquet")
        assert result.exit_code == 2, name
        assert message in result.stderr


def test_other_column_names(files):
    table = columns()
    write(files / "named.parquet", {"clicked" if n == "label" else n: v for n, v in table.items()})
    result = run("named.parquet", "named.parquet", "--column", "label=clicked", "--out", "out")
    assert result.exit_code == 0, result.output


def test_parquet_without_pyarrow_says_what_to_install(files, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(compare_files.CompareError, match=r"pip install 'mxfp8-recipe\[data\]', or give CSV files"):
        compare_files.PredictionFile(files / "a.parquet")


def test_earlier_looks_cost_level(files):
    run("a.parquet", "b.parquet", "--out", "first")
    run("a.parquet", "b.parquet", "--looks", "2,3", "--out", "later")
    first, later = (report(files / name)["gap"][0]["interval"] for name in ("first", "later"))
    assert later[0] < first[0] < first[1] < later[1]


def test_a_training_under_two_seeds_is_an_error_and_a_dead_model_is_not(files):
    """Copies have no spread, so they would decide what one training cannot."""
    one = columns(seeds=1, seed=10)["prediction"]
    write(files / "copies.parquet", columns() | {"prediction": np.tile(one, SEEDS)})
    for pair in (("a.parquet", "copies.parquet"), ("copies.parquet", "b.parquet")):
        result = run(*pair, "--out", "out")
        assert result.exit_code == 2, result.output
        assert "copies.parquet: column seed: got the same predictions for 0 and 1" in result.stderr
    write(files / "dead.parquet", columns() | {"prediction": np.full(SEEDS * ROWS, 0.5)})
    assert run("a.parquet", "dead.parquet", "--out", "out").exit_code == 1


@pytest.mark.parametrize("same_weights", [False, True])
def test_seeds_with_few_and_different_rows(files, same_weights):
    for name, seed in (("a1", 0), ("b1", 10)):
        table = columns(seeds=2, seed=seed)
        rows = [*range(60), *range(ROWS, ROWS + 47)]
        write(files / f"{name}.parquet", {n: v[rows] for n, v in table.items()})
    result = run("a1.parquet", "b1.parquet", "--out", "out", *["--same-weights"] * same_weights)
    assert result.exit_code in (1, 3), result.exception
    assert report(files / "out")["rows"] == [60, 47]


def test_a_segment_that_one_seed_lacks_is_counted(files):
    for name, seed in (("a1", 0), ("b1", 10)):
        table = columns(seeds=2, seed=seed)
        keep = (table["seed"] == 0) | (table["segment"] != 1)
        write(files / f"{name}.parquet", {n: v[keep] for n, v in table.items()})
    assert run("a1.parquet", "b1.parquet", "--out", "out").exit_code == 3
    found = report(files / "out")
    assert {s["segment"] for s in found["segments"]} == {"segment 0", "segment 2"}
    assert any(line.startswith("1 segments too small") for line in found["undecided"])


def test_twice_the_budget_fails_and_the_same_file_has_no_gap(files):
    """A bias that costs 0.2 % of NE, on rows enough to see it: the gap's row noise is 0.03 %."""
    size = {"drift": 0.001, "seeds": 3, "rows": 60_000}

    def cost(harm: float) -> float:
        tables = [columns(harm=h, **(size | {"seeds": 1})) for h in (0.0, harm)]
        entropy = [metrics.log_loss(*(torch.from_numpy(t[c]) for c in ("prediction", "label"))) for t in tables]
        return float(entropy[1] / entropy[0]) - 1

    low, high = 0.0, 0.5
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) < 0.002 else (low, middle)
    for name, harm, seed in (("a1", 0.0, 0), ("b1", high, 10), ("c1", 0.0, 10)):
        table = columns(harm=harm, seed=seed, **size)
        write(files / f"{name}.parquet", {n: v for n, v in table.items() if n not in ("weight", "id")})
    outcomes = [run("a1.parquet", f"{name}1.parquet", "--out", name).exit_code for name in "abc"]
    assert report(files / "b")["gap"][0]["gap"] == pytest.approx(0.002, rel=0.05)
    assert outcomes == [0, 1, 0], report(files / "b")["reasons"]
    assert report(files / "a")["gap"][0]["gap"] == 0
    assert report(files / "a")["metrics"]["A"] == report(files / "a")["metrics"]["B"]


def test_values_in_single_precision_are_the_same_rows(files):
    table = columns(seed=10)
    write(files / "b1.parquet", table | {"weight": table["weight"].astype(np.float32)})
    assert run("a.parquet", "b1.parquet", "--out", "out").exit_code in (0, 3)
    write(files / "b1.parquet", table | {"weight": table["weight"] * 1.001})
    assert run("a.parquet", "b1.parquet", "--out", "out").exit_code == 2


def test_a_gate_names_the_segment_as_the_file_does(files):
    one = {n: v[:ROWS] for n, v in columns(drift=0.0).items() if n != "seed"}
    one["segment"] = np.array(["new", "old", "Zürich"])[one["segment"]]
    logit = np.log(one["prediction"] / (1 - one["prediction"]))
    moved = 1 / (1 + np.exp(-(logit + 0.004 * (one["segment"] == "old"))))
    write(files / "a1.parquet", one)
    write(files / "b1.parquet", one | {"prediction": moved})
    assert run("a1.parquet", "b1.parquet", "--same-weights", "--out", "out").exit_code == 1
    assert [g["detail"].rpartition(" of ")[2] for g in report(files / "out")["gates"] if not g["holds"]] == [
        "segment old"
    ]


@pytest.mark.parametrize("pair", [("a.parquet", "three.parquet"), ("three.parquet", "a.parquet")])
def test_a_seed_that_one_file_lacks_is_named(files, pair):
    write(files / "three.parquet", shuffled({n: v[ROWS:] for n, v in columns(seed=10).items()}))
    assert run(*pair, "--out", "out").exit_code in (0, 3)
    found = report(files / "out")
    assert found["seeds"] == ["1", "2", "3"]
    assert found["mismatches"][0].startswith("three.parquet has no row of 1 seed of a.parquet, left out: 0; a training")
    assert found["mismatches"][1].startswith(f"{ROWS} rows of a.parquet")
