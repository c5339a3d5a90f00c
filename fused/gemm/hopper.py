"""MXFP8 GEMM on Hopper: FP8 wgmma, promoted by the operands' scales every 128 or every 32 of K.

`gemm` computes what `reference.gemm` defines. The operands' tiles choose the kernel: 128 elements along K on both
sides share a scale in `1x128`, `32x128` and `128x128` tiles, so 128 of K are summed before promotion, else 32; the
rows of `b` that share one decide how much a promotion costs.

Error. One wgmma adds 32 products to its accumulator: all are aligned to the largest and cut `SUM_BITS` bits below its
leading one, so each of the 33 addends loses less than `2**-SUM_BITS` of the largest, and a chunk of 128 loses that
four times. After a chunk fp32 rounding applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..jit import kernel
from ._gluon import launch
from ._hopper_kernel import gemm_kernel

SUM_BITS = 13
"""Fraction bits that FP8 wgmma keeps of each addend, aligned to the largest magnitude among them."""

STEP = 128
COLS = 128
_SPLITS = 32
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Launch of one variant.

    Attributes:
        consumers, subtiles: warpgroups that multiply, and how many times 64 rows each takes.
        stages: steps of operands in flight; `stages_fp32`: with fp32 output, whose staging is twice as large, 0 if
            it does not fit.
        registers, loader_registers: per thread of the consumers (the first gets what the others leave) and loaders.
        group: row tiles that share a pass over the columns.
        step_us: time of one step of K on one multiprocessor, as measured on an H200: what choosing splits needs.
    """

    consumers: int
    subtiles: int
    stages: int
    stages_fp32: int
    registers: int
    loader_registers: int
    step_us: float
    group: int = 8

    @property
    def rows(self) -> int:
        return self.consumers * self.subtiles * 64


# Rates below are of short bursts on an H200, taken to choose; `benchmarks/results` holds what the choice gives.
# 256 rows use an operand byte for twice as many products as 128, and L2 bandwidth bounds the K loop: at 8192^3
# 1233 TFLOP/s against 1041 with 128 rows and 1189 with 192.
TALL = Config(
    consumers=2, subtiles=2, stages=3, stages_fp32=3, registers=216, loader_registers=72, step_us=0.9
)  # fmt: skip
# Three warpgroups overlap one's epilogue with the others' products: better while K is short (65536x1024x1024: 1.53
# against 1.49 of BF16; 262144x512x512: 1.51 against 1.46), worse from K = 2048 on.
WIDE = Config(
    consumers=3, subtiles=1, stages=4, stages_fp32=0, registers=144, loader_registers=72, step_us=0.68
)  # fmt: skip
# Few tiles fill more multiprocessors when they are small.
SMALL = Config(
    consumers=2, subtiles=1, stages=5, stages_fp32=4, registers=216, loader_registers=72, step_us=0.5
)  # fmt: skip
# A scale per column and 256 rows fit the registers only with few for the loaders (4096x4096x16384: 965 TFLOP/s against
# 865 with 128 rows, which remain where 256 are too few tiles or a bias or summand needs registers too).
COLUMNS = Config(
    consumers=2, subtiles=2, stages=3, stages_fp32=3, registers=232, loader_registers=48, step_us=1.1
)  # fmt: skip
COLUMNS_LOW = Config(
    consumers=2, subtiles=1, stages=4, stages_fp32=4, registers=216, loader_registers=72, step_us=0.6
)  # fmt: skip
# Promotion every 32 takes as many cycles as the products and hides behind none of them, whichever warpgroup it is for:
# 64 cycles of wgmma and 69 of multiply-adds alone come to 137 together, so what scales and control add is all there is
# to save. A third warpgroup fills the gaps (8192^3: 826 TFLOP/s against 718); two with two sets of partial sums, whose
# promotion lies under the next product, or with factors multiplied by the loader, gain nothing (695, 752).
# A scale for every column too takes one multiply an element more: 183 instructions a warp and 32 of K in all. Factors
# read for 32 columns at a time need 155 and make room for a third warpgroup, which takes as long at 8192^3 and 3 % less
# at 65536x1024x1024. Both operands dequantized to BF16 for cuBLAS take 0.54 and 0.70 of the time, and their copies.
# Waiting for the next step's operands under a product is worth nothing here (0.5 % either way).
FINE_WIDE = Config(
    consumers=3, subtiles=1, stages=4, stages_fp32=0, registers=152, loader_registers=56, step_us=1.1
)  # fmt: skip
FINE = Config(
    consumers=2, subtiles=1, stages=4, stages_fp32=4, registers=224, loader_registers=56, step_us=0.8
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a call asks of the kernel beyond its shape.

    Attributes:
        chunk: elements of K summed before promotion, 128 or 32. across: rows of b under one scale, 128, 32 or 1.
        out_bytes: size of an output element. bias, summed: whether the sum starts from a
            bias, from a residual or the output's present value.
    """

    chunk: int
    across: int
    out_bytes: int = 2
    bias: bool = False
    summed: bool = False


def variant_of(a_tile: tuple[int, int], b_tile: tuple[int, int], **rest: Any) -> Variant:
    """The kernel that two tiles, `(across, along)` K, call for."""
    chunk = 128 if min(a_tile[1], b_tile[1]) >= 128 else 32
    return Variant(chunk=chunk, across=min(b_tile[0], chunk), **rest)


@lru_cache(maxsize=4096)
def choose(variant: Variant, m: int, n: int, k: int, processors: int) -> tuple[Config, int]:
    """Launch config and K steps a split takes, a function of shape and variant alone."""
    config = _config(variant, m, n, k, processors)
    return config, _split_steps(config, m, n, k, processors)


def _config(variant: Variant, m: int, n: int, k: int, processors: int) -> Config:
    plain = variant.out_bytes == 2 and not variant.summed
    if variant.chunk == 32:
        wide = variant.across == 32 and plain and not variant.bias and _tiles(FINE_WIDE, m, n) >= processors
        return FINE_WIDE if wide else FINE
    if variant.across == 1:
        units = _tiles(COLUMNS, m, n) * min(_SPLITS, max(1, -(-k // STEP) // 8))
        return COLUMNS_LOW if units < processors or variant.bias or variant.summed else COLUMNS
    if variant.summed or _tiles(TALL, m, n) < processors:
        return SMALL
    return WIDE if k <= 1024 and plain and variant.across == 128 else TALL


def _tiles(config: Config, m: int, n: int) -> int:
    return -(-m // config.rows) * -(-n // COLS)


def _split_steps(config: Config, m: int, n: int, k: int, processors: int) -> int:
    """Steps a split takes where splitting K evens out the waves by more than the second pass costs."""
    steps, tiles = -(-k // STEP), _tiles(config, m, n)

    def microseconds(splits: int) -> float:
        waves = -(-tiles * splits // processors) * -(-steps // splits) * config.step_us
        return waves + (5.0 + 8e-6 * m * n * splits / 3.0 if splits > 1 else 0.0)

    most = min(_SPLITS, max(1, steps // 8)) if config.stages_fp32 else 1
    best = min(range(1, most + 1), key=microseconds)
    return -(-steps // best)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    a_tile: tuple[int, int] = (1, 32),
    b_tile: tuple[int, int] = (1, 32),
    residual: Tensor | None = None,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """`a @ b.T + bias + residual` of two operands quantized along their last dim, as `reference.gemm`.

    Args:
        a: (M, K) float8, a_scale (M, ceil(K / 32)) E8M0 bytes.  b: (N, K) float8, b_scale (N, ceil(K / 32)). Any M and
            K, N a multiple of 32. Rows that do not start on 16 bytes are copied first.
        bias: (N,) or None, added in fp32.
        a_tile, b_tile: `(across, along)` K under which scale bytes are equal. (1, 32) is always true and slowest.
        residual: (M, N) of a float dtype with dense rows, or None, added in fp32.
        accumulate_into: (M, N) fp32 with dense rows, or None: add the product to it in place of a new tensor, and
            without a residual.

    Returns:
        (M, N) of `out_dtype`, or `accumulate_into`. The same bits every time: no atomics.

    Raises:
        TypeError: for another dtype. ValueError: for shapes that do not match.
    """
    # Everything the host decides follows from this: validating and choosing again would cost more than launching.
    key = (
        a.device, a.shape, b.shape, a_scale.shape, b_scale.shape, a.dtype, b.dtype, out_dtype, a_tile, b_tile,
        None if bias is None else (bias.shape, bias.dtype),
        None if residual is None else (residual.shape, residual.stride()),
        None if accumulate_into is None else (accumulate_into.shape, accumulate_into.stride(), accumulate_into.dtype),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        m, n, k = _check(a, a_scale, b, b_scale, bias, out_dtype, residual, accumulate_into)
        out_bytes = 4 if accumulate_into is not None else out_dtype.itemsize
        summed = residual is not None or accumulate_into is not None
        variant = variant_of(a_tile, b_tile, out_bytes=out_bytes, bias=bias is not None, summed=summed)
        plan = _remember(key, Plan.of(variant, m, n, k, _processors(a.device.index)))
    out = accumulate_into
    if out is None:
        out = torch.empty(plan.m, plan.n, dtype=out_dtype, device=a.device)
    if plan.m == 0 or plan.n == 0:
        return out
    if plan.k == 0:
        return _empty_sum(out, bias, residual, accumulate_into is not None)
    summand = residual if accumulate_into is None else accumulate_into
    if a.device.index == torch.cuda.current_device():
        _run(a, a_scale, b, b_scale, bias, summand, out, plan)
    else:
        with torch.cuda.device_of(a):
            _run(a, a_scale, b, b_scale, bias, summand, out, plan)
    return out


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a launch needs and that does not depend on the operands' data.

    Attributes:
        rows: of the fp32 workspace a split writes, M rounded up to the tile.
        constants: the kernel's compile-time arguments; see `constants_of`.
    """

    variant: Variant
    m: int
    n: int
    k: int
    steps: int
    splits: int
    programs: int
    rows: int
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, variant: Variant, m: int, n: int, k: int, processors: int) -> Plan:
        config, steps = choose(variant, m, n, max(k, 1), processors)
        splits = triton.cdiv(triton.cdiv(max(k, 1), STEP), steps)
        once = splits == 1
        return cls(
            variant=variant,
            m=m,
            n=n,
            k=k,
            steps=steps,
            splits=splits,
            programs=min(processors, _tiles(config, m, n) * splits),
            rows=-(-m // config.rows) * config.rows,
            constants=constants_of(
                variant, config, variant.out_bytes if once else 4, variant.bias and once, variant.summed and once
            ),
        )


_plans: dict[Any, Plan] = {}


def _remember(key: Any, plan: Plan) -> Plan:
    if len(_plans) >= 4096:  # token counts may never repeat
        _plans.clear()
    return _plans.setdefault(key, plan)


def _run(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, summand: Tensor | None, out: Tensor,
    plan: Plan,
) -> None:  # fmt: skip
    a, b = _aligned(a), _aligned(b)
    sa, sb = _words(a_scale, plan.variant), _words(b_scale, plan.variant)
    target = out
    if plan.splits > 1:
        target = torch.empty(plan.splits * plan.rows, plan.n, dtype=torch.float32, device=a.device)
    word = sa.element_size()
    once = plan.splits == 1
    added = bias if bias is not None and once else target
    base = summand if summand is not None and once else target
    args = (
        _descriptor(a, 64, STEP), _descriptor(b, COLS, STEP), _descriptor(target, 64, COLS), sa, sb, added, base,
        plan.m, plan.n, plan.k, sa.stride(0) * word, sb.stride(0) * word, base.stride(0), plan.steps, plan.splits,
        *plan.constants,
    )  # fmt: skip
    key = (a.dtype, b.dtype, target.dtype, added.dtype, base.dtype, plan.constants)
    launch(gemm_kernel, key, a.device.index, plan.programs, args, warps=4)
    if not once:
        _reduce(target, plan.rows * plan.n, plan.splits, bias, summand, out)


def constants_of(variant: Variant, config: Config, out_bytes: int, bias: bool, summed: bool) -> tuple[Any, ...]:
    """The kernel's compile-time arguments, in its order."""
    stages = config.stages if out_bytes == 2 else config.stages_fp32
    buffers = config.subtiles if out_bytes == 2 else 1
    return (
        config.consumers, config.subtiles, COLS, variant.across, STEP // variant.chunk, stages, buffers, config.group,
        config.registers, config.loader_registers, bias, summed,
    )  # fmt: skip


@kernel(do_not_specialize=["M", "N", "part", "splits", "base_stride", "out_stride"])
def reduce_kernel(
    work_ptr, bias_ptr, base_ptr, out_ptr, M, N, part, splits, base_stride, out_stride,
    BIAS: tl.constexpr, SUMMED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sum over splits, in order, of work[split] (part elements apart), plus bias, plus what base holds."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    mask = n < N
    total = tl.zeros((B,), tl.float32)
    for s in range(splits):
        total += tl.load(work_ptr + s.to(tl.int64) * part + m * N + n, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    if SUMMED:
        total += tl.load(base_ptr + m * base_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=mask)


def _reduce(
    work: Tensor, part: int, splits: int, bias: Tensor | None, summand: Tensor | None, out: Tensor
) -> None:  # fmt: skip
    m, n = out.shape
    block = min(512, triton.next_power_of_2(n))
    added, base = out if bias is None else bias, out if summand is None else summand
    reduce_kernel[m, -(-n // block)](
        work, added, base, out, m, n, part, splits, base.stride(0), out.stride(0),
        bias is not None, summand is not None, block, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def layout_of(rows: int, cols: int, dtype: torch.dtype) -> Any:
    """Shared-memory layout of a (rows, cols) block that TMA moves."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], _ELEMENTS[dtype])


@lru_cache(maxsize=4096)
def _fields(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, cols: int) -> dict[str, Any]:
    layout = layout_of(rows, cols, dtype)
    block = {"block_shape": [rows, cols], "layout": layout, "padding": "zero", "round_f32_to_tf32": False}
    return {"shape": shape, "strides": strides, **block}


def _descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """What `TensorDescriptor.from_tensor` gives, without the checks, which `_aligned` has made."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(_fields(x.shape, x.stride(), x.dtype, rows, cols), base=x)
    return descriptor


def _aligned(x: Tensor) -> Tensor:
    """Give x rows that TMA can read, of unit stride and starting on 16 bytes: a copy only if need be."""
    rows, k = x.shape
    stride, unit = x.stride()
    if unit == 1 and stride % 16 == 0 and stride >= k and x.data_ptr() % 16 == 0:
        return x
    padded = torch.empty(rows, -(-k // 16) * 16, dtype=x.dtype, device=x.device)[:, :k]
    padded.copy_(x)
    return padded


def _words(scale: Tensor, variant: Variant) -> Tensor:
    """Scale bytes as the kernel reads them: bytes, or with a scale every 32 of K int32 words of four."""
    if scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    if variant.chunk == 128:
        return scale if scale.stride(1) == 1 else scale.contiguous()
    rows, blocks = scale.shape
    if blocks % 4 == 0 and scale.stride(1) == 1 and scale.stride(0) % 4 == 0 and scale.data_ptr() % 4 == 0:
        return scale.view(torch.int32)
    padded = torch.zeros(rows, -(-blocks // 4) * 4, dtype=torch.uint8, device=scale.device)
    padded[:, :blocks].copy_(scale)
    return padded.view(torch.int32)


def _empty_sum(out: Tensor, bias: Tensor | None, residual: Tensor | None, accumulate: bool) -> Tensor:
    if not accumulate:
        out.zero_()
    for summand in (bias, residual):
        if summand is not None:
            out += summand
    return out


def _check(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    residual: Tensor | None, accumulate_into: Tensor | None,
) -> tuple[int, int, int]:  # fmt: skip
    (m, k), (n, other) = a.shape, b.shape
    blocks = -(-k // 32)
    for name, x, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if x.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise TypeError(f"gemm: got {name} of dtype {x.dtype}, expected float8_e4m3fn or float8_e5m2")
        if tuple(scale.shape) != (x.shape[0], blocks):
            raise ValueError(f"gemm: got {name}_scale shape {tuple(scale.shape)}, expected {(x.shape[0], blocks)}")
    if k != other:
        raise ValueError(f"gemm: got {k} and {other} elements along K, expected as many in both operands")
    if n % 32:
        raise ValueError(f"gemm: got N = {n}, expected a multiple of 32; the reference backend takes any")
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"gemm: got out_dtype {out_dtype}, expected bfloat16, float16 or float32")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"gemm: got bias shape {tuple(bias.shape)}, expected {(n,)}")
    if residual is not None and (tuple(residual.shape) != (m, n) or residual.stride(1) != 1):
        raise ValueError(
            f"gemm: got residual of shape {tuple(residual.shape)} and strides {residual.stride()}, expected {(m, n)}"
            " with unit stride along rows"
        )
    if accumulate_into is not None:
        if residual is not None:
            raise ValueError("gemm: got residual and accumulate_into, expected one of them")
        _check_sum(accumulate_into, m, n)
    return m, n, k


def _check_sum(total: Tensor, m: int, n: int) -> None:
    if total.dtype != torch.float32:
        raise TypeError(f"gemm: got accumulate_into of dtype {total.dtype}, expected float32")
    dense = total.dim() == 2 and (total.stride(1) == 1 or n == 0) and total.stride(0) % 4 == 0
    if tuple(total.shape) != (m, n) or not dense or total.data_ptr() % 16:
        raise ValueError(
            f"gemm: got accumulate_into of shape {tuple(total.shape)} and strides {total.stride()}, expected {(m, n)}"
            " with unit stride along rows that start on 16 bytes"
        )
