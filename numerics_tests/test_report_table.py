"""What a plan and a report print."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mxfp8_recipe import apply_recipe, plan_recipe
from numerics_tests.test_swap import Doubled


@pytest.mark.parametrize("width", [60, 80])
def test_a_report_in_a_narrow_terminal_breaks_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 10))
    report = apply_recipe(model, example_inputs=torch.randn(2, 64))
    wide = str(report)
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(report) == wide  # a file is as wide as it needs to be
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    narrow = str(report)
    assert max(len(line) for line in narrow.splitlines() if line[0] in "┏┃┡│└├") <= width
    for text in ("LayerNorm 64 to 64: MXFP8LayerNorm", "Linear 64 to 10: left alone", "GELU: MXFP8GELU", "1x32 @ 1x32"):
        assert text in narrow
    assert narrow.splitlines()[-1] == wide.splitlines()[-1]


def test_the_report_shows_every_candidate_layer() -> None:
    """Name, old and new type, each GEMM's precision, what mixes tokens, predicted time, and reasons."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 20), Doubled(32, 32))
    report = plan_recipe(model, "mxfp8_square_activations", overrides={"0": {"wgrad": "bf16"}})
    text = str(report)
    words = ("layer", "type", "becomes", "fprop", "dgrad", "wgrad", "Linear", "MXFP8Linear", "mixes tokens", "32x32")
    assert all(word in text for word in (*words, "recipe mxfp8_square_activations", "backend reference", "bf16"))
    assert "out_features=20" in text
    assert "emulates" in text
    assert "of BF16's speed on this device, slower" in text
    assert "the faster recipe here is 'bf16'" in text
    rows = {row["fqn"]: row for row in report.to_dict()["layers"]}
    assert set(rows) >= {"0", "1", "2"}
    assert rows["0"]["gemms"]["wgrad"] == "bf16"
    assert 0 < rows["0"]["predicted_ratio"] < 1
    assert rows["1"]["predicted_ratio"] == 1
    assert rows["1"]["new_type"] is None
    assert "not a multiple of 32" in rows["1"]["reason"]
    assert rows["0"]["mixes_tokens"]
    assert "mixes tokens" not in str(plan_recipe(model))


def test_a_model_without_layers_to_convert_is_said_to_have_none() -> None:
    assert "no linear, norm, activation or attention layer: nothing changes" in str(plan_recipe(nn.Conv2d(3, 3, 3)))
