"""The zoo: models of every make under one line, trained a step and given back."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from examples import zoo
from examples.zoo_models import ZOO, Entry
from mxfp8_recipe import apply_recipe
from numerics_tests import blocks
from numerics_tests.blocks import fused_producers

LEAST = {
    "nn.TransformerEncoder, post-norm, ReLU": (1.0, 7), "nn.TransformerEncoder, pre-norm, GELU": (1.0, 8),
    "nn.Transformer": (1.0, 8), "DLRM": (0.98, 2), "DCNv2": (0.99, 1), "gem-small": (0.98, 14), "DeepFM": (0.99, 1),
    "MMoE": (0.97, 5), "HSTU-style": (0.99, 2), "LSTM tower": (0.99, 2), "BERT": (0.99, 8), "RoBERTa": (0.99, 8),
    "Llama": (1.0, 6), "Qwen3": (1.0, 6), "Gemma": (1.0, 6), "Mixtral": (1.0, 2), "GPT-2": (1.0, 6), "T5": (1.0, 15),
    "T5 v1.1, gated GELU": (1.0, 15), "ViT": (0.99, 8), "ViT (timm)": (0.99, 6), "MLP-Mixer (timm)": (0.99, 6),
    "ConvNeXt (timm)": (0.99, 8), "Llama with LoRA (PEFT)": (0.9, 6),
}  # fmt: skip
"""Least share of linear FLOPs in MXFP8 and fewest fused edges."""


def entries() -> list[pytest.param]:
    """Every model, those whose library is missing skipped by name."""
    found = []
    for entry in ZOO:
        lacks = zoo.missing(entry)
        reason = f"needs {lacks}: pip install 'mxfp8-recipe[zoo]'"
        found.append(pytest.param(entry, id=entry.name, marks=[pytest.mark.skipif(bool(lacks), reason=reason)]))
    return found


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def test_every_model_has_an_expectation() -> None:
    assert set(LEAST) == {entry.name for entry in ZOO}


@pytest.mark.parametrize("entry", entries())
def test_the_script_finds_no_problem(entry: Entry) -> None:
    """Finite, near the original's loss, quantized, copied and given back exactly; as much in MXFP8 as listed."""
    row = zoo.visit(entry)
    assert row.problems == ()
    share, edges = LEAST[entry.name]
    assert row.share >= share
    assert row.fused >= edges
    assert row.name in zoo.markdown([row], "mxfp8")


def cast(value: object, dtype: torch.dtype) -> object:
    """Floating inputs in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return {k: cast(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def step(model: nn.Module, inputs: object, autocast: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        out = zoo.call(model, inputs)  # pyright: ignore[reportArgumentType]
    torch.stack([(t.float() - 0.3).square().mean() for t in out if t.requires_grad]).sum().backward()
    return [t.detach() for t in out], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def in_precisions() -> list[pytest.param]:
    """Every model in every precision it takes: the click models' dense features are fp32 by contract."""
    found = []
    for param in entries():
        halves = () if param.id in ("DLRM", "DCNv2", "gem-small") else ("bf16", "fp16")
        for precision in ("fp32", "autocast", *halves):
            found.append(pytest.param(*param.values, precision, id=f"{param.id}-{precision}", marks=param.marks))
    return found


@pytest.mark.parametrize(("entry", "precision"), in_precisions())
def test_fused_equals_unfused_and_first_forward_equals_itself(entry: Entry, precision: str) -> None:
    """Bitwise, outputs and gradients, with the original's dtypes, no edge ended; evaluation after training too."""
    torch.manual_seed(0)
    plain, inputs = entry.build()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is not None:
        plain.to(dtype)
        inputs = cast(inputs, dtype)
    autocast = precision == "autocast"
    model, stored, later = (copy.deepcopy(plain) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        report = apply_recipe(model, example_inputs=inputs)
        apply_recipe(stored, blocks.unfused(), example_inputs=inputs)
    apply_recipe(later)
    original, ours, theirs = (step(m, inputs, autocast) for m in (plain, model, stored))
    assert [t.dtype for t in ours[0]] == [t.dtype for t in original[0]]
    assert ours[1].keys() == original[1].keys()
    first, second = step(later, inputs, autocast), step(later, inputs, autocast)
    for a, b in ((ours, theirs), (second, first)):
        assert zoo.same(a[0], b[0])
        assert a[1].keys() == b[1].keys()
        assert all(torch.equal(a[1][name], b[1][name]) for name in b[1])
    with torch.no_grad():
        for module in (model, stored):
            module.eval()
        assert zoo.same(zoo.call(model, inputs), zoo.call(stored, inputs))  # pyright: ignore[reportArgumentType]
    assert report.unfused == {}
    assert fused_producers(report)
