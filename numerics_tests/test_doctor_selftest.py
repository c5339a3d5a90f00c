"""The self-test finds what is wrong, says what it cannot reach, and its exit code is its verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mxfp8_recipe import selftest, selftest_attention, selftest_gemms
from mxfp8_recipe.cli import app
from mxfp8_recipe.fused.spec import QuantSpec
from mxfp8_recipe.selftest import Outcome
from mxfp8_recipe.selftest_places import INTERPRETER, Place

CPU = Place("reference", "cpu")
NATURAL = QuantSpec()
OPS = {
    "norm_quantize": lambda: selftest.check_norm(CPU, "rms", NATURAL),
    "norm_backward": lambda: selftest.check_norm(CPU, "layer", NATURAL),
    "activation_quantize": lambda: selftest.check_activation(CPU, "gelu", NATURAL),
    "activation_backward": lambda: selftest.check_activation(CPU, "swiglu", NATURAL),
    "quantize": lambda: selftest_gemms.check_linear(CPU, "mxfp8_hopper"),
    "gemm": lambda: selftest_gemms.check_linear(CPU, "mxfp8"),
    "gemm_epilogue": lambda: selftest_gemms.check_epilogues(CPU),
    "gemm_dact": lambda: selftest_gemms.check_dact(CPU),
    "jagged_forward": lambda: selftest_attention.check_jagged(CPU, "full"),
    "jagged_backward": lambda: selftest_attention.check_jagged(CPU, "causal"),
    "generalized_forward": lambda: selftest_attention.check_generalized(CPU, "gelu"),
    "generalized_backward": lambda: selftest_attention.check_generalized(CPU, "silu"),
    "block_forward": lambda: selftest_attention.check_blocks(CPU, 64),
    "block_backward": lambda: selftest_attention.check_blocks(CPU, 32),
}


def plant(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Any], Any]) -> None:
    """Make one op of the backend under test return something else."""
    genuine = Place.op

    def planted(self: Place, name: str) -> Callable[..., Any]:
        found = genuine(self, name)
        return (lambda *args, **kwargs: change(found(*args, **kwargs))) if name == op else found

    monkeypatch.setattr(Place, "op", planted)


def flipped(output: Any) -> Any:
    """One bit of the last large output, wrong: for qdata, scales and sums alike."""
    outputs = [output] if isinstance(output, torch.Tensor) else list(output)
    at = max((i for i, x in enumerate(outputs) if x.numel() > 1), default=0)
    wrong = outputs[at].clone()
    if wrong.is_floating_point():
        wrong.view(-1)[5] = wrong.view(-1)[5] * 1.5 + 1e4
    else:
        wrong.view(-1)[5] ^= 1
    outputs[at] = wrong
    return outputs[0] if isinstance(output, torch.Tensor) else tuple(outputs)


def failures(measures: Any) -> list[str]:
    return [unit for unit, error, bound in measures if not error <= bound]


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_bit_of_any_op_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(OPS[op]()) == []
    plant(monkeypatch, op, flipped)
    assert failures(OPS[op]())


def test_a_gemm_that_multiplies_without_a_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "gemm", lambda out: out * (1 + 2.0**-4))
    assert failures(selftest_gemms.check_linear(CPU, "mxfp8")).count("relative to the exact sums") == 3


def test_a_recipe_that_quantizes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(selftest.check_block(CPU, "mxfp8")) == []
    genuine = selftest._step
    monkeypatch.setattr(selftest, "_step", lambda name, variant, x: genuine(name, "bf16", x))
    assert failures(selftest.check_block(CPU, "mxfp8")) == ["nothing quantized"]


def test_the_format_s_facts_hold_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(selftest.check_format(CPU)) == []
    genuine = selftest.reference.quantize
    monkeypatch.setattr(selftest.reference, "quantize", lambda x: genuine(x, scale_rounding="floor"))
    assert failures(selftest.check_format(CPU)) == ["scale bytes", "representable values lost"]


def test_the_worst_of_each_unit_is_kept_and_nan_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measures(place: Place) -> Any:
        yield "a", 0.5, 1.0
        yield "a", math.nan, 1.0
        yield "a", 0.7, 1.0
        yield "b", 0.0, 0.0

    def broken(place: Place) -> Any:
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(selftest, "checks", lambda place: {"x": measures, "y": broken})
    first, second = selftest.run_one("x", CPU)
    assert math.isnan(first.error)
    assert (first.passed, second.passed) == (False, True)
    (raised,) = selftest.run_one("y", CPU)
    assert not raised.passed
    assert raised.note == "RuntimeError: no such kernel"


@pytest.mark.parametrize(("error", "code"), [(0.0, 0), (2.0, 1)])
def test_the_exit_code_is_the_verdict(error: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda place, jobs, only: [Outcome("norm", error, 1.0, "units")])
    shown = CliRunner().invoke(app, ["doctor", "--selftest"])
    assert shown.exit_code == code
    assert ("FAIL" in shown.output) == bool(code)
    assert f"1 results, {code} failed." in shown.output
    told = CliRunner().invoke(app, ["doctor", "--selftest", "--json"])
    assert told.exit_code == code
    assert json.loads(told.output)[0]["passed"] == (not code)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("pip install triton" in line for line in selftest.missing(CPU))
    (line, *_) = selftest.missing(Place(INTERPRETER, "cpu"))
    assert line.startswith("No GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert selftest.here().device == "cpu"


def test_every_core_op_has_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU's backend each op that it must have is called by some check."""
    called: set[str] = set()
    genuine = Place.op
    monkeypatch.setattr(Place, "op", lambda self, name: called.add(name) or genuine(self, name))
    for check in OPS.values():
        list(check())
    blocks = {"quantize_and_sum", "matmul"}  # by the blocks, whose fused and unfused forms call them
    assert called | blocks >= {*selftest.CORE_OPS, *selftest.EPILOGUE_OPS, *selftest.JAGGED_OPS}


def test_a_check_runs_interpreted_in_a_process_of_its_own() -> None:
    pytest.importorskip("triton")
    outcomes = selftest.run(Place(INTERPRETER, "cpu"), jobs=1, only="activation relu 1x32")
    assert {outcome.unit for outcome in outcomes} >= {"units in the last place", "bytes unlike quantize"}
    assert all(outcome.passed for outcome in outcomes), outcomes
    with pytest.raises(ValueError, match="expected part of one of"):
        selftest.run(CPU, only="nothing like it")


@pytest.mark.gpu
def test_this_gpu_passes() -> None:
    outcomes = selftest.run(selftest.here())
    assert all(outcome.passed for outcome in outcomes), [o for o in outcomes if not o.passed]
