"""The report: every promised key, valid JSON, one self-contained page, and honest words for a run cut short."""

import dataclasses
import html
import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from rich.console import Console

from mxfp8_recipe.ab import tables
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.environment import command_line
from mxfp8_recipe.ab.html import render, write_html
from mxfp8_recipe.ab.report import build_report, write_json
from mxfp8_recipe.ab.runner import ABRun, Runner
from mxfp8_recipe.ab.terminal import print_report
from mxfp8_recipe.monitors.verdict import Evidence, TaskGaps, decide

METRICS = {"ne", "ne_windowed", "calibration", "ne_calibration_free", "log_loss", "auc"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ABRun:
    config = ABConfig.parse(data="ab_tiny:data", model="ab_tiny:model", batch_size=200, seeds=2, device="cpu")
    return Runner(config, tmp_path_factory.mktemp("run")).run()


@pytest.fixture(scope="module")
def report(run) -> dict:
    return build_report(run)


def terminal(report: dict, width: int = 150) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    return console.file.getvalue()


def test_every_promised_key_is_there_and_json_is_strict(report, tmp_path):
    write_json(report, tmp_path / "report.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert read == report
    assert read["verdict"] in ("pass", "fail", "inconclusive")
    assert read["reasons"]
    assert read["budget"] == 0.001
    assert set(read["arms"]) == {"bf16", "mxfp8", "fp32", "bf16_init_noise"}
    for tasks in read["arms"].values():
        assert set(tasks) == {"ctr", "cvr"}
        assert all(tasks[task].keys() >= METRICS for task in tasks)
    for task in ("ctr", "cvr"):
        assert read["delta"][task].keys() >= {"ne_relative", "ne_interval", "calibration"}
        assert len(read["placebo"][task]["ne_relative"]) == 4
    assert read["same_weights"].keys() >= {"logit_rms", "logit_mean", "grad_cosine", "layers"}
    assert set(read["power"]) == {"ne_resolvable", "rows_needed", "seeds_needed"}
    assert any(layer["new_type"] for layer in read["plan"])
    assert read["environment"]["torch"]
    assert read["command"]


def test_numbers_are_those_of_the_run(run, report):
    served = [run.results.arms[s, "mxfp8"].task("ctr").served for s in (0, 1)]
    base = [run.results.arms[s, "bf16"].task("ctr").served for s in (0, 1)]
    assert report["arms"]["mxfp8"]["ctr"]["ne"] == pytest.approx(sum(m.ne for m in served) / 2, rel=1e-15)
    gaps = [m.ne / b.ne - 1 for m, b in zip(served, base)]
    assert report["delta"]["ctr"]["ne_relative_per_seed"] == gaps
    assert report["delta"]["ctr"]["ne_relative"] == pytest.approx(sum(gaps) / 2, rel=1e-12)
    low, high = report["delta"]["ctr"]["ne_interval"]
    assert low < report["delta"]["ctr"]["ne_relative"] < high
    calibration = sum(m.calibration - b.calibration for m, b in zip(served, base)) / 2
    assert report["delta"]["ctr"]["calibration"] == pytest.approx(calibration, rel=1e-12)
    trained = run.results.arms[0, "mxfp8"].task("ctr").trained
    assert trained != served[0]


class Page(HTMLParser):
    """Collects what a self-contained page must not have, and checks that tags close."""

    VOID = ("meta", "br", "link", "img", "path", "use")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_self_contained_and_says_the_verdict_first(report, tmp_path):
    write_html(report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert page.tags.count("svg") == 2 * 2 + 1
    assert 'name="viewport"' in text
    body = text[text.index("<h1>") :]
    assert report["headline"] in body[:200]
    assert all(reason in html.unescape(body) for reason in report["reasons"])
    assert "Bayes-optimal NE of the held-out rows is 0.90000" in body
    for heading in ("What is decided", "What is not", "Same weights, same rows", "Plan", "How to repeat this"):
        assert f"<h2>{heading}</h2>" in body


def test_every_cell_has_its_label_for_narrow_screens(report):
    text = render(report)
    assert len(re.findall(r"<td\b", text)) == len(re.findall(r"<td data-label=", text)) > 100


def test_text_from_outside_is_escaped(report):
    hostile = json.loads(json.dumps(report))
    hostile["data"]["notes"] = ["<script>alert(1)</script>"]
    assert "<script>" not in render(hostile)


def test_terminal_ends_with_the_verdict(report):
    text = terminal(report)
    assert report["verdict"].upper() in text
    assert "served in BF16" in text
    assert "Bayes-optimal" in text
    assert text.rstrip().splitlines()[-1].startswith("  - ")
    assert terminal(report, width=40)


def test_interrupted_before_anything_was_measured(run):
    run = dataclasses.replace(run, results=type(run.results)(run.results.directory))
    empty = Evidence(
        gaps=tuple(TaskGaps(task=t, mxfp8=()) for t in ("ctr", "cvr")),
        same_weights=(),
        rows=0,
        interrupted="interrupted: 0 of 2 seeds have both twins",
    )
    report = build_report(dataclasses.replace(run, decision=decide(empty)))
    assert report["verdict"] == "inconclusive"
    assert report["reasons"] == ["interrupted: 0 of 2 seeds have both twins"]
    assert report["delta"]["ctr"]["ne_relative"] is None
    assert "interrupted" in render(report)
    assert "INCONCLUSIVE" in terminal(report)


def test_one_seed_has_no_interval_and_says_so(run):
    results = type(run.results)(run.results.directory)
    results.arms = {key: value for key, value in run.results.arms.items() if key[0] == 0}
    results.same_weights = {0: run.results.same_weights[0]}
    gaps = tuple(TaskGaps(task=t, mxfp8=results.gaps(t)[0], placebos=results.gaps(t)[1]) for t in ("ctr", "cvr"))
    decision = decide(Evidence(gaps=gaps, same_weights=tuple(results.same_weights.values()), rows=1500))
    report = build_report(dataclasses.replace(run, results=results, decision=decision))
    assert report["delta"]["ctr"]["ne_interval"] == [None, None]
    assert math.isfinite(report["delta"]["ctr"]["ne_relative"])
    assert "one seed has no spread" in render(report)
    assert "rows of one class" not in render(report)


def test_segments_and_shift_sources_are_shown(report):
    shown = json.loads(json.dumps(report))
    shown["segments"] = [
        {"task": "ctr", "segment": f"segment {i}", "outcome": "pass", "rows": 5000, "positives": 400.0, "gap": gap,
         "interval": [gap - 1e-4, gap + 1e-4], "confidence": "92 %", "resolves": 5e-4}
        for i, gap in enumerate((1e-4, -9e-4))
    ]  # fmt: skip
    layers = [{"layer": "head", "alone": 0.004}, {"layer": "top.0", "alone": -0.001}]
    shown["shift_sources"] = [{"task": "ctr", "seed": 0, "rows": 1024, "shift": 0.005, "layers": layers}]
    page, text = render(shown), terminal(shown)
    for seen in (page, text):
        assert seen.index("segment 1") < seen.index("segment 0"), "worst first"
        assert "+0.0040" in seen
        assert "head" in seen
    assert "Where the mean logit error comes from" in page
    assert "Worst layers" in page


def test_the_interval_says_its_level(report):
    assert report["delta"]["ctr"]["confidence"] == "95 %"  # two seeds: half of the level is spent
    assert "95 % interval" in render(report)
    low, high = report["delta"]["ctr"]["calibration_interval"]
    assert low < report["delta"]["ctr"]["calibration_relative"] < high


def test_labels_of_one_class_are_said_in_words(tmp_path):
    """No figure, no interval and no advice is NaN, and nobody is told to use more seeds."""
    config = ABConfig.parse(data="ab_tiny:one_class", model="ab_tiny:model", batch_size=200, seeds=2, device="cpu")
    found = build_report(Runner(config, tmp_path).run())
    for text in (render(found), terminal(found)):
        assert not re.search(r"\bnan\b", text)
        assert "undefined" in text
        assert "one seed" not in text
        assert "NE is undefined on rows of one class" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_is_broken_over_lines(report, width):
    """Tables too wide for the terminal are lists; lines of text are left to it."""
    text = terminal(report, width)
    for name in ("logit RMS error", "bf16_init_noise"):
        assert name in text
    cells = [*tables.delta(report).rows, *tables.arms(report, "ctr").rows, *tables.gates(report).rows]
    for value in (cell for row in cells for cell in row[:-1]):
        assert value in text
    assert max(map(len, (line for line in text.splitlines() if line[:1] in "┏┃┡│└├┌"))) <= width


def test_brackets_and_colons_of_a_users_names_are_kept(report):
    renamed = {**report, "gates": [{**report["gates"][0], "name": "ctr:boom: [red]"}]}
    assert "ctr:boom: [red]" in terminal(renamed)


@pytest.mark.parametrize(
    ("module", "script", "expected"),
    [
        (None, "/usr/bin/mxfp8", "mxfp8 ab --out 'a b'"),
        ("mxfp8_recipe.cli", "/x/mxfp8_recipe/cli.py", "python -m mxfp8_recipe.cli ab --out 'a b'"),
        ("package.__main__", "/x/package/__main__.py", "python -m package ab --out 'a b'"),
    ],
)
def test_the_command_is_the_one_to_type(monkeypatch, module, script, expected):
    main = SimpleNamespace(__spec__=None if module is None else SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [script, "ab", "--out", "a b"])
    assert command_line() == expected
