"""The pages as a browser lays them out, at the widths of a desk and of a phone; needs chromium."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from mxfp8_recipe.cli import app

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (1280, 390)
ROWS = 1200
LONG = "a_name_of_one_word_that_goes_on_and_on_without_any_place_to_break_it_" * 2

# What lies beyond the right edge, and number cells and outcomes on more lines than they have parts.
PROBE = """
<script>onload = () => {
  const found = [];
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, root = page.documentElement, broken = [];
    for (const cell of page.querySelectorAll('td:not(:first-child)')) {
      const range = page.createRange();
      range.selectNodeContents(cell);
      const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top))).size;
      if (lines > cell.textContent.split(/[- ]/).length) broken.push(cell.textContent);
    }
    found.push({beyond: root.scrollWidth - root.clientWidth, broken, cells: page.querySelectorAll('td').length});
  }
  const out = document.createElement('pre');
  out.textContent = 'found ' + JSON.stringify(found);
  document.body.append(out);
}</script>
"""


def laid_out(page: str, folder) -> list[dict]:
    """One record for each of `WIDTHS`. Frames, since a headless window is never as narrow as a phone."""
    frames = [f'<iframe style="width:{w}px;height:900px" srcdoc="{html.escape(page)}"></iframe>' for w in WIDTHS]
    (folder / "frames.html").write_text("<!doctype html>" + "".join(frames) + PROBE)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,2000", "--virtual-time-budget=3000"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder}/frames.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<pre>found (.*?)</pre>", dom)
    assert found, dom[-500:]
    return json.loads(html.unescape(found[1]))


def write(path, own: int) -> None:
    """Predictions of two trainings, in one segment whose name is one long word."""
    truth, drift = np.random.default_rng(0), np.random.default_rng(own)
    logit = truth.normal(-1, 1, ROWS)
    label = (truth.random(ROWS) < 1 / (1 + np.exp(-logit))).astype(int)
    lines = ["label,prediction,seed,segment"]
    for seed in range(2):
        predictions = 1 / (1 + np.exp(-logit - 0.05 * drift.normal(size=ROWS)))
        lines += [f"{y},{p},{seed},{LONG}" for y, p in zip(label, predictions, strict=True)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("options", [[], ["--same-weights"]])
def test_long_names_neither_widen_the_page_nor_break_figures(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.csv", 1)
    write(tmp_path / f"{LONG}.csv", 2)
    done = CliRunner().invoke(app, ["compare", "a.csv", f"{LONG}.csv", "--task", LONG, "--out", "out", *options])
    assert done.exit_code in (0, 1, 3), done.output
    page = (tmp_path / "out" / "report.html").read_text()
    for width, found in zip(WIDTHS, laid_out(page, tmp_path), strict=True):
        assert found["cells"] > 20
        assert found["beyond"] <= 0, f"{width}: {found['beyond']} px beyond the right edge"
        assert found["broken"] == [], width
