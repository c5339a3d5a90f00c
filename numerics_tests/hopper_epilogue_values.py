"""The arithmetic of the Hopper epilogues, value for value, against the kernels that do each step alone."""

import gluon_values as values  # isort: skip  (chooses Triton's interpreter)

import itertools

import torch
from torch import Tensor

from mxfp8_recipe.fused import activation_quantize, quantize, reference_ops
from mxfp8_recipe.fused.gemm import _hopper_dact_kernel as dact_kernel
from mxfp8_recipe.fused.gemm import _hopper_epilogue_kernel as kernel
from mxfp8_recipe.fused.gemm import _hopper_kernel as plain_kernel
from mxfp8_recipe.fused.gemm import hopper_epilogue
from mxfp8_recipe.fused.gemm.epilogue import interleave
from mxfp8_recipe.fused.spec import Elem, QuantSpec, ScaleRounding

BF16 = torch.bfloat16
SPECS = [
    QuantSpec(), QuantSpec(tile=(1, 128)), QuantSpec(elem=Elem.E5M2),
    QuantSpec(scale_rounding=ScaleRounding.FLOOR, tile=(1, 128)),
]  # fmt: skip


def sums(rows: int, cols: int) -> Tensor:
    """fp32 of many magnitudes, with zeros, NaN and Inf."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-12, 6, (rows, cols)).float())
    x[::2, 32:64] = 0
    x[1, 3], x[5, cols - 9], x[6, 9] = float("nan"), float("inf"), -0.0
    return x


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits; NaN of any payload and, as a byte of qdata, of either sign, which an instruction would drop."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    if actual.dtype == torch.uint8 and "qdata" in what:
        equal |= (actual & 0x7F == 0x7F) & (expected & 0x7F == 0x7F)
    if actual.is_floating_point():
        equal &= (actual.signbit() == expected.signbit()) | actual.isnan()
    assert equal.all(), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"


def flags(spec: QuantSpec | None) -> tuple[int, bool, bool]:
    if spec is None:
        return 0, False, False
    return spec.tile[1], spec.elem.value == "e5m2", spec.scale_rounding.value == "floor"


def bf16_of(boxes: values.Boxes) -> Tensor:
    return boxes.values.view(BF16)


def check_columns(across: int, deal: str) -> None:
    """TMA's order of b's rows and the kernel's order of columns cancel, with every column under its own scale."""
    b = torch.arange(128, dtype=torch.float32).view(128, 1).expand(128, 16).contiguous()
    box = hopper_epilogue.dealt(b, deal == "pairs")
    first = [n if i else min(n, box.block_shape[i]) for i, n in enumerate(box.block_shape)]
    rows = b.as_strided(first[:-1], box.strides[:-1]).flatten().long()
    assert sorted(rows.tolist()) == list(range(128))
    for thread in range(4):  # of 8 columns, wgmma gives each of a row's four threads two
        mine = rows.view(16, 4, 2)[:, thread].flatten().tolist()
        if deal == "blocks":
            assert mine == list(range(32 * thread, 32 * thread + 32))
        else:
            gates = {64 * (thread // 2) + 16 * (thread % 2) + j for j in range(16)}
            assert set(mine) == gates | {row + 32 for row in gates}
    product, held = torch.randn(64, 128), torch.randn(64, 128)
    sa, sb = (torch.exp2(torch.randint(-9, 9, (n,)).float()) for n in (64, 128 // across))
    columns = 2 if across == 1 else across
    bits = sb.view(torch.int32)
    given = sb if across > 1 else ((bits[0::2] >> 16) & 0xFFFF | bits[1::2]).view(torch.float32)
    found = []

    def body(*_: object) -> None:
        shape = [64, 128 // columns, columns]
        args = (values.block(t) for t in (held.view(shape), product[:, rows].contiguous(), sa, given))
        found.append(values.array(values.values_of(plain_kernel.promote)(*args, across, deal)))

    values.run(body)
    expected = held + product * sb.repeat_interleave(across) * sa[:, None]
    same(found[0].view(64, 128), expected, f"promotion {across} {deal}")


def check_plain(kind: str, spec: QuantSpec | None, bias: bool, residual: bool, features: int) -> None:
    """A ragged tile at the edge of (50, features), the second of its row."""
    acc, rows, col = sums(64, 128), 50, 128
    width, here = col + features, slice(col, col + features)
    added = torch.randn(128)
    added[features:] = 0
    acc[:, features:] = 0
    more = torch.randn(rows, width).bfloat16()
    z_box, y_box, q_box = values.Boxes(rows, width // 2), values.Boxes(rows, width // 2), values.Boxes(rows, width // 4)
    scale = torch.zeros(rows, width // 32, dtype=torch.uint8)

    def body(more_ptr, s_ptr, _c, _d, _e, _f, _g, _h, _i, row, col, m, n) -> None:
        values.values_of(kernel.finish)(
            values.block(acc.clone()), values.block(added), values.Shared(torch.zeros(64, 64, dtype=torch.int32)),
            more_ptr, z_box, y_box, q_box, s_ptr, row, col, m, n, n,
            bias, kind, residual, True, True, *flags(spec),
        )  # fmt: skip

    values.run(body, more.view(torch.int32), scale, col=col, size=(rows, width))
    z = (acc + added if bias else acc)[:rows, :features].bfloat16()
    y = z if not kind else activation_quantize.activation_quantize(z, None, kind, BF16, None, None, True)[0]
    if residual:
        y = (y.float() + more[:, here].float()).bfloat16()
    what = f"{kind} {spec} bias={bias} residual={residual} features={features}"
    same(bf16_of(z_box)[:, here], z, f"z {what}")
    same(bf16_of(y_box)[:, here], y, f"y {what}")
    if spec is not None:
        q, s = quantize.quantize_both(y, spec, None)[:2]
        same(q_box.values.view(torch.uint8)[:, here], q, f"qdata {what}")
        same(scale[:, col // 32 :], s, f"scale {what}")


def check_gated(kind: str, spec: QuantSpec, halves: int) -> None:
    """`halves` times 64 features of gate and up in one tile."""
    features, rows = 64 * halves, 50
    gate, up = sums(64, features), sums(64, features).flip(0)
    acc = interleave(gate.t().contiguous(), up.t().contiguous()).t().contiguous()
    added = torch.randn(2, features)
    bias = interleave(added[0], added[1])
    boxes = [values.Boxes(rows, features // 2) for _ in range(3)]
    q_box, scale = values.Boxes(rows, features // 4), torch.zeros(rows, features // 32, dtype=torch.uint8)
    inner = reference_ops.GATED_KINDS[kind]

    def body(s_ptr, _b, _c, _d, _e, _f, _g, _h, _i, row, col, m, n) -> None:
        buffers = [values.Shared(torch.zeros(64, 32, dtype=torch.int32)) for _ in range(2)]
        tiles = [(acc[:, at : at + 128].contiguous(), bias[at : at + 128]) for at in (0, 128 * (halves - 1))]
        values.values_of(kernel.finish_gated)(
            *(values.block(acc) for acc, _ in tiles), *(values.block(bias) for _, bias in tiles), *buffers,
            boxes[0], boxes[1], boxes[2], q_box, s_ptr, row, col, m, n,
            True, inner, True, True, *flags(spec), halves,
        )  # fmt: skip

    values.run(body, scale, size=(rows, features))
    gate, up = (gate + added[0])[:rows].bfloat16(), (up + added[1])[:rows].bfloat16()
    y, q, s, *_ = activation_quantize.activation_quantize(up, gate, kind, BF16, spec, None, True)
    what = f"{kind} {spec} {halves}"
    same(bf16_of(boxes[0]), gate, f"gate {what}")
    same(bf16_of(boxes[1]), up, f"up {what}")
    same(bf16_of(boxes[2]), y, f"y {what}")
    same(q_box.values.view(torch.uint8), q, f"qdata {what}")
    same(scale, s, f"scale {what}")


def check_dact(kind: str, spec: QuantSpec, rows: int, features: int) -> None:
    """Every output of a tile of dgrad; rows and features past the edge are zero, as TMA reads them.

    Transposed rows have room for a multiple of 16 tokens, as on a GPU.
    """
    room, blocks = -(-rows // 16) * 16, -(-rows // 32)
    grad, z = sums(128, 128), sums(128, 128).flip(0).bfloat16()
    for x in (grad, z):
        x[rows:], x[:, features:] = 0, 0
    wide, tall = features % 128 == 0, blocks % 4 == 0
    q, scale = torch.zeros(rows, features // 4, dtype=torch.int32), torch.zeros(rows, features // 32, dtype=torch.uint8)
    transposed = [torch.zeros(features, room // 4, dtype=torch.int32) for _ in range(2)]
    scales = [torch.zeros(features, blocks, dtype=torch.uint8) for _ in range(2)]
    stored = [s.view(torch.int32) if whole else s for s, whole in zip((scale, *scales), (wide, tall, tall))]
    partial = torch.zeros(1, features)
    (BR, BC), (_, E5, FLOOR) = spec.tile, flags(spec)

    def body(line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr, _h, _i, row, col, m, n) -> None:
        zs, gs = values.Shared(z.clone().view(torch.int32)), values.Shared(torch.zeros(128, 64, dtype=torch.int32))
        for first in (0, 64):
            acc = values.block(grad[first : first + 64].contiguous())
            values.values_of(dact_kernel.differentiate_rows)(
                acc, zs.slice(first, 64), gs.slice(first, 64), kind, True
            )  # fmt: skip
        values.values_of(dact_kernel.emit)(
            zs, gs, None, None, line_ptr, q_ptr, s_ptr, qt_ptr, st_ptr, at_ptr, ast_ptr,
            row, col, row, col, False, m, n, room, True,
            BR, BC, E5, FLOOR, wide, BC, BR, E5, FLOOR, tall, BC, BR, E5, FLOOR,
        )  # fmt: skip

    values.run(
        body, partial, q, stored[0], transposed[0], stored[1], transposed[1], stored[2], size=(rows, features)
    )  # fmt: skip
    grad_y = grad[:rows, :features].bfloat16().contiguous()
    out = activation_quantize.activation_backward(
        grad_y, z[:rows, :features].contiguous(), None, kind, spec, spec, True, spec
    )
    what = f"dact {kind} {spec} {rows}x{features}"
    for name, found, expected in (
        ("qdata", q, out[4]), ("scale", scale, out[5]), ("qdata_t", transposed[0], out[6]),
        ("scale_t", scales[0], out[7]), ("y qdata_t", transposed[1], out[12]), ("y scale_t", scales[1], out[13]),
    ):  # fmt: skip
        same(found.view(torch.uint8)[:, : expected.shape[1]], expected, f"{name} {what}")
    finite = out[2].isfinite()
    assert torch.equal(partial[0].isfinite(), finite), what
    torch.testing.assert_close(partial[0][finite], out[2][finite], rtol=1e-5, atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    for across, deal in itertools.product((1, 32, 128), ("blocks", "pairs")):
        if across < 128 or deal == "blocks":
            check_columns(across, deal)
    for i, kind in enumerate((*reference_ops.PLAIN_KINDS, "")):
        check_plain(kind, SPECS[i % 4], i % 2 == 0, i % 3 == 2, 96)
    check_plain("gelu", None, True, True, 128)
    for i, kind in enumerate(reference_ops.GATED_KINDS):
        check_gated(kind, SPECS[i], 1 if SPECS[i].tile[1] == 32 else 2)
    for i, kind in enumerate(reference_ops.PLAIN_KINDS):
        check_dact(kind, SPECS[i % 4], *((128, 128), (99, 96), (112, 128))[i % 3])


if __name__ == "__main__":
    main()
    print("ok")
