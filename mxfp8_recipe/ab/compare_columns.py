"""Columns of a prediction file: which there are, what they are called, and what every reader checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

NEEDED = ("label", "prediction")
NUMBERS = ("label", "prediction", "weight")
OPTIONAL = ("weight", "time", "segment", "seed", "id")
COLUMNS = (*NEEDED, *OPTIONAL)
HELD = 1 << 30
"""Bytes of a column of text, such as segments, that is held whole."""


class CompareError(ValueError):
    """Files that cannot be compared; the message says file, column, got, expected and remedy."""


def called(column: str, names: Mapping[str, str]) -> str:
    """A column under the name that it has in the file."""
    name = names.get(column, column)
    return f"column {name}" if name == column else f"column {name} ({column})"


def wanted_columns(path: Path, header: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Columns that the file has; missing ones that are needed, or that the user named, are errors."""
    missing = [c for c in COLUMNS if names[c] not in header and (c in NEEDED or names[c] != c)]
    if missing:
        near = [n for c in missing for n in difflib.get_close_matches(names[c], header, n=2, cutoff=0.5)]
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
            hint = ", where columns are expected to be parted by commas."
        raise CompareError(
            f"{path}: no column {', '.join(repr(names[c]) for c in missing)}; it has {', '.join(header)}{hint} "
            f"Say --column {missing[0]}=NAME for another name"
        )
    double = [names[c] for c in COLUMNS if header.count(names[c]) > 1]
    if double:
        raise CompareError(f"{path}: column {', '.join(map(repr, double))} is there more than once; leave one in")
    return [c for c in COLUMNS if names[c] in header]


def ends_in_nul(where: str, text: bytes) -> CompareError:
    """Arrays of bytes do not tell such a text from the one without."""
    return CompareError(
        f"{where}: got {text[-40:].decode(errors='replace')!r}, which ends in the character NUL; write it without"
    )


def check_fits(where: str, rows: int, width: int) -> None:
    """Of columns that are held as text: each row takes the room of the longest."""
    if rows * width > HELD:
        raise CompareError(
            f"{where}: got a text of {width} bytes, expected at most {HELD // rows} for {rows} rows; shorten it"
        )
