"""Brings the rows of prediction files together: seed by seed, in time order; what does not match is told.

Labels, weights, segments and times come from the first file and must be the same in the others. The others' columns are
read one at a time, compared and dropped, so that memory holds one file and the predictions of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mxfp8_recipe.ab.compare_files import CompareError, PredictionFile, Predictions, release_unused

EXAMPLES = 3
CHUNK = 1 << 18


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
    id: np.ndarray | None
    seed: np.ndarray | None

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
    segments: list[str] = []
    if rows.segment is not None:
        names, codes = np.unique(rows.segment, return_inverse=True)
        rows.segment, segments = codes.astype(np.int32), [_name(n) for n in names]
    release_unused()
    return Aligned(rows, [str(f.path) for f in (first, *others)], seeds, segments, notes)


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
    here, there = _Keys(rows.path, rows.id, rows.seed), _Keys(other.path, other.read("id"), other.read("seed"))
    keys, other_keys = _key_columns(here, there)
    _unique(here, keys)
    if len(keys) == len(other_keys) and _alike(here, there, keys, other_keys, np.arange(len(keys))).all():
        return None, []
    _unique(there, other_keys)
    return _join(rows, here, there, keys, other_keys)


def _join(
    rows: Predictions, here: _Keys, there: _Keys, keys: np.ndarray, other_keys: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    place = _places(keys, other_keys)
    found = _alike(here, there, keys, other_keys, place)
    if not found.any():
        here_ids, there_ids = _names(here, np.arange(len(here))), _names(there, np.arange(len(there)))
        raise CompareError(
            f"{there.path}: none of its {len(there)} rows is in {here.path}: {there_ids}; there: {here_ids}"
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


def _alike(here: _Keys, there: _Keys, keys: np.ndarray, other_keys: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Which rows are those at `place` of the other file: equal keys, and of text the text itself, some at a time."""
    found = other_keys[place] == keys
    if not _integers(here.id, there.id):
        assert here.id is not None
        assert there.id is not None
        for start in range(0, len(found), CHUNK):
            part = slice(start, start + CHUNK)
            found[part] &= here.id[part].astype(bytes) == there.id[place[part]].astype(bytes)
    return found


def _lost_seeds(has: _Keys, lacks: _Keys, kept: np.ndarray) -> list[str]:
    """Trainings of one file of which no row is left: to drop one that failed would flatter its recipe."""
    if has.seed is None:
        return []
    lost = np.setdiff1d(np.unique(has.seed), np.unique(has.seed[kept]))
    names = ", ".join(_name(seed) for seed in lost[:EXAMPLES]) + (", ..." if len(lost) > EXAMPLES else "")
    left_out = f"{len(lost)} {'seed' if len(lost) == 1 else 'seeds'} of {has.path}, left out: {names}"
    return [f"{lacks.path} has no row of {left_out}; a training that failed must not be missing"] if len(lost) else []


def _places(keys: np.ndarray, other_keys: np.ndarray) -> np.ndarray:
    """A row of the other file for each row: its own where there is one. Sorted needles keep the search in cache."""
    order = np.argsort(other_keys)
    mine = np.argsort(keys)
    found = np.searchsorted(other_keys[order], keys[mine])
    np.minimum(found, len(order) - 1, out=found)
    place = np.empty_like(mine)
    place[mine] = order[found]
    return place


def _key_columns(here: _Keys, there: _Keys) -> tuple[np.ndarray, np.ndarray]:
    """One integer a row: equal for equal seed and id."""
    ids, other_ids = _codes(here.id, there.id)
    if here.seed is None:
        return ids, other_ids
    seeds, other_seeds = _small(*_codes(here.seed, there.seed))
    if not _integers(here.id, there.id):
        return ids ^ seeds, other_ids ^ other_seeds
    if min(ids.min(), other_ids.min()) < 0 or max(ids.max(), other_ids.max()) > 1 << 40:
        ids, other_ids = _small(ids, other_ids)
    width = int(max(ids.max(), other_ids.max())) + 1
    return seeds * width + ids, other_seeds * width + other_ids


def _codes(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Integers as they are; text as 64 mixed bits, since ranks of text take minutes and gigabytes.

    Two of n texts share their bits by chance in n^2 / 2^65 of all files, 3 in a million for 10,000,000 rows. Two of one
    file are then reported as one id that occurs twice; a row of one file is never taken for a row of the other, since
    `_alike` compares the texts themselves.
    """
    assert a is not None
    assert b is not None
    if _integers(a, b):
        return a.astype(np.int64, copy=False), b.astype(np.int64, copy=False)
    a, b = a.astype(bytes, copy=False), b.astype(bytes, copy=False)
    words = -(-max(a.dtype.itemsize, b.dtype.itemsize) // 8)
    return _mixed(a, words), _mixed(b, words)


def _integers(*columns: np.ndarray | None) -> bool:
    return all(c is not None and c.dtype.kind in "iu" for c in columns)


def _mixed(text: np.ndarray, words: int) -> np.ndarray:
    """The mixer of SplitMix64 (Steele et al. 2014) over each text's words of eight bytes, some rows at a time."""
    out = np.empty(len(text), dtype=np.uint64)
    for start in range(0, len(text), CHUNK):
        part = text[start : start + CHUNK].astype(f"S{8 * words}").view(np.uint64).reshape(-1, words)
        bits = np.zeros(len(part), dtype=np.uint64)
        for word in part.T:
            bits = (bits ^ word) + np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits ^= bits >> np.uint64(31)
        out[start : start + CHUNK] = bits
    return out.view(np.int64)


def _small(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of both columns as ranks from 0."""
    names = np.unique(np.concatenate([np.unique(a), np.unique(b)]))
    return np.searchsorted(names, a), np.searchsorted(names, b)


def _unique(found: _Keys, keys: np.ndarray) -> None:
    ordered = np.sort(keys)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeats):
        repeats = np.unique(repeats)
        examples = np.array([np.flatnonzero(keys == key)[0] for key in repeats[: EXAMPLES + 1]])
        raise CompareError(
            f"{found.path}: column id: {len(repeats)} ids occur more than once, such as "
            f"{_names(found, examples)}; expected one row an id"
            + (" and seed" if found.seed is not None else "; a seed column tells trainings apart")
        )


def _same(rows: Predictions, column: str, values: np.ndarray, other: PredictionFile) -> None:
    """A column that describes the rows must agree."""
    mine = getattr(rows, column)
    if mine is None:
        if column == "weight":
            raise CompareError(f"{rows.path}: no column 'weight', which {other.path} has; weights must be the same")
        return
    numbers = "iuf"
    alike = mine.dtype.kind in numbers and values.dtype.kind in numbers
    differ = np.flatnonzero(mine != values if alike else mine.astype(bytes) != values.astype(bytes))
    if column in ("label", "weight"):  # written with the digits of single precision they are still the same
        differ = differ[~np.isclose(mine[differ], values[differ], rtol=1e-6, atol=0)]
    if len(differ):
        row = int(differ[0])
        remedy = "are these the same rows?" if rows.id is not None else "add an id column if rows differ in order"
        raise CompareError(
            f"{other.path}: column {column}: {len(differ)} of {len(rows)} values differ from {rows.path}, first at "
            f"{_where(_Keys(rows.path, rows.id, rows.seed), row)}: {_name(values[row])} instead of {_name(mine[row])}; "
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
    return ", ".join(_where(found, int(row)) for row in rows[:EXAMPLES]) + (", ..." if len(rows) > EXAMPLES else "")


def _where(found: _Keys, row: int) -> str:
    if found.id is None:
        return f"row {row + 1}"
    return f"id {_name(found.id[row])}" + (f" of seed {_name(found.seed[row])}" if found.seed is not None else "")


def _name(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
