"""Host side of the kernels: output allocation, the compile-time flags of a `QuantSpec`, frozen launch configs.

Nothing is autotuned: a config is a function of shape and dtype alone, so the first step is as fast as the
last and two runs launch the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scale_layout import swizzled_numel
from .spec import Elem, QuantSpec, Rounding, ScaleRounding

TOKENS = 128
LANES = 32
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """A program covers 128 tokens x 128 features with `warps` warps."""

    warps: int
    options: dict[str, int] = field(default_factory=dict)

    def reps(self, itemsize: int) -> int:
        """Groups of four consecutive tokens a thread holds, given 16-byte loads of the widest input."""
        rows_a_pass = self.warps * LANES * (16 // itemsize) // 128
        return max(1, 32 // rows_a_pass) if rows_a_pass else 32


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """A program covers `rows` tokens x `cols` features, `run` times one after another, with `warps` warps."""

    rows: int
    cols: int
    warps: int
    run: int = 1


# Reasons below are shares of copy bandwidth measured on an H200 (132 multiprocessors, 65536 x 1024 unless said).


def quantize_tile_config(shared_rows: bool) -> TileConfig:
    """`shared_rows`: no 1 x N row-wise tile, so 80 registers and three programs of 8 warps a multiprocessor (85 %).
    A 1 x N tile takes half as many instructions an element in 4 warps (71-74 %) as it does in 16 (70 %).
    """
    return TileConfig(warps=8 if shared_rows else 4)


def quantize_row_config(features: int) -> RowConfig:
    """32 elements a thread and rows of 1 KiB or more keep enough loads in flight (99 %)."""
    cols = min(1024, max(128, next_power_of_2(features)))
    return RowConfig(rows=max(1, 4096 // cols), cols=cols, warps=4)


def norm_row_config(features: int, plain: bool) -> RowConfig | None:
    """As few warps a row as registers allow, since warps that share a row wait for each other: one warp up to 1024
    features (97 % at 512, 91 % at 1024; two warps 90 and 88 %), two at 2048 (89 %; four 86 %), four at 4096 (86 %;
    eight 73 %). The next rows are loaded ahead: without it 76 % at 2048, 66 % at 4096.

    `plain`: RMSNorm without residual and bias, whose fewer registers leave room for two rows of 1024. None for rows
    too wide for one program's registers: the tile kernel takes them.
    """
    cols = max(128, next_power_of_2(features))
    if cols > 16384:
        return None
    if cols <= 1024:
        return RowConfig(rows=2 if cols > 512 and plain else 1024 // cols, cols=cols, warps=1, run=4)
    warps = max(2, cols // 1024)
    return RowConfig(rows=1, cols=cols, warps=warps, run=4 if cols <= 2048 else 8)


def norm_tile_config(shared_rows: bool, plain: bool) -> TileConfig:
    """At 80 registers a tile without 1 x N rows does not spill and three programs fit (71 %; two: 62 %). A 1 x N tile
    would spill (57 % at its 128 registers, 51 % at 80), and so would any that is not `plain`.
    """
    return TileConfig(warps=8, options={"maxnreg": 80} if shared_rows and plain else {})


def norm_backward_config(tokens: int, features: int, heavy: bool) -> RowConfig:
    """A warp holds 1024 features in 32 elements a thread, 4 warps a program (85 %; 8 warps 55 %), which takes 32 rows a
    warp one after another (85 %; 16: 79 %, 8: 69 %), fewer where that would leave multiprocessors idle.

    `heavy`: LayerNorm or a bias, whose sums take twice the registers and would spill at 1024 features a warp.
    """
    cols = max(256, next_power_of_2(features))
    held = 512 if heavy else 1024
    warps = max(4, min(16, cols // held))
    rows = max(1, warps * held // cols)
    run = next_power_of_2(tokens // (rows * LEAST_PROGRAMS)) if tokens else 1
    return RowConfig(rows=rows, cols=cols, warps=warps, run=max(2, min(32, run)))


def activation_row_config(features: int) -> RowConfig:
    """32 elements a thread in 2 warps (GELU by erf 89 %; 4 warps 82 %)."""
    cols = min(2048, max(128, next_power_of_2(features)))
    return RowConfig(rows=2048 // cols, cols=cols, warps=2)


def activation_tile_config(transposed: bool) -> TileConfig:
    """8 warps; 80 registers spill (GELU 65536 x 4096: 451 us, 534 us at 80, 505 us in 4 warps). Without a transpose the
    assembler aims for 64 registers and spills, unless told that 128 will do.
    """
    return TileConfig(warps=8, options={} if transposed else {"maxnreg": 128})


def activation_backward_config(gated: bool) -> TileConfig:
    """8 warps at 128 registers, an output a program (SwiGLU 65 %; all outputs in one program: 57 %; 16 warps: 42 %)."""
    return TileConfig(warps=8)


def activation_staged_config(gated: bool, shared_rows: bool) -> TileConfig:
    """4 warps (GELU 65536 x 4096: 311 us at 128 registers, 315 us at 80 when rows share scales; 8 warps 322 us). With a
    gate, whose second tile leaves room for three programs, 8 warps (SwiGLU 206 us; 4 warps 208 us). Persistent
    programs that copy the next tile meanwhile: 360 and 225 us.
    """
    if gated:
        return TileConfig(warps=8, options={"maxnreg": 80})
    return TileConfig(warps=4, options={"maxnreg": 80 if shared_rows else 128})


def activation_backward_staged_config(gated: bool, bias: bool) -> TileConfig:
    """Three programs of 8 warps, which 72 registers allow (GELU 65536 x 4096: 539 us; two at 128: 598 us, 4 warps:
    599 us), and so do 80, without which the sums of a bias would spill; with a gate two at 128 (SwiGLU 429 us, with
    a bias 452 us; 4 warps 449 us). Persistent programs: 627 and 460 us.
    """
    return TileConfig(warps=8, options={"maxnreg": 128 if gated else 80 if bias else 72})


def quantize_staged_config(shared_rows: bool) -> TileConfig:
    """No config differs by more than 1 %: loads and stores alone take 92 %, so the arithmetic is hidden. The rest is
    scales in pieces of four bytes, a row's and a feature's: 92 % without scales, 90 % in the 128 x 4 layout, hence
    `spread`. Longer pieces cost the programs that make them as much: of two tiles one above the other 84 %, a loop over
    four that copies the next one meanwhile 81 %, over eight, whose pieces are whole sectors, 80 %. Groups of 2 to 16
    strips change nothing.
    """
    return TileConfig(warps=8 if shared_rows else 4)


def norm_staged_config(shared_rows: bool, flags: dict[str, Any]) -> TileConfig | None:
    """At 64 registers four programs fit a multiprocessor (1 x 128: 262144 x 512 73 %, 65536 x 1024 68 %, 65536 x 2048
    68 %, 16384 x 4096 65 %; `norm_tile_kernel` 56 to 57 %). None without 1 x N rows: there `norm_tile_kernel` is faster
    (65536 x 1024: 71 against 66 %), unless it has to store single bytes.
    """
    return None if shared_rows and flags["T_ALIGN"] == 16 else TileConfig(warps=8, options={"maxnreg": 64})


def stageable(x: Tensor, flags: dict[str, Any]) -> bool:
    """Whether tiles of this may be staged in shared memory: a transpose of bf16 on Hopper or later. A matrix on the
    CPU, where nothing is launched, counts as on Hopper.
    """
    small = max(x.stride(0), x.shape[0]) < 2**24  # 128 rows are addressed in 32 bits
    return flags["C_BR"] > 0 and x.dtype == torch.bfloat16 and small and _stages(x.device)


def staged(x: Tensor, flags: dict[str, Any]) -> bool:
    """`stageable`, and transposed rows are whole pieces of 16 bytes."""
    return flags["T_ALIGN"] == 16 and stageable(x, flags)


def staged_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """`Emission.flags` without what `staged` fixes."""
    return {name: value for name, value in flags.items() if name != "T_ALIGN"}


@lru_cache(maxsize=64)
def _stages(device: torch.device) -> bool:
    if triton.knobs.runtime.interpret:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


SPREAD_ELEMENTS = 2**26
"""Elements from which on `spread` pays for its launch (quantize 1 x 128 and 32 x 32: 16384 x 4096 from 82 to 86 %;
262144 x 512 from 85 to 86 and 86 to 87 %; 65536 x 1024, the least that was measured, 85.0 to 85.5 % and no change; GELU
65536 x 4096 from 82 to 85 and 82 to 83 %). It slows norms (262144 x 512: 73 to 71 and 75 to 74 %; 65536 x 1024:
68 to 66 %)."""


LEAST_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""

MAX_FEATURES = 32768
"""Widest row whose sums one program takes."""

LEAD_PROGRAMS = 400
"""Programs by which row sums run ahead: as many as are in flight, so that hardly anybody waits, and few enough that
what they read, 32 to 64 KiB each, is still in the L2 cache (32x32: 250 give 68 %, 400 give 71 %, 1200 57 %)."""


STAGED_LEAD_PROGRAMS = 550
"""The same for the staged kernel, of which more are in flight (1 x 128: 400 give 67 %, 550 68 %, 800 65 %)."""


@dataclass
class Roles:
    """How a launch of the norm kernels divides into programs that sum rows and programs that hold tiles."""

    programs: int
    strips: int
    lead: int
    counter: Tensor
    flags: dict[str, int]


def summing_programs(features: int) -> int:
    """Programs that share the row statistics of a strip, so that one reads about what a tile program does."""
    return min(TOKENS, max(4, next_power_of_2(features) // 256))


def plan_roles(
    like: Tensor, tile: TileConfig, elements: int, summing: int, ahead: int = LEAD_PROGRAMS
) -> Roles:  # fmt: skip
    """`elements`: how many a summing program of 8 warps holds at a time; `summing`: such programs a strip; `ahead`:
    programs by which sums run ahead.
    """
    rows, cols = like.shape
    strips, chunks = -(-rows // TOKENS), -(-cols // 128)
    width = max(128, next_power_of_2(cols))
    lead = min(strips, -(-ahead // (summing + chunks)))
    held = min(TOKENS // summing, max(1, elements * tile.warps // 8 // width))
    return Roles(
        programs=(strips + lead) * (summing + chunks),
        strips=strips,
        lead=lead,
        counter=torch.zeros(strips, dtype=torch.int32, device=like.device),
        flags={"LOG2": (width // 128).bit_length() - 1, "R": held, "SUMMING": summing},
    )


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass
class Emission:
    """Outputs of one quantization, the pointers and the compile-time flags a kernel takes for them."""

    outputs: tuple[Tensor, Tensor, Tensor, Tensor]
    pointers: tuple[Tensor, Tensor, Tensor, Tensor]
    flags: dict[str, Any]
    stride_t: int
    columns: int

    @property
    def any(self) -> bool:
        return self.flags["R_BR"] > 0 or self.flags["C_BR"] > 0

    @property
    def shared_rows(self) -> bool:
        """No row has a scale of its own."""
        return self.flags["R_BR"] != 1

    @property
    def rows_alone(self) -> bool:
        """Nothing couples tokens: a kernel may take any number of rows at a time."""
        return self.flags["C_BR"] == 0 and self.flags["R_BR"] <= 1


def plan_emission(
    like: Tensor,
    rows: int,
    cols: int,
    rowwise: QuantSpec | None,
    colwise: QuantSpec | None,
    *,
    swizzled: bool,
    pad_tokens: int,
) -> Emission:
    """Allocate what `quantize_both` returns for a (rows, cols) matrix and describe it to a kernel."""
    stride_t, flags, shapes, words = _emission_layout(rows, cols, rowwise, colwise, swizzled, pad_tokens)
    outputs, device = [], like.device
    for shape in shapes:  # an op's outputs may not alias, so what nobody asked for is empty anew
        outputs.append(torch.empty(shape, dtype=torch.uint8, device=device))
    pointers = tuple(out if word is None else out.view(word) for out, word in zip(outputs, words))
    return Emission(tuple(outputs), pointers, dict(flags), stride_t, cols)  # pyright: ignore[reportArgumentType]


@lru_cache(maxsize=4096)
def _emission_layout(
    rows: int, cols: int, rowwise: QuantSpec | None, colwise: QuantSpec | None, swizzled: bool, pad_tokens: int
) -> tuple[int, dict[str, Any], tuple[tuple[int, ...], ...], tuple[torch.dtype | None, ...]]:
    """Bytes a row of transposed qdata takes, flags, and of the four outputs shapes and the words kernels see."""
    stride_t = padded_tokens(rows, pad_tokens)
    whole = stride_t % 4 == 0
    flags: dict[str, Any] = {
        **_orientation("R", None if rowwise is None else (*rowwise.tile,), rowwise),
        **_orientation("C", None if colwise is None else (colwise.tile[1], colwise.tile[0]), colwise),
        "R_ALIGNED": cols % 128 == 0,
        "C_ALIGNED": whole and -(-stride_t // 32) % 4 == 0,
        "T_ALIGN": 16 if stride_t % 16 == 0 else 4 if whole else 1,
        "SWIZZLED": swizzled,
    }
    shapes: list[tuple[int, ...]] = [(0,)] * 4
    words: list[torch.dtype | None] = [None] * 4
    if rowwise is not None:
        shapes[:2] = (rows, cols), _scale_shape(rows, cols // 32, swizzled)
        words[:2] = torch.int16, torch.int32 if swizzled or flags["R_ALIGNED"] else None
    if colwise is not None:
        shapes[2:] = (cols, stride_t), _scale_shape(cols, -(-stride_t // 32), swizzled)
        words[2:] = torch.int32 if whole else None, torch.int32 if swizzled or flags["C_ALIGNED"] else None
    words = [word if all(shape) else None for word, shape in zip(words, shapes)]
    return stride_t, flags, tuple(shapes), tuple(words)


def padded_tokens(rows: int, pad_tokens: int) -> int:
    """Tokens of the transposed outputs: `rows` rounded up to `pad_tokens`, a divisor of 128."""
    if pad_tokens < 1 or TOKENS % pad_tokens:
        raise ValueError(f"pad_tokens: got {pad_tokens}, expected a divisor of {TOKENS}")
    return -(-rows // pad_tokens) * pad_tokens


def one_pass(spec: QuantSpec | None) -> bool:
    """Whether the fused kernels emit this spec themselves; a rotation or random rounding takes a second launch."""
    return spec is None or (spec.hadamard is None and spec.rounding is Rounding.NEAREST)


def split_specs(rowwise: QuantSpec | None, colwise: QuantSpec | None) -> tuple[Any, Any, Any, Any]:
    """`(fused rowwise, fused colwise, later rowwise, later colwise)`."""
    now = [spec if one_pass(spec) else None for spec in (rowwise, colwise)]
    later = [None if one_pass(spec) else spec for spec in (rowwise, colwise)]
    return now[0], now[1], later[0], later[1]


def check_features(op: str, features: int, most: int | None = None) -> None:
    """Raise unless the kernels take this many features."""
    if most is not None and features > most:
        raise ValueError(
            f"{op}: got {features} features, expected at most {most}; the reference backend takes any number"
        )
    if features % 32:
        raise ValueError(
            f"{op}: got {features} features, expected a multiple of 32; the reference backend takes any number"
        )


def dense_rows(x: Tensor) -> Tensor:
    """X with unit stride along the features and 16-byte aligned rows: a copy only if need be."""
    aligned = x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0
    if x.stride(1) == 1 and aligned and x.stride(0) >= x.shape[1]:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def words(x: Tensor) -> Tensor:
    """X as words of two neighboring features; see `_device`."""
    if x.storage_offset() % 2:
        x = x.clone()
    return x.view(torch.int64 if x.element_size() == 4 else torch.int32)


def _orientation(prefix: str, tile: tuple[int, int] | None, spec: QuantSpec | None) -> dict[str, Any]:
    rows, cols = tile or (0, 0)
    return {
        f"{prefix}_BR": rows,
        f"{prefix}_BC": cols,
        f"{prefix}_E5": spec is not None and spec.elem is Elem.E5M2,
        f"{prefix}_FLOOR": spec is not None and spec.scale_rounding is ScaleRounding.FLOOR,
    }


def _scale_shape(rows: int, blocks: int, swizzled: bool) -> tuple[int, ...]:
    return (swizzled_numel(rows, blocks),) if swizzled else (rows, blocks)
