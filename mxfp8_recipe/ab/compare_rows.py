"""Brings the rows of prediction files together: seed by seed, in time order; what does not match is told.

Labels, weights, segments and times come from the first file and must be the same in the others. The others' columns are
read one at a time, compared and dropped, so that memory holds one file and the predictions of the rest. Of ids that are
text it holds eight bytes each (`compare_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mxfp8_recipe.ab.compare_files import CompareError, PredictionFile, Predictions, called
from mxfp8_recipe.ab.compare_ids import BLOCK, TextIds, blocks_of, mixed

EXAMPLES = 3


@dataclass
class Aligned:
    """Predictions of the same rows in the same order.

    Attributes:
        rows: rows of a seed stand together, in time order within it; `rows.segment` holds codes, or None.
        paths: of the files of `rows.prediction` and `rows.others`.
        seeds: name of each seed and the slice of rows that is its own.
        segments: name of each segment code.
        notes: what did not match, with counts and examples.
    """

    rows: Predictions
    paths: list[str]
    seeds: dict[str, slice]
    segments: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass
class _Keys:
    """What tells the rows of a file apart."""

    path: object
    id: np.ndarray | TextIds | None
    seed: np.ndarray | None
    names: Mapping[str, str]

    def __len__(self) -> int:
        return 0 if self.id is None else len(self.id)


def align(first: PredictionFile, others: list[PredictionFile]) -> Aligned:
    """Join on seed and id where there are ids, else by position; sort by seed and time.

    Raises:
        CompareError: files that do not describe the same rows.
    """
    rows, notes = first.read_all(), []
    for other in others:
        notes += _add(rows, other)
    rows.id = None
    seeds = _sort(rows)
    _check_weights(first, rows, seeds)
    segments: list[str] = []
    if rows.segment is not None:
        names, codes = np.unique(rows.segment, return_inverse=True)
        rows.segment, segments = codes.astype(np.int32), [_name(n) for n in names]
    return Aligned(rows, [str(f.path) for f in (first, *others)], seeds, segments, notes)


def _check_weights(first: PredictionFile, rows: Predictions, seeds: dict[str, slice]) -> None:
    """Each training needs a row that counts."""
    idle = [] if rows.weight is None else [seed for seed, where in seeds.items() if not rows.weight[where].any()]
    if idle:
        of = f" of seed {', '.join(idle[:EXAMPLES])}" if "seed" in first.columns else ""
        raise CompareError(
            f"{first.where('weight')}: all values{of} are 0, so that no row counts; give weights, or leave the column "
            "or these rows out"
        )


def _add(rows: Predictions, other: PredictionFile) -> list[str]:
    """Append the other file's predictions of the rows; rows that it lacks are dropped from all."""
    for column in ("id", "seed"):
        if (getattr(rows, column) is None) != (column not in other.columns):
            has, lacks = (rows.path, other.path) if column not in other.columns else (other.path, rows.path)
            raise CompareError(f"{lacks}: no column {column!r}, which {has} has; rows cannot be matched")
    order, notes = _matched(rows, other)
    for column in ("label", "weight", "segment", "time"):
        values = other.read(column)
        if values is not None:
            _same(rows, column, values if order is None else values[order], other)
        elif column == "weight" and rows.weight is not None:
            raise CompareError(f"{other.path}: no column 'weight', which {rows.path} has; weights must be the same")
    predictions = other.read("prediction")
    assert predictions is not None
    rows.others.append(predictions if order is None else predictions[order])
    return notes


def _matched(rows: Predictions, other: PredictionFile) -> tuple[np.ndarray | None, list[str]]:
    """Where in the other file each row is, None for in the same place, and what does not match."""
    if rows.id is None:
        if len(rows) != other.rows:
            raise CompareError(
                f"{other.path}: got {other.rows} rows, expected the {len(rows)} of {rows.path}; add an id column to "
                "both to match rows"
            )
        seed = other.read("seed")
        if seed is not None:
            _same(rows, "seed", seed, other)
        return None, []
    here = _Keys(rows.path, rows.id, rows.seed, rows.names)
    there = _Keys(other.path, other.read_ids(), other.read("seed"), other.names)
    _check_signs("id", here, there, here.id, there.id)
    _check_signs("seed", here, there, here.seed, there.seed)
    if isinstance(here.id, TextIds) or isinstance(there.id, TextIds):
        here.id, there.id = _text(here.id), _text(there.id)
    place = _places(here, there)
    found = place >= 0
    if isinstance(here.id, TextIds) and isinstance(there.id, TextIds):
        found &= here.id.alike(there.id, place)
    if len(here) == len(there) and found.all() and (place[1:] > place[:-1]).all():
        return None, []
    return _join(rows, here, there, place, found)


def _check_signs(column: str, here: _Keys, there: _Keys, mine: object, others: object) -> None:
    """Rows are joined on 64 bits, which integers from 2^63 on share with negative ones."""
    for a, b in ((mine, others), (others, mine)):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            continue
        if a.dtype == np.uint64 and b.dtype.kind == "i" and a.max() >= 1 << 63 and b.min() < 0:
            types = [v.dtype for v in (mine, others) if isinstance(v, np.ndarray)]
            raise CompareError(
                f"{there.path}: {called(column, there.names)}: got values of type {types[1]}, expected {types[0]} as "
                f"in {here.path}: some are negative in one and from 2^63 on in the other; cast one to the other's type"
            )


def _join(
    rows: Predictions, here: _Keys, there: _Keys, place: np.ndarray, found: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Drop the rows that were not found; where the others are, and what did not match."""
    if not found.any():
        here_ids, there_ids = _names(here, np.arange(len(here))), _names(there, np.arange(len(there)))
        raise CompareError(
            f"{there.path}: none of its {len(there)} rows is in {here.path}: {there_ids}; there: {here_ids}; write "
            "ids alike in both, or say --column id=NAME for another column"
        )
    notes = []
    if not found.all():
        missing = np.flatnonzero(~found)
        notes += _lost_seeds(here, there, found)
        notes.append(f"{len(missing)} rows of {here.path} are not in {there.path}, left out: {_names(here, missing)}")
    if found.sum() < len(there):
        unused = np.ones(len(there), dtype=bool)
        unused[place[found]] = False
        extra = np.flatnonzero(unused)
        notes += _lost_seeds(there, here, ~unused)
        notes.append(
            f"{len(extra)} rows of {there.path} are none of the rows of {here.path} that are compared, left out: "
            f"{_names(there, extra)}"
        )
    if not found.all():
        rows.take(np.flatnonzero(found))
        place = place[found]
    return place, notes


def _lost_seeds(has: _Keys, lacks: _Keys, kept: np.ndarray) -> list[str]:
    """Trainings of one file of which no row is left: to drop one that failed would flatter its recipe."""
    if has.seed is None:
        return []
    lost = np.setdiff1d(np.unique(has.seed), np.unique(has.seed[kept]))
    names = ", ".join(_name(seed) for seed in lost[:EXAMPLES]) + (", ..." if len(lost) > EXAMPLES else "")
    left_out = f"{len(lost)} {'seed' if len(lost) == 1 else 'seeds'} of {has.path}, left out: {names}"
    return [f"{lacks.path} has no row of {left_out}; a training that failed must not be missing"] if len(lost) else []


def _places(here: _Keys, there: _Keys) -> np.ndarray:
    """A row of the other file for each row, by equal keys; -1 for none."""
    keys, other_keys = _key_columns(here, there)
    same_order = np.array_equal(keys, other_keys)
    needles, order = _sorted(here, keys)
    if same_order:
        return np.arange(len(order))
    del keys
    hay, other_order = _sorted(there, other_keys)
    del other_keys
    place = np.empty_like(order)
    for start in range(0, len(order), BLOCK):  # needles in order keep the search in cache
        part = slice(start, start + BLOCK)
        at = np.searchsorted(hay, needles[part])
        np.minimum(at, len(hay) - 1, out=at)
        place[order[part]] = np.where(hay[at] == needles[part], other_order[at], -1)
    return place


def _sorted(found: _Keys, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys in ascending order and the rows they are of; an error where one occurs twice."""
    order = np.argsort(keys)
    keys = keys[order]
    again = np.flatnonzero(keys[1:] == keys[:-1])
    if len(again):
        repeats = np.unique(keys[again])
        examples = np.array([order[keys == key].min() for key in repeats[: EXAMPLES + 1]])
        raise CompareError(
            f"{found.path}: {called('id', found.names)}: {len(repeats)} ids occur more than once, such as "
            f"{_names(found, examples)}; expected one row an id"
            + (" and seed" if found.seed is not None else "; a seed column tells trainings apart")
        )
    return keys, order


def _key_columns(here: _Keys, there: _Keys) -> tuple[np.ndarray, np.ndarray]:
    """One integer a row: equal for equal seed and id."""
    text = isinstance(here.id, TextIds)
    ids, other_ids = (_bits(k.id) for k in (here, there))
    if here.seed is None:
        return ids, other_ids
    assert there.seed is not None
    seeds, other_seeds = _small(*_codes(here.seed, there.seed))
    if text:
        return ids ^ seeds, other_ids ^ other_seeds
    if min(ids.min(), other_ids.min()) < 0 or max(ids.max(), other_ids.max()) > 1 << 40:
        ids, other_ids = _small(ids, other_ids)
    width = np.int64(max(ids.max(), other_ids.max())) + 1
    return seeds * width + ids, other_seeds * width + other_ids


def _text(ids: np.ndarray | TextIds | None) -> TextIds:
    assert ids is not None
    return ids if isinstance(ids, TextIds) else TextIds.of_array(ids)


def _bits(ids: np.ndarray | TextIds | None) -> np.ndarray:
    assert ids is not None
    return ids.bits if isinstance(ids, TextIds) else ids.astype(np.int64, copy=False)


def _codes(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seeds: integers as they are, text as 64 mixed bits."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return a.astype(np.int64, copy=False), b.astype(np.int64, copy=False)
    mine, others = (np.concatenate([mixed(block) for block in blocks_of(values)]) for values in (a, b))
    return mine, others


def _small(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of both columns as ranks from 0, int32."""
    parts = [values[start : start + BLOCK] for values in (a, b) for start in range(0, len(values), BLOCK)]
    names = _distinct(np.concatenate([_distinct(part) for part in parts]))
    return _ranks(names, a), _ranks(names, b)


def _distinct(values: np.ndarray) -> np.ndarray:
    """In ascending order; `np.unique` alone takes ten times as long where ten million values differ."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]


def _ranks(names: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where each value is among the names; needles in order keep the search in cache."""
    out = np.empty(len(values), dtype=np.int32)
    for start in range(0, len(values), BLOCK):
        needles, needle = np.unique(values[start : start + BLOCK], return_inverse=True)
        out[start : start + BLOCK] = np.searchsorted(names, needles)[needle]
    return out


def _same(rows: Predictions, column: str, values: np.ndarray, other: PredictionFile) -> None:
    """A column that describes the rows must agree."""
    mine = getattr(rows, column)
    if mine is None:
        if column == "weight":
            raise CompareError(f"{rows.path}: no column 'weight', which {other.path} has; weights must be the same")
        return
    numbers = "iuf"
    alike = mine.dtype.kind in numbers and values.dtype.kind in numbers
    differ = np.flatnonzero(
        mine != values if alike else mine.astype(bytes, copy=False) != values.astype(bytes, copy=False)
    )
    if column in ("label", "weight"):  # written with the digits of single precision they are still the same
        differ = differ[~np.isclose(mine[differ], values[differ], rtol=1e-6, atol=0)]
    if len(differ):
        row = int(differ[0])
        [where] = _where(_Keys(rows.path, rows.id, rows.seed, rows.names), differ[:1])
        remedy = "are these the same rows?" if rows.id is not None else "add an id column if rows differ in order"
        raise CompareError(
            f"{other.where(column)}: {len(differ)} of {len(rows)} values differ from {rows.path}, first at "
            f"{where}: {_name(values[row])} instead of {_name(mine[row])}; "
            f"{remedy}"
        )


def _sort(rows: Predictions) -> dict[str, slice]:
    """Seed by seed, each in time order; where each seed's rows are. Seed and time are dropped."""
    if rows.seed is None:
        order = None if rows.time is None else np.argsort(rows.time, kind="stable")
        seeds = {"all": slice(0, len(rows))}
    else:
        names, codes = np.unique(rows.seed, return_inverse=True)
        order = np.argsort(codes, kind="stable") if rows.time is None else np.lexsort((rows.time, codes))
        sizes = np.bincount(codes)
        stops = np.cumsum(sizes)
        seeds = {_name(n): slice(int(e - s), int(e)) for n, s, e in zip(names, sizes, stops, strict=True)}
    rows.seed = rows.time = None
    if order is not None and not (order[1:] > order[:-1]).all():
        rows.take(order)
    return seeds


def _names(found: _Keys, rows: np.ndarray) -> str:
    return ", ".join(_where(found, rows[:EXAMPLES])) + (", ..." if len(rows) > EXAMPLES else "")


def _where(found: _Keys, rows: np.ndarray) -> list[str]:
    """What a few rows are called."""
    if found.id is None:
        return [f"row {row + 1}" for row in rows]
    ids = found.id.at(rows) if isinstance(found.id, TextIds) else found.id[rows]
    seeds = [""] * len(rows) if found.seed is None else [f" of seed {_name(seed)}" for seed in found.seed[rows]]
    return [f"id {_name(i)}{seed}" for i, seed in zip(ids, seeds, strict=True)]


def _name(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
