"""One arm's training: predict each batch, then train on it; held-out rows at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.ab.arms import Arm, precision
from mxfp8_recipe.ab.batches import SamplingCorrection
from mxfp8_recipe.ab.results import CurvePoint, Metrics
from mxfp8_recipe.ab.types import Batch
from mxfp8_recipe.monitors import metrics
from mxfp8_recipe.monitors.metrics import DEFAULT_WINDOW_ROWS, EntropySums
from mxfp8_recipe.monitors.row_sums import RowSums

EMBEDDING_LEARNING_RATE = 10.0
"""Adagrad's learning rate for embedding tables, relative to Adam's for everything else."""

TRACE_POINTS = 40

OnStep = Callable[[int, float], None]


class Diverged(RuntimeError):
    """A loss that is no number any more; the message names arm, seed and step."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Weighted log loss, summed over tasks, per row of the batch: the negative log-likelihood of an impression."""
    return loss_from_logits(model(batch), batch)


def loss_from_logits(logits: Tensor, batch: Batch) -> Tensor:
    """`loss_of` for logits (B, T)."""
    entropy = F.binary_cross_entropy_with_logits(logits.float(), batch.labels, weight=batch.weights, reduction="sum")
    return entropy / len(batch)


class BaseRateOffset:
    """A forward hook on the root module that adds each task's base-rate logit, in FP32.

    Short runs would otherwise spend their steps, and the weights they quantize, on learning a constant that a model in
    production holds in a bias.
    """

    def __init__(self, batches: Iterable[Batch], rows: int = 10_000) -> None:
        seen, positives, total = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for batch in batches:
            weights = batch.weights.double().cpu()
            positives = positives + (weights * batch.labels.cpu()).sum(0)
            total = total + weights.sum(0)
            seen += len(batch)
            if seen >= rows:
                break
        rate = (positives / total.clamp(min=1e-12)).clamp(1e-4, 1 - 1e-4)
        self.rows, self.logit = seen, rate.logit().float()

    def __call__(self, module: nn.Module, args: object, logits: Tensor) -> Tensor:
        return logits.float() + self.logit.to(logits.device)


class Optimizers:
    """Adagrad for embedding tables, whose rows are touched rarely; Adam for everything else."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        embeddings = {id(m.weight): m.weight for m in tables}
        dense = [p for p in model.parameters() if id(p) not in embeddings]
        self.parts: list[torch.optim.Optimizer] = []
        if dense:
            self.parts.append(torch.optim.Adam(dense, lr=learning_rate, fused=True))
        if embeddings:
            fused = not any(m.sparse for m in tables) and tables[0].weight.device.type == "cpu"
            rate = learning_rate * EMBEDDING_LEARNING_RATE
            self.parts.append(torch.optim.Adagrad(list(embeddings.values()), lr=rate, fused=fused or None))

    def step(self, remaining: float) -> None:
        """Take a step at a learning rate scaled by the share of training that remains.

        A linear decay to zero averages out the last batches; twins would otherwise differ by where they stopped.
        """
        for part in self.parts:
            for group in part.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * remaining
            part.step()
            part.zero_grad()


@dataclass
class Predictions:
    """Corrected logits (N, T) of one pass over rows, with the labels and weights they are judged by."""

    logits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    segments: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, batch: Batch, correction: SamplingCorrection) -> None:
        self.logits.append(correction.logits(logits).cpu())
        self.labels.append(batch.labels.cpu())
        self.weights.append(correction.weights(batch).cpu())
        if batch.segments is not None:
            self.segments.append(batch.segments.cpu())

    @property
    def digest(self) -> str:
        """SHA-256 of the logits' bits."""
        sha = hashlib.sha256()
        for logits in self.logits:
            sha.update(logits.contiguous().numpy().tobytes())
        return sha.hexdigest()

    def columns(self, task: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, labels and weights (N,) of a task."""
        logits, labels, weights = (torch.cat(t)[:, task] for t in (self.logits, self.labels, self.weights))
        return logits.sigmoid(), labels, weights

    def metrics(self, task: int) -> Metrics:
        p, y, w = self.columns(task)
        sums = EntropySums.of(p, y, w)
        return Metrics(
            rows=int((w > 0).sum()),
            ne=float(sums.normalized_entropy),
            calibration=float(sums.calibration),
            ne_calibration_free=float(sums.calibration_free_ne),
            log_loss=float(sums.log_loss),
            auc=float(metrics.auc(p, y, w)),
        )

    def row_sums(self, task: int) -> RowSums:
        """Sums by block of time, of all rows and of each segment; rows come in time order."""
        p, y, w = self.columns(task)
        segments = torch.cat(self.segments).numpy() if self.segments else None
        return RowSums.of(p.numpy(), y.numpy(), w.numpy(), segments)

    def curve(self, task: int) -> tuple[CurvePoint, ...]:
        points = metrics.calibration_curve(*self.columns(task), bins=12)
        return tuple(CurvePoint(**vars(point)) for point in points)

    def window_rows(self) -> int:
        """A tenth of the rows, in whole batches, and no more than the field's 10M."""
        rows = sum(map(len, self.labels))
        return min(DEFAULT_WINDOW_ROWS, max(-(-rows // 10), len(self.labels[0]) if self.labels else 1))

    def trace(self, task: int) -> tuple[tuple[int, float], ...]:
        """(rows seen, NE over the window that ends there), at most `TRACE_POINTS` of them plus the last."""
        window, seen = self.window_rows(), 0
        stream = metrics.NormalizedEntropy(window_rows=window)
        every = max(1, -(-len(self.labels) // TRACE_POINTS))
        points = []
        for index, (logits, labels, weights) in enumerate(zip(self.logits, self.labels, self.weights, strict=True), 1):
            stream.update(logits[:, task].sigmoid(), labels[:, task], weights[:, task])
            seen += len(labels)
            if index == len(self.labels) or (index % every == 0 and seen >= window):
                points.append((seen, float(stream.compute())))
        return tuple(points)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What all arms of a run share.

    Attributes:
        on_step: called after each step with the rows trained so far, all epochs, and the loss.
    """

    device: torch.device
    epochs: int
    learning_rate: float
    correction: SamplingCorrection
    on_step: OnStep = lambda rows, loss: None

    def train(
        self, model: nn.Module, arm: Arm, seed: int, batches: Iterable[Batch], total_rows: int
    ) -> tuple[Predictions, int]:
        """Progressive training: the predictions of the first epoch, each made before its row was trained on.

        Args:
            model: trained in place.
            arm: the precision of forward and backward; a recipe has been applied already.
            seed: of dropout.
            batches: gone through once an epoch.
            total_rows: rows of an epoch, for the decay of the learning rate.

        Returns:
            Those predictions and the number of steps.

        Raises:
            Diverged: the loss is NaN or infinite.
        """
        torch.manual_seed(seed)
        optimizers = Optimizers(model, self.learning_rate)
        predictions = Predictions()
        model.train()
        separate = _depends_on_mode(model)
        step = rows = 0
        for epoch in range(self.epochs):
            for host_batch in batches:
                batch = host_batch.to(self.device)
                remaining = 1 - rows / (total_rows * self.epochs)
                step, rows = step + 1, rows + len(batch)
                if epoch == 0 and separate:
                    predictions.add(self.predict(model, arm, batch), batch, self.correction)
                with precision(self.device, autocast=arm.autocast):
                    logits = model(batch)
                loss = loss_from_logits(logits, batch)
                value = float(loss.detach())
                if not abs(value) < float("inf"):
                    raise Diverged(
                        f"arm {arm.name}, seed {seed}: the loss is {value} at step {step}; "
                        "lower --learning-rate, or look at the rows of that step"
                    )
                if epoch == 0 and not separate:
                    predictions.add(logits, batch, self.correction)
                loss.backward()
                optimizers.step(remaining)
                self.on_step(rows, value)
        return predictions, step

    def predict(self, model: nn.Module, arm: Arm, batch: Batch) -> Tensor:
        """Logits in eval mode; the training mode comes back."""
        training = model.training
        model.eval()
        with torch.no_grad(), precision(self.device, autocast=arm.autocast):
            logits = model(batch)
        model.train(training)
        return logits

    def evaluate(self, model: nn.Module, arm: Arm, batches: Iterable[Batch]) -> Predictions:
        """Predictions of held-out rows in the arm's precision."""
        predictions = Predictions()
        for host_batch in batches:
            batch = host_batch.to(self.device)
            predictions.add(self.predict(model, arm, batch), batch, self.correction)
        return predictions


def _depends_on_mode(model: nn.Module) -> bool:
    """Whether a training forward predicts otherwise than an eval one, so that predictions need their own forward."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.MultiheadAttention)
    return any(isinstance(module, kinds) for module in model.modules())
