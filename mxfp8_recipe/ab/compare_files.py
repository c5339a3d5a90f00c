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

import csv
import difflib
import gzip
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mxfp8_recipe.ab import compare_quotes
from mxfp8_recipe.ab.compare_ids import BLOCK, TextIds, blocks_of, parts_of

NEEDED = ("label", "prediction")
NUMBERS = ("label", "prediction", "weight")
OPTIONAL = ("weight", "time", "segment", "seed", "id")
COLUMNS = (*NEEDED, *OPTIONAL)
CHUNK = 200_000
HELD = 1 << 30
"""Bytes of a column of text, such as segments, that is held whole."""


class CompareError(ValueError):
    """Files that cannot be compared; the message says file, column, got, expected and remedy."""


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
        source = _Parquet if path.suffix.lower() in (".parquet", ".pq") else _CSV
        self._source: _Parquet | _CSV = source(path, self.names)
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


def called(column: str, names: Mapping[str, str]) -> str:
    """A column under the name that it has in the file."""
    name = names.get(column, column)
    return f"column {name}" if name == column else f"column {name} ({column})"


def _wanted(path: Path, header: Sequence[str], names: Mapping[str, str], asked: set[str]) -> list[str]:
    """Columns of the table that the file has; missing ones that are needed, or were named by the user, are errors."""
    missing = [c for c in COLUMNS if names[c] not in header and (c in NEEDED or c in asked)]
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


def _renamed(names: Mapping[str, str]) -> set[str]:
    return {c for c in COLUMNS if names[c] != c}


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
        self.columns = _wanted(path, header, names, _renamed(names))
        self.rows: int = self.file.metadata.num_rows

    def read(self, column: str) -> np.ndarray:
        found, start = np.empty(0), 0
        for block in self._blocks(column):
            if start == 0:
                found = np.empty(self.rows, dtype=block.dtype)
            if block.dtype.kind == "S":
                _fits(f"{self.path}: {called(column, self.names)}", self.rows, block.dtype.itemsize)
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
        raise _ends_in_nul(where, letters[ends[row] : ends[row + 1]].tobytes())
    for part in parts_of(lengths):
        yield _padded(letters[ends[part.start] : ends[part.stop]], lengths[part])


def _padded(letters: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    width = max(int(lengths.max()), 1)
    if len(letters) == len(lengths) * width:
        return letters.view(f"S{width}")
    out = np.zeros((len(lengths), width), dtype=np.uint8)
    out[np.arange(width) < lengths[:, None]] = letters
    return out.view(f"S{width}")[:, 0]


def _ends_in_nul(where: str, text: bytes) -> CompareError:
    """Arrays of bytes do not tell such a text from the one without."""
    return CompareError(
        f"{where}: got {text[-40:].decode(errors='replace')!r}, which ends in the character NUL; write it without"
    )


def _fits(where: str, rows: int, width: int) -> None:
    """Of columns that are held as text: each row takes the room of the longest."""
    if rows * width > HELD:
        raise CompareError(
            f"{where}: got a text of {width} bytes, expected at most {HELD // rows} for {rows} rows; shorten it"
        )


class _CSV:
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
                self.columns = _wanted(path, header, names, _renamed(names))
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
            _fits(where, self.rows, max(part.dtype.itemsize for part in parts))
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
                    raise _ends_in_nul(where, text)
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
