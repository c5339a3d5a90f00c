"""A CTR simulator with known ground truth: the embedded default data set.

Each impression shows a candidate item to a user context. The true click logit is a function of what the
model sees, and of nothing else, so the true probability is the Bayes-optimal prediction:

    logit = base + w . dense + sum_f bias_f[id_f] + <cluster[id], item[id]>
          + gain / tau * log mean_j exp(tau * <item[history_j], item[candidate]>)

The last term, a smooth maximum over the history, is what attention has to find. Conversion given click has
its own parameters. Parameters and rows come from the seed alone, in chunks of `CHUNK` rows with a generator
each, so any row range is reproducible without holding the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.data.rows import Part, Rows, check_request, heldout_fraction, rebatch
from mxfp8_recipe.ab.types import Batch, DataRequest, FeatureSpec

DEFAULT_ROWS = 60_000
CHUNK = 8_192
LATENT = 8
TAU = 2.0

CARDINALITIES = (4_001, 201, 501, 65, 9, 17)
"""Of item, advertiser, user cluster, region, surface and device."""
ZIPF = (1.05, 0.0, 0.9, 0.8, 0.5, 1.0)
ITEM, ADVERTISER, CLUSTER, SURFACE = 0, 1, 2, 4
NUM_NORMAL, NUM_COUNTS = 10, 3
BASE_RATE = {"ctr": 0.05, "cvr": 0.20}


@dataclass(frozen=True, kw_only=True)
class TaskTruth:
    """The parameters of one task's true logit; id 0 (missing) of every table is zero."""

    dense: np.ndarray
    biases: tuple[np.ndarray, ...]
    cluster: np.ndarray
    affinity: float
    base: float = 0.0


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything drawn once per seed: id popularity, item geometry, and the truth of each task."""

    popularity: tuple[np.ndarray, ...]
    item_vectors: np.ndarray
    item_advertiser: np.ndarray
    cluster_taste: np.ndarray
    topic_items: np.ndarray
    truth: dict[str, TaskTruth] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """Features of N impressions; `history` is padded (N, max_history) with 0, newest event last of `lengths`."""

    dense: np.ndarray
    sparse: np.ndarray
    history: np.ndarray
    lengths: np.ndarray


def make_world(seed: int, max_history: int) -> World:
    """All parameters, from the seed; intercepts put the base rates at `BASE_RATE`."""
    rng = np.random.default_rng([seed, 0])
    popularity = tuple(_zipf_cdf(n - 1, s) for n, s in zip(CARDINALITIES, ZIPF, strict=True))
    items, clusters, topics = CARDINALITIES[ITEM], CARDINALITIES[CLUSTER], 32
    centers = _unit(rng.normal(size=(topics, LATENT)))
    topic_of_item = rng.integers(0, topics, size=items)
    vectors = _unit(centers[topic_of_item] + 0.35 * rng.normal(size=(items, LATENT)))
    vectors[0] = 0.0
    advertiser = 1 + rng.integers(0, CARDINALITIES[ADVERTISER] - 1, size=items)
    world = World(
        popularity=popularity,
        item_vectors=vectors.astype(np.float32),
        item_advertiser=np.where(np.arange(items) == 0, 0, advertiser),
        cluster_taste=rng.integers(0, topics, size=(clusters, 2)),
        topic_items=_items_by_topic(rng, topic_of_item, topics, per_topic=64),
    )
    pilot = draw_impressions(world, np.random.default_rng([seed, 1]), 20_000, max_history)
    for task, strength in (("ctr", 1.0), ("cvr", 0.7)):
        truth = _draw_truth(rng, strength)
        base = _solve_base(true_logits(world, truth, pilot), BASE_RATE[task])
        world.truth[task] = TaskTruth(**{**truth.__dict__, "base": base})
    return world


def _zipf_cdf(n: int, exponent: float) -> np.ndarray:
    mass = np.arange(1, n + 1, dtype=np.float64) ** -exponent
    return np.cumsum(mass / mass.sum())


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _items_by_topic(rng: np.random.Generator, topic_of_item: np.ndarray, topics: int, per_topic: int) -> np.ndarray:
    """(topics, per_topic) item ids of each topic, drawn with replacement."""
    ids = np.arange(1, topic_of_item.size)
    members = [ids[topic_of_item[1:] == t] for t in range(topics)]
    return np.stack([rng.choice(m if m.size else ids, size=per_topic) for m in members])


def _draw_truth(rng: np.random.Generator, strength: float) -> TaskTruth:
    spreads = (0.5, 0.4, 0.4, 0.2, 0.5, 0.2)
    biases = [strength * s * rng.normal(size=n) for s, n in zip(spreads, CARDINALITIES, strict=True)]
    for bias in biases:
        bias[0] = 0.0
    return TaskTruth(
        dense=strength * 0.4 * rng.normal(size=NUM_NORMAL + NUM_COUNTS),
        biases=tuple(biases),
        cluster=strength * 0.4 * rng.normal(size=(CARDINALITIES[CLUSTER], LATENT)),
        affinity=2.0 * strength,
    )


def _solve_base(logits: np.ndarray, rate: float) -> float:
    """The intercept at which the mean probability is `rate`, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if sigmoid(logits + middle).mean() < rate else (low, middle)
    return 0.5 * (low + high)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def draw_impressions(world: World, rng: np.random.Generator, n: int, max_history: int) -> Impressions:
    """Features of `n` impressions; histories have 0 to `max_history` events, each length as likely."""
    sparse = np.stack([1 + np.searchsorted(cdf, rng.random(n), side="right") for cdf in world.popularity], axis=1)
    sparse = np.minimum(sparse, np.asarray(CARDINALITIES) - 1)
    sparse[:, ADVERTISER] = world.item_advertiser[sparse[:, ITEM]]
    normal = rng.normal(size=(n, NUM_NORMAL))
    counts = np.log1p(rng.poisson(rng.lognormal(1.0, 1.2, size=(n, NUM_COUNTS)).clip(max=1e6)))
    lengths = rng.integers(0, max_history + 1, size=n)
    return Impressions(
        dense=np.concatenate([normal, counts], axis=1).astype(np.float32),
        sparse=sparse,
        history=_draw_histories(world, rng, sparse[:, CLUSTER], lengths, max_history),
        lengths=lengths,
    )


def _draw_histories(
    world: World, rng: np.random.Generator, cluster: np.ndarray, lengths: np.ndarray, max_history: int
) -> np.ndarray:
    """(N, max_history): 7 events in 10 from the topics the user's cluster likes, the rest by popularity."""
    shape = (cluster.size, max_history)
    popular = 1 + np.searchsorted(world.popularity[ITEM], rng.random(shape), side="right")
    topic = np.take_along_axis(world.cluster_taste[cluster], rng.integers(0, 2, size=shape), axis=1)
    liked = world.topic_items[topic, rng.integers(0, world.topic_items.shape[1], size=shape)]
    events = np.where(rng.random(shape) < 0.7, liked, np.minimum(popular, CARDINALITIES[ITEM] - 1))
    return np.where(np.arange(max_history) < lengths[:, None], events, 0)


def true_logits(world: World, truth: TaskTruth, seen: Impressions) -> np.ndarray:
    """(N,) float64 logits of the true probabilities."""
    item = world.item_vectors[seen.sparse[:, ITEM]]
    logits = truth.base + seen.dense.astype(np.float64) @ truth.dense
    for f, bias in enumerate(truth.biases):
        logits += bias[seen.sparse[:, f]]
    logits += (truth.cluster[seen.sparse[:, CLUSTER]] * item).sum(axis=1)
    return logits + truth.affinity * _affinity(world, item, seen)


def _affinity(world: World, item: np.ndarray, seen: Impressions) -> np.ndarray:
    """(N,) smooth maximum over the history of <event, candidate>; 0 for an empty history."""
    if seen.history.shape[1] == 0:
        return np.zeros(len(item))
    dots = np.matmul(world.item_vectors[seen.history], item[:, :, None])[:, :, 0]
    valid = np.arange(dots.shape[1]) < seen.lengths[:, None]
    total = np.where(valid, np.exp(TAU * dots), 0.0).sum(axis=1, dtype=np.float64)
    return np.where(seen.lengths > 0, np.log(np.maximum(total, 1e-30) / np.maximum(seen.lengths, 1)) / TAU, 0.0)


class BayesEntropy:
    """NE of a prediction over rows that arrive in pieces: sum(w CE(y, p)) over the entropy of the base rate."""

    def __init__(self) -> None:
        self.cross_entropy = self.positive = self.negative = 0.0

    def update(self, probability: np.ndarray, label: np.ndarray, weight: np.ndarray) -> None:
        p = np.clip(probability.astype(np.float64), 1e-12, 1 - 1e-12)
        self.cross_entropy -= float((weight * (label * np.log(p) + (1 - label) * np.log1p(-p))).sum())
        self.positive += float((weight * label).sum())
        self.negative += float((weight * (1 - label)).sum())

    def normalized_entropy(self) -> float:
        """NaN when the rows hold one class only: their entropy is 0."""
        if self.positive <= 0 or self.negative <= 0:
            return float("nan")
        mean = self.positive / (self.positive + self.negative)
        return self.cross_entropy / -float(self.positive * np.log(mean) + self.negative * np.log1p(-mean))


class SyntheticDataset:
    """`rows` simulated impressions, of which the last `heldout` share is held out.

    With `negative_sampling_rate` r < 1 each non-clicked impression is kept with probability r, so the data
    are what a down-sampled log would hold; `optimal_ne` then weights the kept ones by 1 / r.
    """

    def __init__(
        self,
        *,
        rows: int = DEFAULT_ROWS,
        seed: int = 0,
        heldout: float = 0.2,
        negative_sampling_rate: float = 1.0,
        max_history: int = 16,
    ) -> None:
        self.name = "synthetic"
        self.spec = FeatureSpec(
            num_dense=NUM_NORMAL + NUM_COUNTS,
            cardinalities=CARDINALITIES,
            history_field=ITEM if max_history else None,
            max_history=max_history,
            tasks=("ctr", "cvr"),
        )
        self.rows, self.seed, self.keep = rows, seed, negative_sampling_rate
        self.first_heldout = min(max(1, round(rows * (1 - heldout))), rows - 1)
        self.world = make_world(seed, max_history)
        self.optimal_ne, kept = self._measure_heldout()
        self.notes = [
            f"simulated from seed {seed}: {self.first_heldout} impressions to train on, "
            f"{rows - self.first_heldout} held out ({kept} rows after sampling negatives at {self.keep})"
        ]

    def train_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch((rows for rows, _ in self.chunks("train")), batch_size)

    def heldout_batches(self, batch_size: int) -> Iterator[Batch]:
        return rebatch((rows for rows, _ in self.chunks("heldout")), batch_size)

    def chunks(self, part: Part) -> Iterator[tuple[Rows, np.ndarray]]:
        """Rows and their true probabilities (N, num_tasks)."""
        start, stop = (0, self.first_heldout) if part == "train" else (self.first_heldout, self.rows)
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            rows, truth = self._chunk(chunk)
            index = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
            wanted = (index >= start) & (index < stop)
            if self.keep < 1.0:
                sampler = np.random.default_rng([self.seed, 3, chunk])
                wanted &= (rows.labels[:, 0] > 0) | (sampler.random(CHUNK) < self.keep)
            chosen = np.flatnonzero(wanted)
            if chosen.size:
                yield rows.take(chosen), truth[chosen]

    def _chunk(self, chunk: int) -> tuple[Rows, np.ndarray]:
        rng = np.random.default_rng([self.seed, 2, chunk])
        seen = draw_impressions(self.world, rng, CHUNK, self.spec.max_history)
        truth = np.stack(
            [sigmoid(true_logits(self.world, self.world.truth[task], seen)) for task in self.spec.tasks], axis=1
        )
        click, converts = (rng.random((CHUNK, 2)) < truth).T
        labels = np.stack([click, click & converts], axis=1).astype(np.float32)
        valid = np.arange(self.spec.max_history) < seen.lengths[:, None]
        rows = Rows(
            dense=seen.dense,
            sparse=seen.sparse,
            labels=labels,
            weights=np.stack([np.ones_like(labels[:, 0]), labels[:, 0]], axis=1),
            history=seen.history[valid] if self.spec.max_history else None,
            history_offsets=np.append(0, np.cumsum(seen.lengths)) if self.spec.max_history else None,
            segments=seen.sparse[:, SURFACE] - 1,
        )
        return rows, truth

    def _measure_heldout(self) -> tuple[dict[str, float], int]:
        sums, kept = {task: BayesEntropy() for task in self.spec.tasks}, 0
        for rows, truth in self.chunks("heldout"):
            kept += len(rows)
            for t, task in enumerate(self.spec.tasks):
                weight = rows.weights[:, t].astype(np.float64)
                if task == "ctr":
                    weight = np.where(rows.labels[:, 0] > 0, weight, weight / self.keep)
                sums[task].update(truth[:, t], rows.labels[:, t].astype(np.float64), weight)
        return {task: s.normalized_entropy() for task, s in sums.items()}, kept


def load(request: DataRequest) -> SyntheticDataset:
    """The data set `synthetic`; `extra["max_history"]` sets the longest history."""
    check_request(request, "synthetic", options=("max_history",), weights="its rows have no weights", source=False)
    text = request.extra.get("max_history", "16")
    if not text.isdigit():
        raise DataError(f"data option max_history: got {text!r}, expected a number of events >= 0")
    return SyntheticDataset(
        rows=request.rows or DEFAULT_ROWS,
        seed=request.seed,
        heldout=heldout_fraction(request),
        negative_sampling_rate=request.negative_sampling_rate,
        max_history=int(text),
    )
