"""Prediction files for `mxfp8 compare`: parquet or CSV, read into arrays column by column and checked.

CSV is UTF-8 with commas and a header; a name that ends in .gz is unpacked.

| column | | |
|---|---|---|
| `label` | number in [0, 1] | needed |
| `prediction` | probability | needed |
| `weight` | number >= 0 | optional, 1 |
| `time` | number, date, or text in ISO 8601; without an offset it is UTC | optional: rows are in time order |
| `segment` | integer or text | optional |
| `seed` | integer or text: the training a row was predicted by | optional: one training |
| `id` | integer or text, unique within a seed | optional: rows are taken to be in the same order in all files |

Text that is an integer as Python would write it is that integer; any other, such as 007, stays text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mxfp8_recipe.ab.compare_columns import (
    COLUMNS,
    NUMBERS,
    CompareError,
    called,
    check_fits,
    ends_in_nul,
    wanted_columns,
)
from mxfp8_recipe.ab.compare_csv import CSVColumns
from mxfp8_recipe.ab.compare_ids import BLOCK, TextIds, parts_of


@dataclass
class Predictions:
    """Rows of one file and the predictions of others for the same rows; N rows.

    Attributes:
        path: of the file that describes the rows.
        label, prediction: (N,) fp64. weight: the same, or None.
        time, segment, seed: (N,) integers or text, or None. id: the same; text stays in the file.
        others: (N,) fp64 predictions of each other file, in this order of rows.
        names: of the columns in the file.
    """

    path: Path
    label: np.ndarray
    prediction: np.ndarray
    weight: np.ndarray | None = None
    time: np.ndarray | None = None
    segment: np.ndarray | None = None
    seed: np.ndarray | None = None
    id: np.ndarray | TextIds | None = None
    others: list[np.ndarray] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prediction)

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order; a column at a time, so that no second copy of all is held."""
        for name in COLUMNS:
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[rows])
        for index in range(len(self.others)):
            self.others[index] = self.others[index][rows]


class PredictionFile:
    """A file whose columns are read, and checked, one at a time.

    Args:
        path: `.parquet`, `.pq`, or anything else as CSV with a header; `.gz` for packed CSV.
        names: a column of the table above to its name in the file.

    Raises:
        CompareError: no such file, a column missing, no rows; when a column is read, for its values.
    """

    def __init__(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        if path.is_dir():
            raise CompareError(f"{path}: got a directory, expected one parquet or CSV file")
        if not path.is_file():
            raise CompareError(f"{path}: no such file")
        self.path = path
        self.names = {c: (names or {}).get(c, c) for c in COLUMNS}
        source = _Parquet if path.suffix.lower() in (".parquet", ".pq") else CSVColumns
        self._source: _Parquet | CSVColumns = source(path, self.names)
        self.columns, self.rows = self._source.columns, self._source.rows
        if not self.rows:
            raise CompareError(f"{path}: it has no rows")

    def where(self, column: str) -> str:
        """The file and the name that the column has in it, for errors."""
        return f"{self.path}: {called(column, self.names)}"

    def read(self, column: str) -> np.ndarray | None:
        """A column's values, or None where the file has it not. A CSV column can be read once."""
        if column not in self.columns:
            return None
        values = self._checked(column, problems := [])
        if problems:
            raise CompareError(f"{self.path}: {'; '.join(problems)}")
        return values

    def read_ids(self) -> np.ndarray | TextIds | None:
        """The column `id`: integers, or what is held of text."""
        if "id" not in self.columns:
            return None
        ids = self._source.ids()
        return ids if isinstance(ids, np.ndarray) else TextIds.of(ids, self.rows)

    def read_all(self) -> Predictions:
        """Every column; the problems of all of them in one error."""
        problems: list[str] = []
        found: dict[str, Any] = {c: self._checked(c, problems) for c in self.columns if c != "id"}
        ids = self.read_ids()
        if problems:
            raise CompareError(f"{self.path}: {'; '.join(problems)}")
        return Predictions(self.path, **found, id=ids, names=self.names)

    def _checked(self, column: str, problems: list[str]) -> np.ndarray:
        """A column's values; what is wrong with them is appended."""
        values = self._source.read(column)
        if column == "time" and values.dtype.kind == "S":
            values = _moments(self.where(column), values)
        problems += _problems(column, called(column, self.names), values)
        return values


class _Parquet:
    """Columns of a parquet file, some rows at a time, so that arrow holds next to nothing.

    Without threads, memory maps and buffers of whole columns, whose memory nobody could account for.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise CompareError(
                f"{path}: reading parquet needs pyarrow, which is not installed: pip install 'mxfp8-recipe[data]', "
                "or give CSV files"
            ) from error
        try:
            self.file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            header = self.file.schema_arrow.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CompareError(f"{path}: not a parquet file ({_line(error)}); write it anew, or give CSV") from None
        self.path, self.names, self._errors = path, names, (pa.ArrowException, OSError, UnicodeDecodeError)
        self.columns = wanted_columns(path, header, names)
        self.rows: int = self.file.metadata.num_rows

    def read(self, column: str) -> np.ndarray:
        found, start = np.empty(0), 0
        for block in self._blocks(column):
            if start == 0:
                found = np.empty(self.rows, dtype=block.dtype)
            if block.dtype.kind == "S":
                check_fits(f"{self.path}: {called(column, self.names)}", self.rows, block.dtype.itemsize)
            if block.dtype.itemsize > found.dtype.itemsize:
                found = found.astype(block.dtype)  # text that is longer than all before it
            found[start : start + len(block)] = block
            start += len(block)
        return found

    def ids(self) -> np.ndarray | Callable[[], Iterator[np.ndarray]]:
        """Integers, or what gives the blocks of text."""
        text = next(self._blocks("id")).dtype.kind == "S"
        return partial(self._blocks, "id") if text else self.read("id")

    def _blocks(self, column: str) -> Iterator[np.ndarray]:
        """A column's values in the order of rows; an error at the end where some that must not be are missing."""
        where = f"{self.path}: {called(column, self.names)}"
        missing = rows = 0
        try:
            for batch in self.file.iter_batches(BLOCK, columns=[self.names[column]], use_threads=False):
                values = _plain(batch.column(0))
                rows += len(values)
                if column not in NUMBERS:
                    missing += values.null_count
                if len(values) and not missing:
                    yield from _from_arrow(where, column, values)
        except self._errors as error:
            raise CompareError(
                f"{where}: its values cannot be read ({_line(error)}); write the file anew if it is damaged, "
                "else this column as numbers or text"
            ) from None
        if missing:
            raise CompareError(
                f"{where}: {missing} of {self.rows} values are missing; fill them in, or leave the rows out"
            )
        if rows != self.rows:
            raise CompareError(f"{where}: got {rows} values, expected {self.rows}; the file is damaged, write it anew")


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _plain(values: Any) -> Any:
    """A pyarrow array without a dictionary, whose codes would lose the order of text."""
    import pyarrow as pa

    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _from_arrow(where: str, column: str, values: Any) -> Iterable[np.ndarray]:
    """A pyarrow array as numbers or text; text in several parts where one is very long."""
    import pyarrow as pa

    kind = values.type
    if pa.types.is_boolean(kind):
        values, kind = values.cast(pa.int8()), pa.int8()
    if pa.types.is_temporal(kind) and column == "time":
        values, kind = _instants(values), pa.int64()
    elif column not in NUMBERS and (pa.types.is_temporal(kind) or str(kind) == "string_view"):
        values, kind = values.cast(pa.string()), pa.string()
    elif column not in NUMBERS and pa.types.is_decimal(kind):
        whole = column != "time" and kind.scale == 0
        values, kind = values.cast(pa.string() if whole else pa.float64()), pa.string() if whole else pa.float64()
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if column in NUMBERS and not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise CompareError(f"{where}: got values of type {kind}, expected numbers; cast them to double")
    if column in NUMBERS:  # integers that fp64 rounds are far outside of what is expected of these
        return [values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)]
    if text:
        return _text_codes(where, values.cast(pa.large_binary()))
    if not (pa.types.is_integer(kind) or (pa.types.is_floating(kind) and column == "time")):
        expected, remedy = (
            ("numbers, dates or text", "timestamps, or to text in ISO 8601")
            if column == "time"
            else ("integers or text", "int64 or string")
        )
        raise CompareError(f"{where}: got values of type {kind}, expected {expected}; cast them to {remedy}")
    return [values.to_numpy(zero_copy_only=False)]


def _instants(values: Any) -> Any:
    """Dates and timestamps of every unit and zone in microseconds, so that two files' can be compared."""
    import pyarrow as pa

    kind = values.type
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.unit != "us"):
        values = values.cast(pa.timestamp("us"), safe=False)
    return values.cast(pa.int32()).cast(pa.int64()) if pa.types.is_time32(kind) else values.cast(pa.int64())


def _text_codes(where: str, values: Any) -> Iterator[np.ndarray]:
    """Text as fixed-width arrays of bytes: a tenth of the size of Python strings, and they sort and compare."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[values.offset : values.offset + len(values) + 1]
    lengths = np.diff(ends)
    letters = np.frombuffer(data or b"", dtype=np.uint8)[ends[0] : ends[-1]]
    ends = ends - ends[0]
    last = ends[1:][lengths > 0] - 1
    if not letters[last].all():
        row = int(np.flatnonzero(lengths > 0)[letters[last] == 0][0])
        raise ends_in_nul(where, letters[ends[row] : ends[row + 1]].tobytes())
    for part in parts_of(lengths):
        yield _padded(letters[ends[part.start] : ends[part.stop]], lengths[part])


def _padded(letters: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    width = max(int(lengths.max()), 1)
    if len(letters) == len(lengths) * width:
        return letters.view(f"S{width}")
    out = np.zeros((len(lengths), width), dtype=np.uint8)
    out[np.arange(width) < lengths[:, None]] = letters
    return out.view(f"S{width}")[:, 0]


def _moments(where: str, text: np.ndarray) -> np.ndarray:
    """ISO 8601 as microseconds in UTC: text of several offsets would not sort by time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numpy moves times with an offset to UTC
        try:
            found = text.astype("datetime64[us]")
        except ValueError:
            pass
        else:
            if np.isnat(found).any():
                raise CompareError(f"{where}: {int(np.isnat(found).sum())} of {len(found)} values are missing")
            return found.astype(np.int64)
        for row, value in enumerate(text):
            try:
                np.datetime64(value.decode(errors="replace"), "us")
            except ValueError:
                got = value.decode(errors="replace")
                raise CompareError(
                    f"{where}: got {got!r} in row {row + 1}, expected a number or ISO 8601 such as 2024-05-31T13:00:00"
                ) from None
    raise CompareError(f"{where}: its values are no times")


def _problems(column: str, name: str, values: np.ndarray) -> list[str]:
    """Values outside the range of the column, called `name`, with counts and the first row of each kind."""
    problems = []

    def count(bad: np.ndarray, what: str) -> None:
        if bad.any():
            first = int(bad.argmax())
            number = int(bad.sum())
            problems.append(f"{name}: {number} of {len(bad)} values {what} (row {first + 1}: {values[first]})")

    if column == "prediction":
        count(np.isnan(values), "are NaN or missing")
        count((values < 0) | (values > 1), "lie outside [0, 1]: probabilities are expected, not logits")
    elif column == "time" and values.dtype.kind == "f":
        count(np.isnan(values), "are NaN")
    elif column == "label":
        count(np.isnan(values), "are NaN or missing")
        count((values < 0) | (values > 1), "lie outside [0, 1]")
    elif column == "weight":
        count(~((values >= 0) & np.isfinite(values)), "are negative or not finite")
    return problems
