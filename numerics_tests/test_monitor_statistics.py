"""Each figure against its definition, written out again in fp64 over explicitly quantized operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, load_recipe
from mxfp8_recipe.config import LinearPrecision
from mxfp8_recipe.functional.listening import listening
from mxfp8_recipe.fused.reference import dequantize, quantize
from mxfp8_recipe.fused.spec import QuantSpec
from mxfp8_recipe.monitors.live.collector import Collector
from mxfp8_recipe.monitors.live.layer_report import pack, sites, unpack
from mxfp8_recipe.monitors.live.predictions import PredictionTracker, prediction_sums
from mxfp8_recipe.monitors.live.records import LayerStatistics, TensorStatistics
from mxfp8_recipe.monitors.live.tensor_statistics import SLAB, sample_rows
from mxfp8_recipe.monitors.metrics import calibration, log_loss, normalized_entropy
from mxfp8_recipe.mx_tensor import MXTensor, Pending
from numerics_tests.helpers import MLP

CPU = torch.device("cpu")


def collected(model: nn.Module, x: Tensor, grad: Tensor | None = None, rows: int = 1024) -> dict[str, LayerStatistics]:
    """What one forward and backward shows of every layer."""
    names = {module: name for name, module in model.named_modules()}
    collector = Collector(names, rows)
    with listening(collector):
        out = model(x)
        out.backward(torch.ones_like(out) if grad is None else grad)
    assert collector.problems == {}
    found = sites(names)
    return {layer.layer: layer for layer in unpack(pack(collector, found, CPU), found)}


def expected(x: Tensor, scale_rounding: str = "rceil", tile: str = "1x32") -> dict[str, Any]:
    """The figures of a (M, K) operand of blocks along K, from their definitions."""
    qdata, scale = quantize(x, scale_rounding=scale_rounding, tile=tile)
    byte = scale.view(torch.uint8)
    good = (byte != 255).repeat_interleave(32, 1)[:, : x.shape[1]]
    values, levels = x.double()[good], dequantize(qdata, scale, dtype=torch.float64)[good]
    largest = (2.0 ** (byte.double() - 127) * 448).repeat_interleave(32, 1)[:, : x.shape[1]][good]
    used = byte[(byte != 255) & (byte != 0)].double() - 127
    blocks = F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    healthy = blocks.isfinite().all(-1)
    nonzero = x != 0
    return {
        "amax": float(x[healthy.all(1)].abs().max()),
        "scale_min": int(used.min()),
        "scale_max": int(used.max()),
        "sqnr_db": float(10 * (values.square().sum() / (values - levels).square().sum()).log10()),
        "underflow_frac": float(((values != 0) & (levels == 0)).sum() / nonzero.sum()),
        "saturation_frac": float((values.abs() > largest).sum() / x.numel()),
        "nonfinite_blocks": int((~healthy).sum()),
        "blocks": blocks.shape[0] * blocks.shape[1],
    }


def check(found: TensorStatistics, x: Tensor, **options: str) -> None:
    for name, value in expected(x, **options).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def hard_rows(rows: int, cols: int) -> Tensor:
    """Values over many binades, with zeros, tiny and huge elements."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    x[::3, ::5] *= 2.0**-14
    x[1::7, 3] = 2.0**18
    x[2] = 0
    return x


@pytest.mark.parametrize("scale_rounding", ["rceil", "floor"])
def test_a_linear(scale_rounding: str) -> None:
    model = nn.Sequential(nn.Linear(96, 64))
    recipe = "mxfp8" if scale_rounding == "rceil" else "mxfp8_floor"
    apply_recipe(model, recipe)
    x, grad = hard_rows(50, 96).requires_grad_(), hard_rows(50, 64)
    layer = collected(model, x, grad)["0"]
    check(layer.tensors["input"], x.detach(), scale_rounding=scale_rounding)
    check(layer.tensors["weight"], model[0].weight.detach(), scale_rounding=scale_rounding)
    check(layer.tensors["grad_output"], grad, scale_rounding=scale_rounding)
    assert layer.tensors["input"].underflow_frac > 0.01
    assert (layer.tensors["input"].saturation_frac > 0) == (scale_rounding == "floor")
    for gemm, a, b in (
        ("fprop", x.detach(), model[0].weight.detach()),
        ("dgrad", grad, model[0].weight.detach().t()),
        ("wgrad", grad.t(), x.detach().t()),
    ):
        product = [dequantize(*quantize(t.contiguous(), scale_rounding=scale_rounding)).double() for t in (a, b)]
        bf16 = a.bfloat16().double() @ b.bfloat16().double().T
        error = product[0] @ product[1].T - bf16
        sqnr = float(10 * (bf16.square().sum() / error.square().sum()).log10())
        assert layer.gemm_sqnr_db[gemm] == pytest.approx(sqnr, abs=0.01)


def test_non_finite_blocks_are_counted_and_left_out() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    apply_recipe(model)
    x = hard_rows(40, 64)
    x[5, 7], x[6, 40], x[6, 41] = torch.nan, torch.inf, -torch.inf
    found = collected(model, x)["0"].tensors["input"]
    assert found.nonfinite_blocks == 2
    check(found, x)
    assert found.sqnr_db is not None
    assert math.isfinite(found.sqnr_db)


@pytest.mark.parametrize("recipe", ["mxfp8_hopper", "mxfp8_square"])
def test_coarser_tiles(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(256, 128))
    apply_recipe(model, recipe)
    precision = load_recipe(recipe).linear
    assert isinstance(precision, LinearPrecision)
    x = hard_rows(256, 256)
    layer = collected(model, x)["0"]
    input_spec, weight_spec = precision.fprop.operands  # pyright: ignore[reportAttributeAccessIssue]
    for name, tensor, spec in (("input", x, input_spec), ("weight", model[0].weight.detach(), weight_spec)):
        assert isinstance(spec, QuantSpec)
        check(layer.tensors[name], tensor, tile=spec.tile_name)


def test_sampled_rows_are_whole_slabs() -> None:
    """Of 10 slabs two are quantized again; amax and non-finite blocks are still of all rows."""
    model = nn.Sequential(nn.Linear(64, 32))
    apply_recipe(model)
    x = torch.randn(10 * SLAB + 9, 64)
    assert torch.equal(sample_rows(x, 256), torch.cat([x[:SLAB], x[5 * SLAB : 6 * SLAB]]))
    x[3 * SLAB, 0], x[4 * SLAB, 40] = 1000.0, torch.nan
    found = collected(model, x, rows=256)["0"].tensors["input"]
    assert found.amax == 1000.0
    assert found.nonfinite_blocks == 1
    assert found.blocks == 2 * len(x)
    assert found.sqnr_db == pytest.approx(expected(sample_rows(x, 256))["sqnr_db"], rel=1e-6)


def test_fused_edges_report_the_value_that_was_quantized() -> None:
    """Norm and activation hand on no high-precision tensor; the figures are those of the unfused model, edges stay."""
    torch.manual_seed(0)
    fused = MLP()
    plain = MLP()
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(40, 64)
    report = apply_recipe(fused, example_inputs=x)
    apply_recipe(plain, load_recipe("mxfp8").model_copy(update={"fuse": False}), example_inputs=x)
    assert isinstance(fused.norm(x), MXTensor)
    assert isinstance(fused.act(fused.up(x)), Pending)
    ours, theirs = collected(fused, x), collected(plain, x)
    assert ours == theirs
    assert report.unfused == {}
    check(ours["up"].tensors["input"], F.layer_norm(x, (64,)))


def test_multi_head_attention_whose_values_travel() -> None:
    """Projections hand heads on in MXFP8 and attention its output: nothing between them exists in high precision."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = Wrapped()
    apply_recipe(model)
    found = collected(model, torch.randn(3, 40, 64), torch.randn(3, 40, 64))
    assert found.keys() == {"inner", "inner.in_proj", "inner.out_proj"}
    probs, grad_scores = found["inner"].tensors["probs"], found["inner"].tensors["grad_scores"]
    assert (probs.amax, probs.scale_min, probs.scale_max) == (1.0, -8, -8)
    assert grad_scores.blocks == probs.blocks == 3 * 2 * 40 * 2
    for part, width in (("inner.in_proj", 192), ("inner.out_proj", 64)):
        tensors = found[part].tensors
        assert (tensors["input"].blocks, tensors["weight"].blocks) == (120 * 2, width * 2)
        assert tensors["grad_output"].blocks == 120 * width // 32
        assert all(25 < (db or 0) < 36 for db in found[part].gemm_sqnr_db.values()), found[part].gemm_sqnr_db


def test_attention_against_autograd_of_the_dequantized_operands() -> None:
    """P and dS under a causal mask."""

    class Owner(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    owner = Owner()
    q, grad = torch.randn(3, 2, 40, 32), torch.randn(3, 2, 40, 32)
    apply_recipe(owner, example_inputs=q)
    layer = collected(owner, q.requires_grad_(), grad)[""]
    hat = dequantize(*quantize(q.detach())).double()
    hidden = ~torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (hat @ hat.mT * 32**-0.5).masked_fill(hidden, -math.inf)
    probs = torch.exp(scores - scores.amax(-1, keepdim=True))
    levels = (probs * 256).float().to(torch.float8_e4m3fn).double() / 256
    power = probs.square().sum() / (probs - levels).square().sum()
    assert layer.tensors["probs"].sqnr_db == pytest.approx(float(10 * power.log10()), abs=0.01)
    g = dequantize(*quantize(grad)).double()
    soft, dprobs = scores.softmax(-1), g @ hat.mT
    dscores = soft * (dprobs - (soft * dprobs).sum(-1, keepdim=True))
    want = expected(dscores.float().flatten(0, 2))
    got = layer.tensors["grad_scores"]
    assert got.sqnr_db == pytest.approx(want["sqnr_db"], abs=0.01)
    assert got.amax == pytest.approx(want["amax"], rel=1e-4)


def test_predictions_against_the_metrics() -> None:
    torch.manual_seed(0)
    tracker = PredictionTracker(["ctr", "cvr"], window=2)
    kept: list[tuple[Tensor, ...]] = []
    for _ in range(4):
        logits, labels = torch.randn(300, 2) - 1, (torch.rand(300, 2) < 0.3).float()
        shadow, weights = logits + 0.05 * torch.randn(300, 2) + 0.01, torch.rand(300, 2)
        kept.append((logits.double(), shadow.double(), labels, weights))
        found = tracker.add(*prediction_sums(logits, shadow, labels, weights), 0)
    logits, shadow, labels, weights = (torch.cat(column) for column in zip(*kept))
    for side, name in ((logits, "mxfp8"), (shadow, "shadow")):
        for task in range(2):
            rows = (side.sigmoid()[:, task], labels[:, task], weights[:, task])
            windows = ((getattr(found[task], name), 0), (getattr(found[task], f"{name}_window"), 600))
            for running, start in windows:
                cut = tuple(column[start:] for column in rows)
                assert running.normalized_entropy == pytest.approx(float(normalized_entropy(*cut)), rel=1e-10)
                assert running.calibration == pytest.approx(float(calibration(*cut)), rel=1e-10)
                assert running.log_loss == pytest.approx(float(log_loss(*cut)), rel=1e-10)
    last_logits, last_shadow, y, w = kept[-1]
    error = (last_logits - last_shadow)[:, 0]
    assert found[0].logit_rms == pytest.approx(float(error.square().mean().sqrt()))
    assert found[0].logit_mean == pytest.approx(float(error.mean()))
    assert found[0].logit_max == pytest.approx(float(error.abs().max()))
    losses = [log_loss(side[:, 0].sigmoid(), y[:, 0], w[:, 0]) for side in (last_logits, last_shadow)]
    assert found[0].cross_entropy == pytest.approx(float(losses[0] - losses[1]))
    p, q = (float((w[:, 0] * side[:, 0].sigmoid()).sum()) for side in (last_logits, last_shadow))
    assert found[0].calibration == pytest.approx(p / q)


def test_rows_without_a_finite_logit_take_no_part() -> None:
    logits, labels = torch.randn(50), (torch.rand(50) < 0.5).float()
    broken = logits.clone()
    broken[3], broken[4] = torch.nan, torch.inf
    keep = torch.ones(50, dtype=torch.bool)
    keep[3:5] = False
    (got,) = PredictionTracker(None, 1).add(*prediction_sums(broken, logits, labels, None), 0)
    (want,) = PredictionTracker(None, 1).add(*prediction_sums(logits[keep], logits[keep], labels[keep], None), 0)
    assert got.model_copy(update={"rows": want.rows}) == want
    assert got.rows == 48
