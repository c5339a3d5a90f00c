"""Click logs in text files, plain or .gz, read as a stream: one pass to count rows, then one a training pass.

A row is a line of the right structure. The first pass counts rows and finds where the held-out tail begins;
nothing of the file is held but a block of lines. A malformed line is skipped, noted with its number, and
fatal with `strict`; a label outside [0, 1] or a NaN is fatal always, since skipping it would hide it.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.data.rows import Part, Rows, heldout_fraction, rebatch
from mxfp8_recipe.ab.types import Batch, DataRequest, FeatureSpec

BLOCK = 4_096
DEFAULT_BUCKETS = 16_384
SHOWN = 5

Line = tuple[int, bytes]
"""A line's number in the file, from 1, and its text without the line break."""


class LineFormat(Protocol):
    """How to read one format. `header_lines` are skipped; the rest are rows, blank lines aside."""

    name: str
    spec: FeatureSpec
    header_lines: int

    def problem(self, line: bytes) -> str | None:
        """What is wrong with the line's structure, or None; cheap, since every pass asks it of every line."""
        ...

    def time(self, line: bytes) -> int | None:
        """When the row happened, or None for a format that is in file order."""
        ...

    def parse(self, lines: list[Line], problems: Problems) -> Rows:
        """The rows of `lines`, less those it reports to `problems`."""
        ...


class Problems:
    """Malformed lines seen so far, each counted once, as one sentence kept current in `notes`."""

    def __init__(self, path: Path, notes: list[str], *, strict: bool) -> None:
        self.path, self.notes, self.strict = path, notes, strict
        self.lines: dict[int, str] = {}
        self._note: int | None = None

    def add(self, number: int, what: str) -> None:
        if self.strict:
            raise DataError(f"{self.path} line {number}: {what}; mend the line, or drop --strict to skip it")
        if number in self.lines:
            return
        self.lines[number] = what
        if self._note is None:
            self._note = len(self.notes)
            self.notes.append("")
        self.notes[self._note] = f"{len(self.lines)} malformed lines of {self.path} skipped: {self.summary()}"

    def summary(self) -> str:
        shown = [f"line {n}: {what}" for n, what in islice(self.lines.items(), SHOWN)]
        rest = len(self.lines) - len(shown)
        return "; ".join(shown) + (f"; and {rest} more" if rest else "")


def find_file(request: DataRequest, name: str) -> Path:
    """The file that `--data name:PATH` means."""
    if not request.source:
        raise DataError(f"{name}: got no path, expected --data {name}:PATH")
    path = Path(request.source).expanduser()
    if path.is_dir():
        raise DataError(f"{name}: {path} is a folder, expected a text file, plain or .gz")
    if not path.is_file():
        raise FileNotFoundError(f"{name}: no file at {path}, looked from {Path.cwd()}; check the path after {name}:")
    return path


def read_lines(path: Path) -> Iterator[Line]:
    """Numbered lines, blank ones left out."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip(b"\r\n")
                if text.strip():
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); fetch it again, or unpack it first") from error


class FileDataset:
    """Rows of one file in file order, the first share to train on, the tail held out."""

    def __init__(self, path: Path, line_format: LineFormat, request: DataRequest, notes: list[str]) -> None:
        self.name, self.spec, self.notes = line_format.name, line_format.spec, notes
        self.optimal_ne: dict[str, float] = {}
        self.path, self.format, self.limit = path, line_format, request.rows
        self.problems = Problems(path, notes, strict=request.strict)
        self.rows, times = self._count()
        self.is_heldout = self._split(times, heldout_fraction(request))

    def train_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch(self.chunks("train"), batch_size)

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch(self.chunks("heldout"), batch_size)

    def chunks(self, part: Part) -> Iterator[Rows]:
        block: list[Line] = []
        for row, line in enumerate(self._rows()):
            if self.is_heldout(row, line[1]) != (part == "heldout"):
                continue
            block.append(line)
            if len(block) == BLOCK:
                yield from self._parse(block)
                block = []
        if block:
            yield from self._parse(block)

    def _parse(self, block: list[Line]) -> Iterator[Rows]:
        rows = self.format.parse(block, self.problems)
        if len(rows):
            yield rows

    def _rows(self) -> Iterator[Line]:
        """Lines of the right structure, up to the limit."""
        count = 0
        for number, text in read_lines(self.path):
            if count == self.limit:
                return
            if number <= self.format.header_lines:
                continue
            problem = self.format.problem(text)
            if problem is not None:
                self.problems.add(number, problem)
                if len(self.problems.lines) > 1000 + count:
                    raise self._wrong_format(count)
                continue
            count += 1
            yield number, text

    def _wrong_format(self, count: int) -> DataError:
        return DataError(
            f"{self.path}: {count} rows of {self.name} found and {len(self.problems.lines)} malformed lines "
            f"({self.problems.summary()}); is it a file of another format?"
        )

    def _count(self) -> tuple[int, Counter[int]]:
        count, times, last, disorder = 0, Counter[int](), 0, 0
        for _, text in self._rows():
            count += 1
            time = self.format.time(text)
            if time is not None:
                times[time] += 1
                disorder += time < last
                last = time
        if count < 2 and self.problems.lines:
            raise self._wrong_format(count)
        if count < 2:
            raise DataError(f"{self.path}: got {count} rows, expected at least 2 (one to train on, one to hold out)")
        if disorder:
            self.notes.append(f"{disorder} rows of {self.path} are older than the row before; order is the file's")
        return count, times

    def _split(self, times: Counter[int], heldout: float) -> Callable[[int, bytes], bool]:
        """Whether a row is held out; all rows of one time stay together where the format has times."""
        wanted = self.rows * (1 - heldout)
        if len(times) < 2:
            first = min(max(1, round(wanted)), self.rows - 1)
            if times:
                self.notes.append("all rows have one time: the held-out rows are the last ones of the file")
            self.notes.append(f"{first} rows to train on, {self.rows - first} later ones held out")
            return lambda row, text: row >= first
        stamps = sorted(times)
        before = np.cumsum([times[t] for t in stamps])[:-1]
        cut = int(np.argmin(np.abs(before - wanted)))
        boundary = stamps[cut + 1]
        self.notes.append(f"{before[cut]} rows to train on, {self.rows - before[cut]} from {boundary} on held out")
        return lambda row, text: (self.format.time(text) or 0) >= boundary


def bucket_option(request: DataRequest) -> int:
    """Ids a categorical field is hashed to, id 0 for missing included: `extra["buckets"]`."""
    text = request.extra.get("buckets", str(DEFAULT_BUCKETS))
    if not text.isdigit() or int(text) < 2:
        raise DataError(f"data option buckets: got {text!r}, expected a number of ids >= 2, such as {DEFAULT_BUCKETS}")
    return int(text)


def hash_ids(values: list[list[bytes]], buckets: int) -> np.ndarray:
    """(N, F) ids in 1 .. buckets - 1, salted by field; 0 where the value is empty. The same in every process."""
    shape = (len(values), len(values[0]) if values else 0)
    crc = np.asarray([[zlib.crc32(v) for v in row] for row in values], dtype=np.uint64).reshape(shape)
    missing = np.asarray([[not v for v in row] for row in values], dtype=bool).reshape(shape)
    salt = (np.arange(shape[1], dtype=np.uint64) + np.uint64(1)) << np.uint64(32)
    mixed = crc + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    ids = 1 + ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(buckets - 1)).astype(np.int64)
    return np.where(missing, 0, ids)


def to_float(text: bytes) -> float | None:
    """None for text that is no number at all; NaN and Inf are numbers here, for `require` to find."""
    try:
        return float(text)
    except ValueError:
        return None


def require(path: Path, numbers: list[int], column: str, values: np.ndarray, *, low: float, high: float) -> None:
    """Every value finite and in [low, high], or a `DataError` with the first line, the column and the count."""
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= low) & (values <= high)))
    if bad.size:
        expected = "a finite number" if low == -np.inf else f"a number in [{low:g}, {high:g}]".replace("inf]", "inf)")
        raise DataError(
            f"{path} line {numbers[bad[0]]}, column {column}: got {values[bad[0]]:g}, expected {expected} "
            f"({bad.size} such rows among the {len(values)} read together); mend or remove them"
        )


def parse_labels(lines: list[Line], cells: list[bytes], problems: Problems) -> np.ndarray:
    """(N,) labels; NaN marks a row whose label is no number, reported as malformed.

    Raises:
        DataError: a label that is a number outside [0, 1], or NaN itself.
    """
    values = [to_float(cell) for cell in cells]
    for (number, _), cell, value in zip(lines, cells, values, strict=True):
        if value is None:
            problems.add(number, f"label {cell.decode(errors='replace')!r} is not a number")
    known = [i for i, v in enumerate(values) if v is not None]
    labels = np.asarray([np.nan if v is None else v for v in values])
    require(problems.path, [lines[i][0] for i in known], "label", labels[known], low=0.0, high=1.0)
    return labels
