"""`libsvm:PATH`: lines of `label index:value ... # comment`, label 0/1 or -1/+1, indices from 0 or 1 up.

Up to `DENSE_LIMIT` different indices, a row is a dense vector, absent ones 0. Beyond, a row is a bag of
feature tokens: each index (with its value's sign and size, unless that is 1) is hashed to one of `buckets`
ids and the row's tokens travel as its history. A weight stands in the comment: `# weight=2.5`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.data.rows import Rows, check_request
from mxfp8_recipe.ab.data.stream import (
    FileDataset,
    Line,
    Problems,
    bucket_option,
    find_file,
    hash_ids,
    read_lines,
    require,
    to_float,
)
from mxfp8_recipe.ab.types import DataRequest, FeatureSpec

DENSE_LIMIT = 512
MAX_TOKENS = 128

Pair = tuple[int, float]


class LibsvmFormat:
    """A `LineFormat`. `signed`: labels are -1/+1. `width`: 1 + the largest index, or None for bags of tokens."""

    name = "libsvm"
    header_lines = 0

    def __init__(
        self, *, width: int | None, tokens: int, signed: bool, buckets: int, weight_column: str | None
    ) -> None:
        self.width, self.signed, self.buckets, self.weight_column = width, signed, buckets, weight_column
        if width is not None:
            self.spec = FeatureSpec(num_dense=width, cardinalities=())
        else:
            self.spec = FeatureSpec(num_dense=0, cardinalities=(buckets,), history_field=0, max_history=tokens)

    def problem(self, line: bytes) -> str | None:
        parsed = parse_line(line)
        if isinstance(parsed, str):
            return parsed
        if self.weight_column is not None and parse_weight(line, self.weight_column) is None:
            return f"no '# {self.weight_column}=NUMBER' at its end"
        return None

    def time(self, line: bytes) -> None:
        return None

    def parse(self, lines: list[Line], problems: Problems) -> Rows:
        numbers = [number for number, _ in lines]
        parsed = [p for p in (parse_line(text) for _, text in lines) if not isinstance(p, str)]
        labels = np.asarray([label for label, _ in parsed])
        labels = np.where(labels == -1, 0.0, labels) if self.signed else labels
        require(problems.path, numbers, "label", labels, low=0.0, high=1.0)
        pairs = [row for _, row in parsed]
        _require_finite(problems.path, numbers, pairs)
        weights = np.ones(len(lines))
        if self.weight_column is not None:
            weights = np.asarray([parse_weight(text, self.weight_column) for _, text in lines], dtype=np.float64)
            require(problems.path, numbers, self.weight_column, weights, low=0.0, high=np.inf)
        return self._rows(pairs, labels, weights)

    def _rows(self, pairs: list[list[Pair]], labels: np.ndarray, weights: np.ndarray) -> Rows:
        if self.width is not None:
            dense = np.zeros((len(pairs), self.width), dtype=np.float32)
            for row, features in zip(dense, pairs, strict=True):
                for index, value in features:
                    row[index] = value
            sparse = np.zeros((len(pairs), 0), dtype=np.int64)
            return Rows(dense=dense, sparse=sparse, labels=labels[:, None], weights=weights[:, None])
        tokens = [[_token(*pair) for pair in row[-self.spec.max_history :]] for row in pairs]
        return Rows(
            dense=np.zeros((len(pairs), 0)),
            sparse=np.zeros((len(pairs), 1), dtype=np.int64),
            labels=labels[:, None],
            weights=weights[:, None],
            history=hash_ids([[t] for row in tokens for t in row], self.buckets).reshape(-1),
            history_offsets=np.append(0, np.cumsum([len(row) for row in tokens])),
        )


def parse_line(line: bytes) -> tuple[float, list[Pair]] | str:
    """Label and (index, value) pairs, or what is wrong with the line."""
    words = line.partition(b"#")[0].split()
    label = to_float(words[0]) if words else None
    if label is None:
        return f"label {words[0].decode(errors='replace')!r} is not a number" if words else "no label"
    pairs: list[Pair] = []
    for word in words[1:]:
        index, colon, text = word.partition(b":")
        value = to_float(text)
        if not colon or not index.isdigit() or value is None:
            return f"{word.decode(errors='replace')!r} is not index:value"
        pairs.append((int(index), value))
    return label, pairs


def parse_weight(line: bytes, name: str) -> float | None:
    """The number after `name=` in the line's comment, if there is one."""
    for word in line.partition(b"#")[2].split():
        key, equals, text = word.partition(b"=")
        if equals and key.decode(errors="replace") == name:
            return to_float(text)
    return None


def _token(index: int, value: float) -> bytes:
    """Binary features are their index; others are an index, a sign and a size in quarter octaves."""
    if value == 1.0:
        return b"%d" % index
    size = round(4 * np.log2(abs(value))) if value else 0
    return b"%d:%d:%d" % (index, int(np.sign(value)), size)


def _require_finite(path: Path, numbers: list[int], pairs: list[list[Pair]]) -> None:
    bad = [(n, i, v) for n, row in zip(numbers, pairs, strict=True) for i, v in row if not np.isfinite(v)]
    if bad:
        number, index, value = bad[0]
        raise DataError(
            f"{path} line {number}, column {index}: got {value:g}, expected a finite number "
            f"({len(bad)} such values among the {len(numbers)} rows read together); mend or remove them"
        )


def measure(path: Path, limit: int | None) -> tuple[int, int, bool]:
    """Largest index, most features in a row, and whether there is a label of -1, over the first `limit` rows."""
    largest, most, signed, rows = 0, 0, False, 0
    for _, text in read_lines(path):
        if rows == limit:
            break
        parsed = parse_line(text)
        if isinstance(parsed, str):
            continue
        rows += 1
        label, pairs = parsed
        signed |= label == -1
        most = max(most, len(pairs))
        largest = max(largest, max((index for index, _ in pairs), default=0))
    return largest, most, signed


def load(request: DataRequest) -> FileDataset:
    """The data set `libsvm:PATH`; `extra["buckets"]` sets the ids a token is hashed to."""
    check_request(request, "libsvm", options=("buckets",))
    path = find_file(request, "libsvm")
    largest, most, signed = measure(path, request.rows)
    width = largest + 1 if largest < DENSE_LIMIT else None
    notes = []
    if width is None:
        notes.append(f"indices up to {largest}: features are hashed tokens that travel as the row's history")
        if most > MAX_TOKENS:
            notes.append(f"rows of more than {MAX_TOKENS} features (up to {most}) keep their last {MAX_TOKENS}")
    line_format = LibsvmFormat(
        width=width,
        tokens=max(1, min(most, MAX_TOKENS)),
        signed=signed,
        buckets=bucket_option(request),
        weight_column=request.weight_column,
    )
    return FileDataset(path, line_format, request, notes)
