"""Checks of the GEMM kernels: their sums within the error these can have, the steps in their epilogues against kernels
that do those alone, to the byte.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .backends.table import Kernel
from .config import BF16, LinearPrecision
from .fused import reference, reference_ops
from .fused.spec import QuantSpec
from .recipe_files import load_recipe
from .selftest_places import ACTIVATIONS, INTERPRETER, SPECS, Measures, Place, differing, randn, relative


def check_linear(place: Place, name: str) -> Measures:
    """The operands of a recipe's three GEMMs to the byte, and the products within the error of their sums."""
    linear = load_recipe(name).linear
    assert isinstance(linear, LinearPrecision)
    for m, n, k in ((33, 64, 96),) if place.small else ((300, 256, 1024), (1000, 512, 384), (20000, 512, 512)):
        x, weight, grad = randn(place, m, k), randn(place, n, k), randn(place, m, n)
        pairs = {
            "fprop": ((x, -1, "input"), (weight, -1, "weight")),
            "dgrad": ((grad, -1, "grad_output"), (weight, -2, "weight")),
            "wgrad": ((grad, -2, "grad_output"), (x, -2, "input")),
        }
        for gemm, operands in pairs.items():
            precision = getattr(linear, gemm)
            if precision == BF16:
                continue
            specs = [getattr(precision, operand) for _, _, operand in operands]
            quantized = []  # what the GEMM reads, and the same bytes in the plain layout
            for stream, ((value, axis, _), spec) in enumerate(zip(operands, specs)):
                seed = torch.tensor(20_240, device=place.device)
                directions = (spec, None) if axis == -1 else (None, spec)
                found = place.op("quantize")(value, *directions, seed=seed, stream=stream)
                expected = reference_ops.quantize_both(value, *directions, seed=seed, stream=stream, **place.layout)
                yield "bytes unlike the reference", differing(expected, tuple(found)), 0.0
                plain = reference_ops.quantize_both(value, *directions, seed=seed, stream=stream)
                at = 0 if axis == -1 else 2
                quantized.append(((found[at].view(spec.elem.dtype), found[at + 1]), (plain[at], plain[at + 1])))
            if place.backend == INTERPRETER:
                continue  # the GEMM has a check of its own there
            ((a, a_scale), a_plain), ((b, b_scale), b_plain) = quantized
            out = place.op("gemm")(
                a, a_scale, b, b_scale, None, out_dtype=torch.float32, a_tile=specs[0].tile, b_tile=specs[1].tile
            )
            yield from _of_sum(out, a_plain, b_plain, specs)


def check_portable(place: Place) -> Measures:
    """`tl.dot_scaled` on plain scales."""
    gemm = Kernel("gemm.portable", "gemm").load()
    for m, n, k in ((33, 64, 96), (130, 96, 160)) if place.small else ((300, 256, 1024), (77, 96, 160)):
        specs = [SPECS["1x32"]] * 2
        a, b = (reference_ops.quantize_both(randn(place, rows, k), specs[0], None) for rows in (m, n))
        bias = torch.randn(n, device=place.device)
        out = gemm(a[0].view(specs[0].elem.dtype), a[1], b[0].view(specs[0].elem.dtype), b[1], bias)
        yield from _of_sum(out, a, b, specs, bias)


def check_epilogues(place: Place) -> Measures:
    """The sum of the kernel with epilogues, and each later step against the kernels that do it alone."""
    from .fused.gemm.epilogue import Epilogue, finish, interleave

    run_kernel, act = place.op("gemm_epilogue"), place.op("activation_quantize")
    spec = SPECS["1x32"]
    swizzled = {"swizzled": place.layout["swizzled"]}
    for m, n, k in ((130, 96, 160),) if place.small else ((300, 256, 1024), (1000, 480, 384)):
        a, b, c = (reference_ops.quantize_both(randn(place, rows, k), spec, None) for rows in (m, n, n))
        left, up, gate = ((q.view(spec.elem.dtype), scale) for q, scale, *_ in (a, b, c))
        bias = torch.randn(n, device=place.device)
        out = run_kernel(*left, *up, bias, epilogue=Epilogue(), out_dtype=torch.float32)[0]
        yield from _of_sum(out, a, b, [spec, spec], bias)
        residual = torch.randn(m, n).to(place.device, torch.bfloat16)
        for kind in ("relu",) if place.small else reference_ops.PLAIN_KINDS:
            epilogue = Epilogue(activation=kind, rowwise=spec, emit_sum=True)
            y, z, _, *quantized = run_kernel(*left, *up, bias, residual, epilogue=epilogue)
            alone = act(z, None, kind, z.dtype, None, None, True)[0]
            expected = finish(alone, residual, epilogue=Epilogue(rowwise=spec), **swizzled)
            yield "elements unlike separate steps", float((y != expected[0]).sum()), 0.0
            yield "bytes unlike quantize", differing(expected[3:], tuple(quantized)), 0.0
        pair = interleave(gate[0], up[0]), interleave(gate[1], up[1]), interleave(bias, bias)
        alone = [run_kernel(*left, *w, bias, epilogue=Epilogue())[0] for w in (up, gate)]
        for kind in ("swiglu",) if place.small else reference_ops.GATED_KINDS:
            epilogue = Epilogue(activation=kind, rowwise=spec, emit_sum=True)
            y, *sums, qdata, scale, _, _ = run_kernel(*left, *pair, epilogue=epilogue)
            yield "elements unlike two layers", sum(float((x != z).sum()) for x, z in zip(sums, alone)), 0.0
            product = act(*sums, kind, y.dtype, None, None, True)[0]
            expected = finish(product, epilogue=Epilogue(rowwise=spec), **swizzled)
            yield "elements of a product unlike separate steps", float((y != product).sum()), 0.0
            yield "bytes of a product unlike quantize", differing(expected[3:5], (qdata, scale)), 0.0


def check_dact(place: Place) -> Measures:
    """The derivative in dgrad's epilogue against the GEMM and the kernel that takes it alone."""
    from .fused.gemm.dact import Dact

    run_kernel, multiply, apart = (place.op(name) for name in ("gemm_dact", "gemm", "activation_backward"))
    shapes = ((48, 64, 96),) if place.small else ((304, 256, 1024), (1008, 480, 384))
    for (m, n, k), spec in itertools.product(shapes, (SPECS["1x32"], SPECS["1x128"])):
        a, b = (reference_ops.quantize_both(randn(place, rows, k), spec, None) for rows in (m, n))
        operands = a[0].view(spec.elem.dtype), a[1], b[0].view(spec.elem.dtype), b[1]
        tiles = {"a_tile": spec.tile, "b_tile": spec.tile}
        z, gate = torch.randn(2, m, n).to(place.device, torch.bfloat16)
        grad = multiply(*operands, out_dtype=torch.bfloat16, **tiles)
        for kind in (*reference_ops.PLAIN_KINDS, "swiglu"):
            other = gate if kind == "swiglu" else None
            dact = Dact(activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_bias=True)
            out = run_kernel(*operands, z, other, epilogue=dact, **tiles)
            expected = apart(grad, z, other, kind, spec, spec, True, spec, out_dtype=z.dtype)
            yield "elements unlike separate steps", float((out[0] != expected[0]).sum()), 0.0
            yield "bias sums unlike separate steps", float((out[2] != expected[2]).sum()), 0.0
            yield "bytes unlike separate steps", differing(*(_whole(of[4:], m) for of in (expected, out))), 0.0


def check_hopper_epilogues(place: Place) -> Measures:
    """Hopper's kernels on the tiles of the fast recipe, where they do all that they can, against separate kernels."""
    from .fused.gemm import apart
    from .fused.gemm.dact import Dact
    from .fused.gemm.epilogue import Epilogue, interleave, interleaved_tile

    names = ("gemm_epilogue", "gemm_dact", "gemm", "activation_backward")
    forward, backward, multiply, differentiate = (place.op(name) for name in names)
    spec, weight = SPECS["1x128"], QuantSpec(tile=(128, 128))
    tiles, paired = ({"a_tile": spec.tile, "b_tile": tile} for tile in (weight.tile, interleaved_tile(weight.tile)))
    layout: dict[str, Any] = {"rotation": None, "swizzled": False, "pad_tokens": 1}
    for m, n, k in ((20004, 352, 1056), (20000, 512, 2048)):
        x, up, gate = (
            (q.view(spec.elem.dtype), scale)
            for q, scale, *_ in (
                reference_ops.quantize_both(randn(place, rows, k), of, None)
                for rows, of in ((m, spec), (n, weight), (n, weight))
            )
        )
        bias = torch.randn(n, device=place.device)
        z, other = (multiply(*x, *w, bias, out_dtype=torch.bfloat16, **tiles) for w in (up, gate))
        pair = interleave(gate[0], up[0]), interleave(gate[1], up[1]), interleave(bias, bias)
        for kind in ACTIVATIONS:
            steps, gated = Epilogue(activation=kind, rowwise=spec, emit_sum=True), kind in reference_ops.GATED_KINDS
            given = pair if gated else (*up, bias)
            out = forward(*x, *given, epilogue=steps, **(paired if gated else tiles))
            expected = apart.finish(z, None, gate=other if gated else None, epilogue=steps, **layout)
            differ = sum(float((a != b).sum()) for a, b in zip(out[:3], expected[:3]))
            yield "elements unlike separate steps", differ, 0.0
            yield "bytes unlike separate steps", differing(expected[3:], out[3:]), 0.0
        grad = multiply(*x, *up, out_dtype=torch.bfloat16, **tiles)
        for kind in (*reference_ops.PLAIN_KINDS, "swiglu"):
            gate = other if kind == "swiglu" else None
            dact = Dact(
                activation=kind, rowwise=spec, colwise=spec, act_colwise=spec, emit_high=False, emit_bias=True
            )  # fmt: skip
            out = backward(*x, *up, z, gate, epilogue=dact, **tiles)
            expected = differentiate(grad, z, gate, kind, spec, spec, True, spec, emit_high=False)
            sums = sum(float((a != b).sum()) for a, b in zip(out[2:4], expected[2:4]))
            yield "bias sums unlike separate steps", sums, 0.0
            yield "bytes unlike separate steps", differing(*(_whole(of[4:], m) for of in (expected, out))), 0.0


def _whole(quantized: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
    """What `gemm_dact` quantizes, without the padding after the rows of its transposed parts."""
    return tuple(t[:, :tokens] if i in (2, 6, 8) and t.numel() else t for i, t in enumerate(quantized))


def _of_sum(
    out: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], specs: list[QuantSpec], bias: Tensor | None = None
) -> Measures:
    """Largest error of a sum in units of what it may be, and the error of all in relation to the exact sums.

    FP8 tensor cores align the products of a step of 32 and the sum so far to the largest of them and, on Hopper, cut
    each 13 bits below it, at most four steps in a row; fp32 additions follow. What other tensor cores do is no worse.
    On random data errors average out: measured on an H200 relative errors are 3.1e-4 at most.
    """
    values = []
    for (qdata, scale), spec in zip((a[:2], b[:2]), specs):
        values.append(reference.dequantize(qdata.view(spec.elem.dtype), scale, dtype=torch.float64))
    exact = values[0] @ values[1].t()
    magnitude = values[0].abs() @ values[1].abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = magnitude * (4 * 33 * 2.0**-13 + (values[0].shape[1] / 32 + 34) * 2.0**-24) + 2.0**-40
    yield "of the sum's bound", float(((out.double() - exact).abs() / bound).max()), 1.0
    yield "relative to the exact sums", relative(out, exact), 1e-3
