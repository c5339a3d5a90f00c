"""Prediction files for `mxfp8 compare`: parquet or CSV, read into arrays column by column and checked.

| column | | |
|---|---|---|
| `label` | number in [0, 1] | needed |
| `prediction` | probability | needed |
| `weight` | number >= 0 | optional, 1 |
| `time` | number, date or text that sorts by time | optional: rows are taken to be in time order |
| `segment` | integer or text | optional |
| `seed` | integer or text: the training a row was predicted by | optional: one training |
| `id` | integer or text, unique within a seed | optional: rows are taken to be in the same order in all files |
"""

from __future__ import annotations

import csv
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NEEDED = ("label", "prediction")
NUMBERS = ("label", "prediction", "weight")
OPTIONAL = ("weight", "time", "segment", "seed", "id")
COLUMNS = (*NEEDED, *OPTIONAL)
CHUNK = 200_000


class CompareError(ValueError):
    """Files that cannot be compared; the message says file, column, got, expected and remedy."""


@dataclass
class Predictions:
    """One file's columns; N rows in file order.

    Attributes:
        label, prediction: (N,) fp64. weight: the same, or None.
        time, segment, seed, id: (N,) integers or text, or None.
    """

    path: Path
    label: np.ndarray
    prediction: np.ndarray
    weight: np.ndarray | None = None
    time: np.ndarray | None = None
    segment: np.ndarray | None = None
    seed: np.ndarray | None = None
    id: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prediction)

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order; a column at a time, so that no second copy of all is held."""
        for name in COLUMNS:
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[rows])


def read_predictions(path: Path, names: Mapping[str, str] | None = None) -> Predictions:
    """Read and check a file.

    Args:
        path: `.parquet`, `.pq`, or anything else as CSV with a header.
        names: a column of the table above to its name in the file.

    Raises:
        CompareError: no such file, a missing column, a value that is no number, no rows.
    """
    if not path.is_file():
        raise CompareError(f"{path}: no such file")
    names = {c: (names or {}).get(c, c) for c in COLUMNS}
    read = _read_parquet if path.suffix in (".parquet", ".pq") else _read_csv
    columns = dict(read(path, names))
    if not len(columns["prediction"]):
        raise CompareError(f"{path}: it has no rows")
    found = Predictions(path, **columns)
    _check(found, names)
    return found


def _wanted(path: Path, header: Sequence[str], names: Mapping[str, str], asked: set[str]) -> list[str]:
    """Columns of the table that the file has; missing ones that are needed, or were named by the user, are errors."""
    missing = [c for c in COLUMNS if names[c] not in header and (c in NEEDED or c in asked)]
    if missing:
        near = [n for c in missing for n in difflib.get_close_matches(names[c], header, n=2, cutoff=0.5)]
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise CompareError(
            f"{path}: no column {', '.join(repr(names[c]) for c in missing)}; it has {', '.join(header)}{hint} "
            f"Say --column {missing[0]}=NAME for another name"
        )
    return [c for c in COLUMNS if names[c] in header]


def _renamed(names: Mapping[str, str]) -> set[str]:
    return {c for c in COLUMNS if names[c] != c}


def _read_parquet(path: Path, names: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise CompareError(
            f"{path}: reading parquet needs pyarrow, which is not installed: pip install 'mxfp8-recipe[data]', "
            "or give CSV files"
        ) from error
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise CompareError(f"{path}: not a parquet file ({error})") from None
    for column in _wanted(path, file.schema_arrow.names, names, _renamed(names)):
        yield column, _from_arrow(path, column, file.read(columns=[names[column]], use_threads=False).column(0))


def _from_arrow(path: Path, column: str, values: Any) -> np.ndarray:
    """A pyarrow column as numbers or text; text as codes would lose its order, so it stays text."""
    import pyarrow as pa

    if values.null_count and column not in NUMBERS:
        raise CompareError(f"{path}: column {column}: {values.null_count} of {len(values)} values are missing")
    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind):
        values, kind = values.cast(pa.int8()), pa.int8()
    if pa.types.is_temporal(kind):
        values, kind = values.cast(pa.int64() if pa.types.is_timestamp(kind) else pa.int32()), pa.int64()
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if column in NUMBERS and not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise CompareError(f"{path}: column {column}: got values of type {kind}, expected numbers")
    if column in NUMBERS:
        return np.array(values.cast(pa.float64()).to_numpy())  # a copy, since arrow's own memory is read-only
    if text:
        return _text_codes(values)
    if not (pa.types.is_integer(kind) or (pa.types.is_floating(kind) and column == "time")):
        expected = "numbers, dates or text" if column == "time" else "integers or text"
        raise CompareError(f"{path}: column {column}: got values of type {kind}, expected {expected}")
    return values.to_numpy()


def _text_codes(values: Any) -> np.ndarray:
    """Text as a fixed-width array of bytes: a tenth of the size of Python strings, and it sorts and compares."""
    import pyarrow.compute as pc

    lengths = pc.max(pc.binary_length(values)).as_py() or 1
    out = np.empty(len(values), dtype=f"S{lengths}")
    start = 0
    for chunk in values.chunks:
        out[start : start + len(chunk)] = [text.encode() for text in chunk.to_pylist()]
        start += len(chunk)
    return out


def _read_csv(path: Path, names: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            wanted = _wanted(path, header, names, _renamed(names))
            parts = list(_csv_chunks(path, reader, header, [names[c] for c in wanted]))
        except UnicodeDecodeError as error:
            raise CompareError(f"{path}: not a text file ({error}); parquet files end in .parquet") from None
    for position, column in enumerate(wanted):
        text = np.concatenate([part[position] for part in parts]) if parts else np.empty(0, dtype="S1")
        yield column, _from_text(path, column, text)
        for part in parts:
            part[position] = np.empty(0)


def _csv_chunks(path: Path, reader: Any, header: list[str], wanted: list[str]) -> Iterator[list[np.ndarray]]:
    """Wanted columns as byte strings, some rows at a time."""
    positions = [header.index(name) for name in wanted]
    line = 2
    while rows := list(itertools.islice(reader, CHUNK)):
        wrong = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
        if wrong is not None:
            raise CompareError(f"{path} line {line + wrong}: {len(rows[wrong])} columns, expected {len(header)}")
        yield [np.array([row[p].strip().encode() for row in rows]) for p in positions]
        line += len(rows)


def _from_text(path: Path, column: str, text: np.ndarray) -> np.ndarray:
    if column in NUMBERS:
        return _numbers(path, column, text)
    for kind in (np.int64, np.float64) if column == "time" else (np.int64,):
        try:
            return text.astype(kind)
        except ValueError:
            continue
    empty = int((text == b"").sum())
    if empty:
        raise CompareError(f"{path}: column {column}: {empty} of {len(text)} values are missing")
    return text


def _numbers(path: Path, column: str, text: np.ndarray) -> np.ndarray:
    try:
        return text.astype(np.float64)
    except ValueError:
        pass
    for row, value in enumerate(text):
        try:
            float(value)
        except ValueError:
            raise CompareError(
                f"{path}: column {column}: got {value.decode()!r} in row {row + 1}, expected a number"
            ) from None
    raise CompareError(f"{path}: column {column}: its values are no numbers")


def _check(found: Predictions, names: Mapping[str, str]) -> None:
    """Values outside their range, every kind at once, with counts and the first row of each."""
    problems = []

    def count(column: str, bad: np.ndarray, what: str) -> None:
        if bad.any():
            first = int(bad.argmax())
            got = getattr(found, column)[first]
            problems.append(
                f"column {names[column]}: {int(bad.sum())} of {len(bad)} values {what} (row {first + 1}: {got})"
            )

    p, y, w = found.prediction, found.label, found.weight
    count("prediction", np.isnan(p), "are NaN or missing")
    count("prediction", (p < 0) | (p > 1), "lie outside [0, 1]: probabilities are expected, not logits")
    count("label", ~((y >= 0) & (y <= 1)), "lie outside [0, 1]")
    if w is not None:
        count("weight", ~((w >= 0) & np.isfinite(w)), "are negative or not finite")
    if problems:
        raise CompareError(f"{found.path}: {'; '.join(problems)}")
