"""How one operand of a GEMM is quantized: a frozen value that also has a short text form.

The text form (`"e4m3:1x32:rceil:nearest:0"`) is what crosses the custom-op boundary, where only
tensors, numbers and strings may travel; `QuantSpec.decode` is its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from typing import Any

import torch

BLOCK = 32
"""Elements along the contraction that share one stored E8M0 byte."""

TILES = ((1, 32), (32, 32), (1, 128), (32, 128), (128, 128))
HADAMARD_SIZES = (16, 32, 64, 128)


class Elem(str, Enum):
    """Element format of `qdata`."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Elem.E4M3 else torch.float8_e5m2

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return 448.0 if self is Elem.E4M3 else 57344.0

    @property
    def mantissa_bits(self) -> int:
        return 3 if self is Elem.E4M3 else 2

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite magnitude, which is 1.75 * 2**max_exponent."""
        return 8 if self is Elem.E4M3 else 15

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal magnitude."""
        return -6 if self is Elem.E4M3 else -14


class ScaleRounding(str, Enum):
    """How a tile's amax becomes a power of two.

    RCEIL rounds `amax / max` up, so nothing saturates; FLOOR is the OCP MX v1.0 rule (section 6.3),
    under which elements above the format's maximum saturate.
    """

    RCEIL = "rceil"
    FLOOR = "floor"


class Rounding(str, Enum):
    """How a scaled element is rounded to the element format."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


def parse_tile(tile: str | tuple[int, int] | list[int]) -> tuple[int, int]:
    """`"1x32"` or `(1, 32)` to `(across, along)`; raises ValueError for a tile that is not offered."""
    offered = ", ".join(f"{a}x{b}" for a, b in TILES)
    try:
        across, along = (int(n) for n in (tile.lower().split("x") if isinstance(tile, str) else tile))
    except (ValueError, TypeError):
        raise ValueError(f"tile: got {tile!r}, expected one of {offered}") from None
    if (across, along) not in TILES:
        raise ValueError(f"tile: got {across}x{along}, expected one of {offered}")
    return across, along


def _parse_enum(kind: type[Enum], name: str, value: Any) -> Any:
    try:
        return kind(value.lower() if isinstance(value, str) and not isinstance(value, Enum) else value)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{name}: got {value!r}, expected one of {choices}") from None


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantization of one GEMM operand to MXFP8 along that GEMM's contraction.

    Attributes:
        elem: element format, `e4m3` or `e5m2`.
        tile: `(across, along)` the contraction: the elements whose common amax gives the scale.
            Whatever the tile, one byte per 32 elements along the contraction is stored.
        scale_rounding: `rceil` or `floor`.
        rounding: `nearest` or `stochastic`.
        hadamard: size of the random Hadamard transform along the contraction before quantization,
            or None. Both operands of the GEMM must carry the same one.

    Raises:
        ValueError: naming every bad field at once.
    """

    elem: Elem = Elem.E4M3
    tile: tuple[int, int] = (1, 32)
    scale_rounding: ScaleRounding = ScaleRounding.RCEIL
    rounding: Rounding = Rounding.NEAREST
    hadamard: int | None = None

    def __post_init__(self) -> None:
        parsers = {
            "elem": lambda v: _parse_enum(Elem, "elem", v),
            "tile": parse_tile,
            "scale_rounding": lambda v: _parse_enum(ScaleRounding, "scale_rounding", v),
            "rounding": lambda v: _parse_enum(Rounding, "rounding", v),
            "hadamard": _parse_hadamard,
        }
        problems = []
        for name, parse in parsers.items():
            try:
                object.__setattr__(self, name, parse(getattr(self, name)))
            except ValueError as error:
                problems.append(str(error))
        if not problems and self.hadamard and self.is_square:
            problems.append(
                f"hadamard: got {self.hadamard} with the square tile {self.tile_name}, which one quantization shares "
                "between two GEMMs; a rotation serves one contraction only, use tile 1x32 or 1x128"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def is_square(self) -> bool:
        """Transposing commutes with quantizing: one quantization serves both contractions."""
        return self.tile[0] == self.tile[1]

    @property
    def tile_name(self) -> str:
        return f"{self.tile[0]}x{self.tile[1]}"

    @property
    def short(self) -> str:
        """The tile and what differs from the defaults, such as `1x32` or `1x32 sr h32`."""
        extras = [self.elem.value] if self.elem is not Elem.E4M3 else []
        extras += [self.scale_rounding.value] if self.scale_rounding is not ScaleRounding.RCEIL else []
        extras += ["sr"] if self.rounding is Rounding.STOCHASTIC else []
        extras += [f"h{self.hadamard}"] if self.hadamard else []
        return " ".join([self.tile_name, *extras])

    def to_dict(self) -> dict[str, Any]:
        return {
            "elem": self.elem.value,
            "tile": self.tile_name,
            "scale_rounding": self.scale_rounding.value,
            "rounding": self.rounding.value,
            "hadamard": self.hadamard,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> QuantSpec:
        """Inverse of `to_dict`; missing fields take their defaults, unknown ones are a ValueError."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                close = near_misses(str(name), known)
                raise ValueError(f"unknown field {name!r}{close}; fields are {', '.join(known)}")
        return cls(**values)

    def encode(self) -> str:
        return (
            f"{self.elem.value}:{self.tile_name}:{self.scale_rounding.value}:{self.rounding.value}:{self.hadamard or 0}"
        )

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> QuantSpec:
        elem, tile, scale_rounding, rounding, hadamard = text.split(":")
        return QuantSpec(
            elem=elem,  # pyright: ignore[reportArgumentType]
            tile=tile,  # pyright: ignore[reportArgumentType]
            scale_rounding=scale_rounding,  # pyright: ignore[reportArgumentType]
            rounding=rounding,  # pyright: ignore[reportArgumentType]
            hadamard=int(hadamard) or None,
        )


def _parse_hadamard(size: int | None) -> int | None:
    if size is not None and (isinstance(size, bool) or size not in HADAMARD_SIZES):
        raise ValueError(f"hadamard: got {size!r}, expected one of {', '.join(map(str, HADAMARD_SIZES))} or null")
    return size


def near_misses(word: str, choices: list[str]) -> str:
    """`" (did you mean 'x'?)"`, or nothing when no choice is close."""
    close = get_close_matches(word, choices, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
