"""`ml-100k`: MovieLens-100K from the recbole wheel, as click data.

A rating of 4 or 5 is a click. Rows are in time order, the last ones are held out; neither a history nor a
running count ever includes an event at the row's own timestamp or later, and no timestamp is split.
"""

from __future__ import annotations

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.data.rows import ArrayDataset, Rows, check_request, codes, heldout_fraction, ranges, time_cut
from mxfp8_recipe.ab.data.wheels import Wheel, find_wheel, read_member
from mxfp8_recipe.ab.types import DataRequest, FeatureSpec

WHEEL = Wheel(package="recbole", version="1.2.1")
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
MAX_HISTORY = 16
AGE_BOUNDS = (18, 25, 35, 45, 50, 56)
LICENSE = (
    "MovieLens-100K (GroupLens, University of Minnesota): research use, redistribution and commercial use need "
    "GroupLens' permission; F. M. Harper and J. A. Konstan, ACM TiiS 5(4), 2015"
)


def load(request: DataRequest) -> ArrayDataset:
    """The data set `ml-100k`; `extra["cache_dir"]` says where its wheel is kept."""
    check_request(request, "ml-100k", options=("cache_dir",), weights="its rows have no weights", source=False)
    path = find_wheel(WHEEL, request)
    events, users, items = (
        _read_table(read_member(path, f"{FOLDER}.{kind}"), kind, columns)
        for kind, columns in (
            ("inter", ("user_id", "item_id", "rating", "timestamp")),
            ("user", ("user_id", "age", "gender", "occupation")),
            ("item", ("item_id", "release_year", "class")),
        )
    )
    return build(events, users, items, request)


def _read_table(text: str, kind: str, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """Columns of a recbole atomic file: tab-separated, header `name:type`."""
    lines = text.splitlines()
    header = [name.partition(":")[0] for name in lines[0].split("\t")] if lines else []
    missing = [c for c in columns if c not in header]
    if missing:
        raise DataError(f"ml-100k.{kind}: header is {header}, expected also {', '.join(missing)}")
    rows = [line.split("\t") for line in lines[1:] if line]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"ml-100k.{kind} line {number}: {len(row)} columns, expected {len(header)}")
    return {c: [row[header.index(c)] for row in rows] for c in columns}


def build(
    events: dict[str, list[str]], users: dict[str, list[str]], items: dict[str, list[str]], request: DataRequest
) -> ArrayDataset:
    """The data set of three column tables; ids are 1 + the position in the user and item tables."""
    user_at = {u: i for i, u in enumerate(users["user_id"], start=1)}
    item_at = {m: i for i, m in enumerate(items["item_id"], start=1)}
    time = np.asarray(events["timestamp"], dtype=np.float64)
    user = np.asarray([user_at.get(u, 0) for u in events["user_id"]])
    item = np.asarray([item_at.get(m, 0) for m in events["item_id"]])
    label = (np.asarray(events["rating"], dtype=np.float64) >= 4).astype(np.float64)
    order = np.lexsort((item, user, time))[: request.rows]
    time, user, item, label = time[order], user[order], item[order], label[order]
    user_sparse, user_dense, user_cards = _user_features(users)
    item_sparse, item_dense, item_cards = _item_features(items)
    history, offsets = earlier_items(user, item, time, MAX_HISTORY)
    rows = Rows(
        dense=np.concatenate(
            [user_dense[user], item_dense[item], past_rate(user, time, label), past_rate(item, time, label)], axis=1
        ),
        sparse=np.concatenate([item[:, None], user[:, None], user_sparse[user], item_sparse[item]], axis=1),
        labels=label[:, None],
        weights=np.ones((len(label), 1)),
        history=history,
        history_offsets=offsets,
        segments=user_sparse[user, 0],
    )
    cut = time_cut(time, heldout_fraction(request), "ml-100k")
    return ArrayDataset(
        name="ml-100k",
        spec=FeatureSpec(
            num_dense=rows.dense.shape[1],
            cardinalities=(len(item_at) + 1, len(user_at) + 1, *user_cards, *item_cards),
            history_field=0,
            max_history=MAX_HISTORY,
        ),
        train=rows.slice(0, cut),
        heldout=rows.slice(cut, len(rows)),
        notes=[LICENSE, f"label: rating >= 4; {cut} rows to train on, {len(rows) - cut} later ones held out"],
    )


def _numbers(values: list[str], default: float) -> np.ndarray:
    """(1 + len(values),) floats; `default` where there is none."""
    return np.asarray([default, *(float(v) if v.isdigit() else default for v in values)])


def _user_features(users: dict[str, list[str]]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Indexed by user id: age group, gender, occupation; age."""
    age = _numbers(users["age"], 30.0)
    gender, genders = codes(["", *users["gender"]])
    occupation, occupations = codes(["", *users["occupation"]])
    groups = 1 + np.digitize(age, AGE_BOUNDS)
    groups[0] = 0
    sparse = np.stack([groups, gender, occupation], axis=1)
    return sparse, ((age - 33.0) / 12.0)[:, None], (len(AGE_BOUNDS) + 2, genders, occupations)


def _item_features(items: dict[str, list[str]]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Indexed by item id: up to three genres; age of the film and number of genres."""
    genres = [text.split() for text in items["class"]]
    at = {g: i for i, g in enumerate(sorted({g for row in genres for g in row}), start=1)}
    sparse = np.zeros((len(genres) + 1, 3), dtype=np.int64)
    for i, row in enumerate(genres, start=1):
        for slot, genre in enumerate(row[:3]):
            sparse[i, slot] = at[genre]
    years = np.log1p(np.clip(1998.0 - _numbers(items["release_year"], 1995.0), 0.0, None))
    count = np.asarray([0.0, *(len(row) for row in genres)])
    return sparse, np.stack([years - 1.5, count - 2.0], axis=1), (len(at) + 1,) * 3


def _by_key(key: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort by (key, time): the order, and for each sorted row where its key and its (key, time) group start."""
    order = np.lexsort((time, key))
    same_key = np.append(False, key[order][1:] == key[order][:-1])
    same_time = same_key & np.append(False, time[order][1:] == time[order][:-1])
    position = np.arange(len(key))

    def start(continues: np.ndarray) -> np.ndarray:
        return np.maximum.accumulate(np.where(continues, 0, position))

    return order, start(same_key), start(same_time)


def earlier_items(
    user: np.ndarray, item: np.ndarray, time: np.ndarray, max_history: int
) -> tuple[np.ndarray, np.ndarray]:
    """Jagged ids of each user's last `max_history` events strictly before each row's time, oldest first."""
    order, user_start, group_start = _by_key(user, time)
    starts, stops = np.empty_like(order), np.empty_like(order)
    starts[order] = np.maximum(user_start, group_start - max_history)
    stops[order] = group_start
    positions, offsets = ranges(starts, stops)
    return item[order][positions], offsets


def past_rate(key: np.ndarray, time: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(N, 2): smoothed positive rate and log count of the key's events strictly before each row's time."""
    order, key_start, group_start = _by_key(key, time)
    positives = np.append(0.0, np.cumsum(label[order]))
    count = (group_start - key_start).astype(np.float64)
    rate = (positives[group_start] - positives[key_start] + 2.5) / (count + 5.0)
    out = np.empty((len(key), 2))
    out[order] = np.stack([4.0 * (rate - 0.5), (np.log1p(count) - 3.0) / 2.0], axis=1)
    return out
