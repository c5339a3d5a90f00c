"""`obd`: the small Open Bandit Dataset from the obp wheel: six real logs of fashion recommendations.

Two logging policies (random, bts) times three campaigns (all, men, women), 10,000 impressions each, merged
in time order. A user's past clicks, which the data give as counts an item, are the history.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.data.rows import ArrayDataset, Rows, check_request, codes, heldout_fraction, time_cut
from mxfp8_recipe.ab.data.wheels import Wheel, find_wheel, read_member
from mxfp8_recipe.ab.types import DataRequest, FeatureSpec

WHEEL = Wheel(package="obp", version="0.4.1")
POLICIES, CAMPAIGNS = ("random", "bts"), ("all", "men", "women")
USER_FIELDS = tuple(f"user_feature_{i}" for i in range(4))
AFFINITY = "user-item_affinity_"
MAX_HISTORY = 8
LICENSE = "Open Bandit Dataset, small (ZOZO, Inc.): CC BY 4.0; Saito et al., arXiv:2008.07146"
ORDER_NOTE = "the data hold no order of a user's past clicks: histories list rarely clicked items first"


@dataclass(frozen=True, kw_only=True)
class Impression:
    """One line of a log; `item`, and in `clicks` the items the user clicked before, are ids over all campaigns."""

    time: str
    campaign: int
    item: int
    position: int
    click: float
    user: tuple[str, ...]
    clicks: dict[int, float]


def load(request: DataRequest) -> ArrayDataset:
    """The data set `obd`; `extra["cache_dir"]` says where its wheel is kept."""
    check_request(request, "obd", options=("cache_dir",), weights="its rows have no column of weights", source=False)
    path = find_wheel(WHEEL, request)
    log: list[Impression] = []
    item_feature = [0.0]
    for c, campaign in enumerate(CAMPAIGNS):
        for policy in POLICIES:
            member = f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv"
            log += read_log(read_member(path, member), campaign=c, first_item=len(item_feature))
        context = csv.DictReader(io.StringIO(read_member(path, f"obp/dataset/obd/bts/{campaign}/item_context.csv")))
        item_feature += [float(item["item_feature_0"]) for item in context]
    return build(log, np.asarray(item_feature), request)


def read_log(text: str, *, campaign: int, first_item: int) -> Iterator[Impression]:
    """The impressions of one CSV; items of the file count from `first_item`."""
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    needed = ("timestamp", "item_id", "position", "click", *USER_FIELDS, f"{AFFINITY}0")
    missing = [name for name in needed if name not in header]
    if missing:
        raise DataError(f"obd log: header is {header[:10]}, expected also {', '.join(missing)}")
    first = header.index(f"{AFFINITY}0")
    time, item, position, click, *user = (header.index(name) for name in needed[:-1])
    for row in reader:
        yield Impression(
            time=row[time],
            campaign=campaign,
            item=first_item + int(row[item]),
            position=int(row[position]),
            click=float(row[click]),
            user=tuple(row[u] for u in user),
            clicks={first_item + i: float(n) for i, n in enumerate(row[first:]) if n not in ("0.0", "0", "")},
        )


def build(log: list[Impression], item_feature: np.ndarray, request: DataRequest) -> ArrayDataset:
    """The data set of a log; `item_feature` (1 + items,) is the one numeric feature of an item, by id."""
    log = sorted(log, key=lambda r: r.time)[: request.rows]
    item = np.asarray([r.item for r in log])
    position = np.asarray([r.position for r in log])
    campaign = np.asarray([r.campaign for r in log])
    users, cardinalities = zip(*(codes([r.user[f] for r in log]) for f in range(len(USER_FIELDS))), strict=True)
    histories = [sorted(r.clicks, key=lambda i: (r.clicks[i], i))[-MAX_HISTORY:] for r in log]
    affinity = np.log1p([[r.clicks.get(r.item, 0.0), sum(r.clicks.values())] for r in log])
    rows = Rows(
        dense=np.concatenate([item_feature[item][:, None], affinity], axis=1),
        sparse=np.stack([item, position, 1 + campaign, *users], axis=1),
        labels=np.asarray([[r.click] for r in log]),
        weights=np.ones((len(log), 1)),
        history=np.asarray([i for h in histories for i in h], dtype=np.int64),
        history_offsets=np.append(0, np.cumsum([len(h) for h in histories])),
        segments=campaign,
    )
    moment = np.unique([r.time for r in log], return_inverse=True)[1]
    cut = time_cut(moment, heldout_fraction(request), "obd")
    return ArrayDataset(
        name="obd",
        spec=FeatureSpec(
            num_dense=3,
            cardinalities=(len(item_feature), int(position.max()) + 1, len(CAMPAIGNS) + 1, *cardinalities),
            history_field=0,
            max_history=MAX_HISTORY,
        ),
        train=rows.slice(0, cut),
        heldout=rows.slice(cut, len(rows)),
        notes=[LICENSE, ORDER_NOTE, f"{cut} rows to train on, {len(rows) - cut} later ones held out"],
    )
