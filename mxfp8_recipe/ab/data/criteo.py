"""`criteo:PATH`: Criteo Kaggle Display Advertising `train.txt`.

A line is a label, 13 counts and 26 hashed categories, tab-separated, empty where missing; rows are in time
order. A count becomes a signed log1p and a flag that it is missing; a category is hashed to `buckets` ids.
"""

from __future__ import annotations

import numpy as np

from mxfp8_recipe.ab.data.rows import Rows, check_request
from mxfp8_recipe.ab.data.stream import (
    FileDataset,
    Line,
    Problems,
    bucket_option,
    find_file,
    hash_ids,
    parse_labels,
    require,
    to_float,
)
from mxfp8_recipe.ab.types import DataRequest, FeatureSpec

NUM_COUNTS, NUM_CATEGORIES = 13, 26
TABS = NUM_COUNTS + NUM_CATEGORIES


class CriteoFormat:
    """A `LineFormat`."""

    name = "criteo"
    header_lines = 0

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.spec = FeatureSpec(num_dense=2 * NUM_COUNTS, cardinalities=(buckets,) * NUM_CATEGORIES)

    def problem(self, line: bytes) -> str | None:
        tabs = line.count(b"\t")
        return None if tabs == TABS else f"{tabs + 1} columns, expected {TABS + 1} separated by tabs"

    def time(self, line: bytes) -> None:
        return None

    def parse(self, lines: list[Line], problems: Problems) -> Rows:
        cells = [text.split(b"\t") for _, text in lines]
        labels = parse_labels(lines, [row[0] for row in cells], problems)
        counts, missing = np.zeros((len(lines), NUM_COUNTS)), np.zeros((len(lines), NUM_COUNTS))
        usable = ~np.isnan(labels)
        for i, ((number, _), row) in enumerate(zip(lines, cells, strict=True)):
            for c, cell in enumerate(row[1 : 1 + NUM_COUNTS]):
                value = to_float(cell) if cell else 0.0
                if value is None:
                    problems.add(number, f"column I{c + 1}: {cell.decode(errors='replace')!r} is not a number")
                    usable[i] = False
                    break
                counts[i, c], missing[i, c] = value, not cell
        keep = np.flatnonzero(usable)
        numbers, counts, missing = [lines[i][0] for i in keep], counts[keep], missing[keep]
        for c in range(NUM_COUNTS):
            require(problems.path, numbers, f"I{c + 1}", counts[:, c], low=-np.inf, high=np.inf)
        return Rows(
            dense=np.concatenate([np.sign(counts) * np.log1p(np.abs(counts)), missing], axis=1),
            sparse=hash_ids([cells[i][1 + NUM_COUNTS :] for i in keep], self.buckets).reshape(-1, NUM_CATEGORIES),
            labels=labels[keep, None],
            weights=np.ones((len(keep), 1)),
        )


def load(request: DataRequest) -> FileDataset:
    """The data set `criteo:PATH`; `extra["buckets"]` sets the ids a category is hashed to."""
    check_request(request, "criteo", options=("buckets",), weights="a Criteo file does not name its columns")
    line_format = CriteoFormat(bucket_option(request))
    notes = ["Criteo Kaggle Display Advertising data: under Criteo's terms of use; Criteo sub-sampled it"]
    return FileDataset(find_file(request, "criteo"), line_format, request, notes)
