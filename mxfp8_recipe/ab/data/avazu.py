"""`avazu:PATH`: the Avazu click-through CSV, header `id,click,hour,C1,banner_pos,...`, hour as YYMMDDHH.

Every column but id, click, hour and the weight column is a category hashed to `buckets` ids; the hour of
the day is one more. The held-out rows begin at an hour. Segments are the banner positions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError, unknown_name
from mxfp8_recipe.ab.data.rows import Rows, check_request
from mxfp8_recipe.ab.data.stream import (
    FileDataset,
    Line,
    Problems,
    bucket_option,
    find_file,
    hash_ids,
    parse_labels,
    read_lines,
    require,
    to_float,
)
from mxfp8_recipe.ab.types import DataRequest, FeatureSpec

REQUIRED = ("click", "hour")
SEGMENT_COLUMN, NUM_SEGMENTS = "banner_pos", 16


class AvazuFormat:
    """A `LineFormat` whose columns the header names."""

    name = "avazu"
    header_lines = 1

    def __init__(self, header: list[str], buckets: int, weight_column: str | None) -> None:
        aside = {"id", *REQUIRED, weight_column}
        self.buckets, self.columns = buckets, len(header)
        self.click, self.hour = header.index("click"), header.index("hour")
        self.weight = None if weight_column is None else header.index(weight_column)
        self.weight_column = weight_column
        self.segment = header.index(SEGMENT_COLUMN) if SEGMENT_COLUMN in header else None
        self.fields = [i for i, name in enumerate(header) if name not in aside]
        self.spec = FeatureSpec(num_dense=0, cardinalities=(25, *(buckets for _ in self.fields)))

    def problem(self, line: bytes) -> str | None:
        commas = line.count(b",")
        if commas + 1 != self.columns:
            return f"{commas + 1} columns, expected {self.columns} separated by commas"
        hour = line.split(b",", self.hour + 1)[self.hour]
        if len(hour) != 8 or not hour.isdigit() or int(hour[6:]) > 23:
            return f"hour {hour.decode(errors='replace')!r} is not YYMMDDHH"
        return None

    def time(self, line: bytes) -> int:
        return int(line.split(b",", self.hour + 1)[self.hour])

    def parse(self, lines: list[Line], problems: Problems) -> Rows:
        cells = [text.split(b",") for _, text in lines]
        labels = parse_labels(lines, [row[self.click] for row in cells], problems)
        weights = self._weights(lines, cells, problems)
        keep = np.flatnonzero(~np.isnan(labels) & ~np.isnan(weights))
        cells = [cells[i] for i in keep]
        hour = np.asarray([1 + int(row[self.hour][6:]) for row in cells], dtype=np.int64)
        hashed = hash_ids([[row[f] for f in self.fields] for row in cells], self.buckets)
        return Rows(
            dense=np.zeros((len(keep), 0)),
            sparse=np.concatenate([hour[:, None], hashed.reshape(len(keep), len(self.fields))], axis=1),
            labels=labels[keep, None],
            weights=weights[keep, None],
            segments=None if self.segment is None else np.asarray([_segment(row[self.segment]) for row in cells]),
        )

    def _weights(self, lines: list[Line], cells: list[list[bytes]], problems: Problems) -> np.ndarray:
        """(N,) weights; NaN marks a row reported as malformed."""
        if self.weight is None:
            return np.ones(len(lines))
        values = [to_float(row[self.weight]) for row in cells]
        for (number, _), value in zip(lines, values, strict=True):
            if value is None:
                problems.add(number, f"weight column {self.weight_column!r} is not a number")
        known = [i for i, v in enumerate(values) if v is not None]
        weights = np.asarray([np.nan if v is None else v for v in values])
        numbers = [lines[i][0] for i in known]
        require(problems.path, numbers, str(self.weight_column), weights[known], low=0.0, high=np.inf)
        return weights


def _segment(cell: bytes) -> int:
    """The banner position; the last segment collects the odd ones."""
    return min(int(cell), NUM_SEGMENTS - 1) if cell.isdigit() else NUM_SEGMENTS - 1


def load(request: DataRequest) -> FileDataset:
    """The data set `avazu:PATH`; `extra["buckets"]` sets the ids a category is hashed to."""
    check_request(request, "avazu", options=("buckets",))
    path = find_file(request, "avazu")
    line_format = AvazuFormat(read_header(path, request.weight_column), bucket_option(request), request.weight_column)
    notes = ["Avazu click-through data: under the terms of its Kaggle competition; clicks and non-clicks sub-sampled"]
    return FileDataset(path, line_format, request, notes)


def read_header(path: Path, weight_column: str | None) -> list[str]:
    """Names of the columns, checked for those the format and the weights need."""
    number, text = next(read_lines(path), (0, b""))
    header = text.decode(errors="replace").split(",")
    missing = [name for name in REQUIRED if name not in header]
    if missing or number != 1:
        raise DataError(
            f"{path} line 1: header is {text[:80].decode(errors='replace')!r}, expected id,click,hour,... "
            f"(no {' nor '.join(missing or REQUIRED)})"
        )
    if weight_column is not None and (weight_column not in header or weight_column in ("id", *REQUIRED)):
        raise unknown_name(f"{path} weight_column", weight_column, [h for h in header if h not in ("id", *REQUIRED)])
    return header
