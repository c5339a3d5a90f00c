"""Ops of GEMMs with an epilogue: the steps after a projection, and the derivative of an activation after a dgrad.

What follows the sum crosses an op as the text of an `Epilogue` or a `Dact`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..fused.gemm.dact import Dact
from ..fused.gemm.epilogue import Epilogue, Rotation, interleave, interleave_scale, interleaved_tile
from ..fused.reference_ops import GATED_KINDS
from ..fused.spec import BLOCK
from .gemm import operand
from .library import define, fake_quantized, without_padding
from .table import layout, resolve

PLAIN = Epilogue().encode()
"""No step at all: the sum is rounded and stored."""


def _gemm_epilogue(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    gate: list[Tensor],
    residual: Tensor | None,
    rotation: list[Tensor],
    epilogue: str,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, ...]:
    run, steps = resolve("gemm_epilogue", backend, a.device), Epilogue.decode(epilogue)
    (a_dtype, a_tile), (b_dtype, b_tile) = operand(a_spec), operand(b_spec)
    if steps.gated:
        rows, blocks, swizzled = b.shape[0], -(-b.shape[1] // BLOCK), layout(backend, a.device).swizzled
        b, b_scale = (
            interleave(gate[0], b, steps.group),
            interleave_scale(gate[1], b_scale, rows, blocks, steps.group, swizzled=swizzled),
        )
        bias = None if bias is None else interleave(gate[2], bias, steps.group)
        b_tile = interleaved_tile(b_tile, steps.group)
    return run(
        a.view(a_dtype), a_scale, b.view(b_dtype), b_scale, bias, residual, epilogue=steps,
        rotation=Rotation(*rotation) if rotation else None, out_dtype=out_dtype, a_tile=a_tile, b_tile=b_tile,
    )  # fmt: skip


def _gemm_epilogue_fake(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None,
    gate: list[Tensor],
    residual: Tensor | None,
    rotation: list[Tensor],
    epilogue: str,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, ...]:
    steps, rows, cols = Epilogue.decode(epilogue), a.shape[0], b.shape[0]
    asked = steps.emit_high, steps.emit_sum, steps.emit_sum and steps.gated
    highs = (a.new_empty((rows, cols) if wanted else 0, dtype=out_dtype) for wanted in asked)
    row, col = (spec.encode() if spec else "" for spec in (steps.rowwise, steps.colwise))
    return *highs, *fake_quantized(a, row, col, rows, cols, layout(backend, a.device))


gemm_epilogue = define(
    "gemm_epilogue(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor? bias,"
    " Tensor[] gate, Tensor? residual, Tensor[] rotation, str epilogue, ScalarType out_dtype, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gemm_epilogue,
    _gemm_epilogue_fake,
)
"""`fused.gemm.epilogue.gemm_epilogue`; for a gated activation `b` and `bias` are up's and `gate` the other layer's
qdata, scale and, where there is one, bias, which are interleaved here."""


def _gemm_dact(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    z: Tensor,
    gate: Tensor | None,
    epilogue: str,
    out_dtype: torch.dtype,
    y_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, ...]:
    run = resolve("gemm_dact", backend, a.device)
    (a_dtype, a_tile), (b_dtype, b_tile) = operand(a_spec), operand(b_spec)
    out = run(
        a.view(a_dtype), a_scale, b.view(b_dtype), b_scale, z, gate, epilogue=Dact.decode(epilogue),
        out_dtype=out_dtype, y_dtype=y_dtype, a_tile=a_tile, b_tile=b_tile,
    )  # fmt: skip
    laid, none = layout(backend, z.device), z.new_empty(0, dtype=torch.uint8)
    of_z, of_gate, act = (
        without_padding(one, z.shape[0], laid) for one in (out[4:8], out[8:12], (none, none, *out[12:]))
    )
    return out[0].contiguous(), out[1].contiguous(), *out[2:4], *of_z, *of_gate, *act[2:]


def _gemm_dact_fake(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    z: Tensor,
    gate: Tensor | None,
    epilogue: str,
    out_dtype: torch.dtype,
    y_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, ...]:
    steps, laid = Dact.decode(epilogue), layout(backend, a.device)
    row, col, act = (spec.encode() if spec else "" for spec in (steps.rowwise, steps.colwise, steps.act_colwise))
    shape, both = tuple(z.shape), gate is not None
    highs = (z.new_empty(shape if steps.emit_high and there else 0) for there in (True, both))
    sums = (z.new_empty(shape[1] if steps.emit_bias and there else 0, dtype=torch.float32) for there in (True, both))
    padded: dict[str, Any] = {"layout": laid, "row_bytes": laid.row_bytes}
    of_z = fake_quantized(z, row, col, **padded)
    of_gate = fake_quantized(z, *((row, col) if both else ("", "")), **padded)
    features = shape[1] // 2 if steps.activation in GATED_KINDS and not both else shape[1]
    return *highs, *sums, *of_z, *of_gate, *fake_quantized(z, "", act, shape[0], features, **padded)[2:]


gemm_dact = define(
    "gemm_dact(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor z, Tensor? gate,"
    " str epilogue, ScalarType out_dtype, ScalarType y_dtype, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,"
    " Tensor)",
    _gemm_dact,
    _gemm_dact_fake,
)
"""`fused.gemm.dact.gemm_dact`."""


@register_flop_formula(torch.ops.mxfp8_recipe.gemm_epilogue)
def _gemm_epilogue_flops(
    a: Any, a_scale: Any, a_spec: str, b: Any, b_scale: Any, b_spec: str, bias: Any, gate: Any, *args: Any,
    out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * a[0] * a[1] * b[0] * (2 if gate else 1)


@register_flop_formula(torch.ops.mxfp8_recipe.gemm_dact)
def _gemm_dact_flops(
    a: Any, a_scale: Any, a_spec: str, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:  # fmt: skip
    return 2 * a[0] * a[1] * b[0]
