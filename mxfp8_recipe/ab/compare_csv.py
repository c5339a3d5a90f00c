"""Columns of a CSV file, as arrays of bytes with some rows each, and as numbers where all of their values are."""

from __future__ import annotations

import csv
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mxfp8_recipe.ab import compare_quotes
from mxfp8_recipe.ab.compare_columns import (
    NEEDED,
    NUMBERS,
    CompareError,
    called,
    check_fits,
    ends_in_nul,
    wanted_columns,
)
from mxfp8_recipe.ab.compare_ids import blocks_of, parts_of

CHUNK = 200_000
"""Rows that are parsed at a time."""


class CSVColumns:
    """Columns of a CSV file, read whole, as arrays of bytes with some rows each, and handed out once."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        try:
            with _opened(path) as file:
                reader = csv.reader(file, strict=True)
                header = [name.strip() for name in next(reader, [])]
                if not header:
                    raise CompareError(f"{path}: its first line is empty, expected a header with {', '.join(NEEDED)}")
                if compare_quotes.holds_numbers(header):
                    raise CompareError(f"{path} line 1: the header goes on over rows; {compare_quotes.REMEDY}")
                self.columns = wanted_columns(path, header, names)
                parts = list(_csv_chunks(path, reader, header, {c: names[c] for c in self.columns}))
        except UnicodeDecodeError as error:
            raise CompareError(
                f"{path}: not UTF-8 text ({error}); parquet files end in .parquet, packed CSV files in .gz"
            ) from None
        except csv.Error as error:
            with _opened(path) as file:
                line = compare_quotes.broken_line(file)
            raise CompareError(f"{path} line {line}: not a CSV file ({error}); {compare_quotes.REMEDY}") from None
        except (zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise CompareError(f"{path}: not a CSV file ({error})") from None
        self.path, self.names = path, names
        self._parts = {c: [array for part in parts for array in part[i]] for i, c in enumerate(self.columns)}
        self.rows = sum(map(len, self._parts["label"]))

    def read(self, column: str) -> np.ndarray:
        where, parts = f"{self.path}: {called(column, self.names)}", self._parts.pop(column)
        values = _from_text(where, column, parts)
        if values is None:
            check_fits(where, self.rows, max(part.dtype.itemsize for part in parts))
            return np.concatenate(parts)
        return values

    def ids(self) -> np.ndarray | Callable[[], Iterator[np.ndarray]]:
        """Integers, or what gives the blocks of text."""
        parts = self._parts.pop("id")
        values = _from_text(f"{self.path}: {called('id', self.names)}", "id", parts)
        return partial(_blocks_of_parts, parts) if values is None else values


def _blocks_of_parts(parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    return itertools.chain.from_iterable(map(blocks_of, parts))


def _opened(path: Path) -> TextIO:
    """Text, unpacked where the name ends in .gz; a byte order mark is no part of the first name."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return path.open(newline="", encoding="utf-8-sig")


def _csv_chunks(
    path: Path, reader: Any, header: list[str], names: Mapping[str, str]
) -> Iterator[list[list[np.ndarray]]]:
    """Wanted columns as byte strings, some rows at a time."""
    wanted = list(names.values())
    places = {f"{path}: {called(column, names)}": header.index(name) for column, name in names.items()}
    line = reader.line_num + 1
    while rows := list(itertools.islice(reader, CHUNK)):
        wrong = next((i for i, row in enumerate(rows) if row and len(row) != len(header)), None)
        if wrong is not None:
            at = line + sum(map(compare_quotes.lines_of, rows[:wrong]))
            hint = f", over several lines; {compare_quotes.REMEDY}" if compare_quotes.lines_of(rows[wrong]) > 1 else ""
            raise CompareError(f"{path} line {at}: {len(rows[wrong])} columns, expected {len(header)}{hint}")
        if reader.line_num - line + 1 != len(rows):
            _check_line_breaks(path, line, rows, header, wanted)
        yield [
            list(_byte_arrays(where, [row[place].strip().encode() for row in rows if row]))
            for where, place in places.items()
        ]
        line = reader.line_num + 1


def _byte_arrays(where: str, texts: list[bytes]) -> Iterator[np.ndarray]:
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    for part in parts_of(lengths):
        array = np.array(texts[part], dtype=bytes)
        if np.count_nonzero(array.view(np.uint8)) != lengths[part].sum():  # some hold NUL
            for text in texts[part]:
                if text.endswith(b"\0"):
                    raise ends_in_nul(where, text)
        yield array


def _check_line_breaks(path: Path, line: int, rows: list[list[str]], header: list[str], wanted: list[str]) -> None:
    """Rows from this line on, of which some go over several."""
    found = compare_quotes.swallowing(rows, header, {n: header.index(n) for n in wanted}, wanted[: len(NEEDED)])
    if found:
        before, name = found
        raise CompareError(
            f"{path} line {line + before}: column {name}: got a text with line breaks; {compare_quotes.REMEDY}"
        )


def _from_text(where: str, column: str, parts: list[np.ndarray]) -> np.ndarray | None:
    """A column's numbers; None where it is text."""
    if column in NUMBERS:
        starts = itertools.accumulate(map(len, parts), initial=0)
        return np.concatenate([_numbers(where, part, start) for part, start in zip(parts, starts)])
    empty = sum(int((part == b"").sum()) for part in parts)
    if empty:
        raise CompareError(
            f"{where}: {empty} of {sum(map(len, parts))} values are missing; fill them in, or leave the rows out"
        )
    for kind in (np.int64, np.float64) if column == "time" else (np.int64,):
        found = _converted(parts, kind, exact=column != "time")
        if found is not None:
            return found
    return None


def _converted(parts: list[np.ndarray], kind: type, *, exact: bool) -> np.ndarray | None:
    """As numbers, where all of them are: exactly as Python would write them, if asked."""
    found = []
    for part in parts:
        try:
            values = part.astype(kind)
        except (ValueError, OverflowError):
            return None
        if exact and not np.array_equal(values.astype(part.dtype), part):
            return None
        found.append(values)
    return np.concatenate(found)


def _numbers(where: str, text: np.ndarray, start: int) -> np.ndarray:
    try:
        return text.astype(np.float64)
    except ValueError:
        pass
    for row, value in enumerate(text):
        try:
            float(value)
        except ValueError:
            raise CompareError(
                f"{where}: got {value.decode()!r} in row {start + row + 1}, expected a number; write one, or leave the "
                "row out"
            ) from None
    raise CompareError(f"{where}: its values are no numbers")
