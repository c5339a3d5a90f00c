"""Brings the rows of prediction files together: seed by seed, in time order; what does not match is told.

Labels, weights, segments and times come from the first file and must be the same in the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mxfp8_recipe.ab.compare_files import CompareError, Predictions

EXAMPLES = 3


@dataclass
class Aligned:
    """Files with the same rows in the same order.

    Attributes:
        first, others: rows of a seed stand together, in time order within it.
        seeds: name of each seed and the slice of rows that is its own.
        segments: name of each segment code; `first.segment` holds the codes.
        notes: what did not match, with counts and examples.
    """

    first: Predictions
    others: list[Predictions]
    seeds: dict[str, slice]
    segments: list[str]
    notes: list[str] = field(default_factory=list)


def align(first: Predictions, others: list[Predictions]) -> Aligned:
    """Join on seed and id where there are ids, else by position; sort by seed and time.

    Raises:
        CompareError: files that do not describe the same rows.
    """
    notes = [note for other in others for note in _match(first, other)]
    if len(others) > 1 and any(len(o) != len(first) for o in others):
        # A later file lacked rows that an earlier one had: go over all of them once more.
        notes += [note for other in others for note in _match(first, other)]
    for other in others:
        _same(first, other)
    seeds = _sort(first, others)
    segments: list[str] = []
    if first.segment is not None:
        names, codes = np.unique(first.segment, return_inverse=True)
        first.segment, segments = codes.astype(np.int32), [_name(n) for n in names]
    return Aligned(first, others, seeds, segments, notes)


def _match(first: Predictions, other: Predictions) -> list[str]:
    """Give `other` the rows and the order of `first`, dropping from both what the other lacks."""
    for column in ("id", "seed"):
        if (getattr(first, column) is None) != (getattr(other, column) is None):
            has, lacks = (first, other) if getattr(first, column) is not None else (other, first)
            raise CompareError(f"{lacks.path}: no column {column!r}, which {has.path} has; rows cannot be matched")
    if first.id is None:
        if len(first) != len(other):
            raise CompareError(
                f"{other.path}: got {len(other)} rows, expected the {len(first)} of {first.path}; add an id column to "
                "both to match rows"
            )
        return []
    if _equal(first.id, other.id) and (first.seed is None or _equal(first.seed, other.seed)):
        _unique(first, _keys(first, other)[0])
        return []
    return _join(first, other)


def _join(first: Predictions, other: Predictions) -> list[str]:
    keys, other_keys = _keys(first, other)
    _unique(first, keys)
    _unique(other, other_keys)
    order = np.argsort(other_keys, kind="stable")
    place = np.searchsorted(other_keys, keys, sorter=order)
    place = order[np.minimum(place, len(order) - 1)]
    found = other_keys[place] == keys
    only_first, only_other = int((~found).sum()), len(other) - int(found.sum())
    if not found.any():
        here, there = _names(other, np.arange(len(other))), _names(first, np.arange(len(first)))
        raise CompareError(f"{other.path}: none of its {len(other)} rows is in {first.path}: {here}; there: {there}")
    notes = []
    if only_first:
        notes.append(_left_out(only_first, first, other, np.flatnonzero(~found)))
    if only_other:
        unused = np.ones(len(other), dtype=bool)
        unused[place[found]] = False
        notes.append(_left_out(only_other, other, first, np.flatnonzero(unused)))
    if only_first:
        first.take(np.flatnonzero(found))
    other.take(place[found])
    return notes


def _left_out(count: int, here: Predictions, there: Predictions, rows: np.ndarray) -> str:
    return f"{count} rows of {here.path} are not in {there.path}, left out: {_names(here, rows)}"


def _keys(first: Predictions, other: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """One integer a row: equal for equal seed and id."""
    ids, other_ids = _codes(first.id, other.id)
    if first.seed is None:
        return ids, other_ids
    seeds, other_seeds = _codes(first.seed, other.seed)
    if ids.min(initial=0) < 0 or other_ids.min(initial=0) < 0 or max(ids.max(), other_ids.max()) > 1 << 50:
        codes = np.unique(np.concatenate([ids, other_ids]), return_inverse=True)[1]
        ids, other_ids = codes[: len(ids)], codes[len(ids) :]
    width = int(max(ids.max(), other_ids.max())) + 1
    codes = np.unique(np.concatenate([seeds, other_seeds]), return_inverse=True)[1]
    return codes[: len(seeds)] * width + ids, codes[len(seeds) :] * width + other_ids


def _codes(a: np.ndarray | None, b: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Integers as they are; text as its rank in both columns together."""
    assert a is not None
    assert b is not None
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return a.astype(np.int64, copy=False), b.astype(np.int64, copy=False)
    both = np.concatenate([a.astype(bytes), b.astype(bytes)])
    codes = np.unique(both, return_inverse=True)[1]
    return codes[: len(a)], codes[len(a) :]


def _unique(found: Predictions, keys: np.ndarray) -> None:
    ordered = np.sort(keys)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeats):
        examples = np.flatnonzero(np.isin(keys, repeats[:EXAMPLES]))[: 2 * EXAMPLES]
        raise CompareError(
            f"{found.path}: column id: {len(np.unique(repeats))} ids occur more than once (such as "
            f"{_names(found, examples)}); expected one row an id"
            + (" and seed" if found.seed is not None else "; a seed column tells trainings apart")
        )


def _same(first: Predictions, other: Predictions) -> None:
    """Columns that describe the row must agree."""
    for column in ("label", "weight", "segment", "seed", "time"):
        a, b = getattr(first, column), getattr(other, column)
        if a is None or b is None:
            if column == "weight" and a is not b:
                has, lacks = (first, other) if a is not None else (other, first)
                raise CompareError(f"{lacks.path}: no column 'weight', which {has.path} has; weights must be the same")
            continue
        differ = (
            np.flatnonzero(a != b) if a.dtype.kind == b.dtype.kind else np.flatnonzero(a.astype(str) != b.astype(str))
        )
        if len(differ):
            row = int(differ[0])
            remedy = "are these the same rows?" if first.id is not None else "add an id column if rows differ in order"
            raise CompareError(
                f"{other.path}: column {column}: {len(differ)} of {len(first)} values differ from {first.path} (row "
                f"{_where(first, row)}: {_name(b[row])} instead of {_name(a[row])}); {remedy}"
            )
        if column != "seed":
            setattr(other, column, None)


def _sort(first: Predictions, others: list[Predictions]) -> dict[str, slice]:
    """Seed by seed, each in time order; where each seed's rows are."""
    names, codes = (["all"], None) if first.seed is None else np.unique(first.seed, return_inverse=True)
    order = None
    if first.time is not None and codes is not None:
        order = np.lexsort((first.time, codes))
    elif codes is not None:
        order = np.argsort(codes, kind="stable")
    elif first.time is not None:
        order = np.argsort(first.time, kind="stable")
    if order is not None and not (np.diff(order) == 1).all():
        for found in (first, *others):
            found.take(order)
    if codes is None:
        return {"all": slice(0, len(first))}
    stops = np.cumsum(np.bincount(codes))
    return {_name(n): slice(int(stop - size), int(stop)) for n, stop, size in zip(names, stops, np.bincount(codes))}


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and np.array_equal(a, b)


def _names(found: Predictions, rows: np.ndarray) -> str:
    return ", ".join(_where(found, int(row)) for row in rows[:EXAMPLES]) + (", ..." if len(rows) > EXAMPLES else "")


def _where(found: Predictions, row: int) -> str:
    if found.id is None:
        return str(row + 1)
    return f"id {_name(found.id[row])}" + (f" of seed {_name(found.seed[row])}" if found.seed is not None else "")


def _name(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
