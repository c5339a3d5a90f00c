"""Two models with the same weights on the same rows: what quantization alone does to logits, layers and gradients.

Training noise cannot hide here, so the hard gates of a verdict sit on these numbers. Logit error e of independent
rows with RMS s costs about 0.5 s^2 E[p(1 - p)] nats; its mean moves calibration directly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.monitors.records import LayerAgreement, SameWeights, SegmentShift, TaskAgreement

SEGMENT_RESOLUTION = 0.0005
"""A segment stands alone when the standard error of its mean logit error is at most this, a quarter of the gate:
below that a harmless segment crosses the gate by chance less than once in 10,000."""


class LabeledBatch(Protocol):
    """Rows with labels and weights (B, T) and segment ids (B,) or None."""

    labels: Tensor
    weights: Tensor
    segments: Tensor | None


Precision = Callable[[], AbstractContextManager[Any]]
LossFunction = Callable[[nn.Module, Any], Tensor]


def compare_same_weights(
    reference: nn.Module,
    candidate: nn.Module,
    batches: Iterable[Any],
    *,
    tasks: tuple[str, ...],
    seed: int,
    precision: Precision,
    loss: LossFunction,
    gradient_batches: int = 2,
) -> SameWeights:
    """Run both models over the same batches in eval mode; leaves parameters, buffers, modes and grads as they were.

    Args:
        reference: the model that serves, `model(batch) -> logits (B, T)`.
        candidate: its quantized twin; equal parameters under equal names.
        batches: `LabeledBatch`es.
        tasks: T names.
        seed: goes into the record.
        precision: context to run a forward in, such as autocast.
        loss: scalar loss of a model on a batch.
        gradient_batches: gradients and layer outputs are compared on this many leading batches.
    """
    errors = [_LogitErrors(task) for task in tasks]
    first: list[Any] = []
    modes = [(module, module.training) for model in (reference, candidate) for module in model.modules()]
    reference.eval()
    candidate.eval()
    try:
        for batch in batches:
            with torch.no_grad(), precision():
                logits = [model(batch).detach().double() for model in (reference, candidate)]
            for column, task in enumerate(errors):
                task.add(logits[0][:, column], logits[1][:, column], batch, column)
            if len(first) < gradient_batches:
                first.append(batch)
        layers, cosine = _compare_layers(reference, candidate, first, precision=precision, loss=loss)
    finally:
        for module, training in modes:
            module.training = training
    return SameWeights(seed=seed, tasks=tuple(task.record() for task in errors), layers=layers, grad_cosine=cosine)


@dataclass
class _Moments:
    """Count, sum and sum of squares, fp64."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        self.merge(_Moments(values.numel(), float(values.sum()), float(values.square().sum())))

    def merge(self, other: _Moments) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two rows."""
        if self.count < 2:
            return math.inf
        variance = (self.squares - self.count * self.mean**2) / (self.count - 1)
        return math.sqrt(max(variance, 0.0) / self.count)


@dataclass
class _LogitErrors:
    """Accumulates one task's errors over batches."""

    task: str
    errors: _Moments = field(default_factory=_Moments)
    largest: float = 0.0
    segments: dict[int, _Moments] = field(default_factory=lambda: defaultdict(_Moments))
    predicted: Tensor | None = None
    entropy: Tensor | None = None

    def add(self, reference: Tensor, candidate: Tensor, batch: LabeledBatch, column: int) -> None:
        error = candidate - reference
        self.errors.add(error)
        self.largest = max(self.largest, float(error.abs().nan_to_num(math.inf).max())) if len(error) else self.largest
        y, w = batch.labels[:, column].double(), batch.weights[:, column].double()
        pair = torch.stack([reference, candidate])
        predicted = (w * pair.sigmoid()).sum(1)
        entropy = F.binary_cross_entropy_with_logits(pair, y.expand_as(pair), reduction="none")
        difference = entropy[1] - entropy[0]
        sums = torch.stack([(w * difference).sum(), (w * difference).square().sum(), (w * entropy[0]).sum()])
        self.predicted = predicted if self.predicted is None else self.predicted + predicted
        self.entropy = sums if self.entropy is None else self.entropy + sums
        if batch.segments is not None:
            for segment in batch.segments.unique().tolist():
                self.segments[segment].add(error[batch.segments == segment])

    def record(self) -> TaskAgreement:
        if self.predicted is None or self.entropy is None:
            raise ValueError(f"task {self.task!r}: no held-out rows to compare two models on")
        difference, squares, entropy = self.entropy.tolist()
        reference, candidate = self.predicted.tolist()
        return TaskAgreement(
            task=self.task,
            rows=int(self.errors.count),
            logit_rms=math.sqrt(self.errors.squares / max(self.errors.count, 1)),
            logit_mean=self.errors.mean,
            logit_mean_error=self.errors.error,
            logit_max=self.largest,
            calibration=candidate / reference - 1 if reference else 0.0,
            cross_entropy=difference / entropy if entropy else 0.0,
            cross_entropy_error=math.sqrt(squares) / entropy if entropy else 0.0,
            segments=tuple(self._segments()),
        )

    def _segments(self) -> Iterator[SegmentShift]:
        """Segments whose mean is known to `SEGMENT_RESOLUTION`, then the pool of the others."""
        pool = _Moments()
        for segment, moments in sorted(self.segments.items()):
            if moments.error <= SEGMENT_RESOLUTION or math.isnan(moments.total):
                yield SegmentShift(segment=segment, rows=int(moments.count), mean=moments.mean, error=moments.error)
            else:
                pool.merge(moments)
        if pool.count:
            yield SegmentShift(segment=None, rows=int(pool.count), mean=pool.mean, error=pool.error)


def _compare_layers(
    reference: nn.Module, candidate: nn.Module, batches: list[Any], *, precision: Precision, loss: LossFunction
) -> tuple[tuple[LayerAgreement, ...], float]:
    """SQNR of every module's output and cosine of every module's own gradient, over the batches together."""
    kept = {id(p): p.grad for model in (reference, candidate) for p in model.parameters()}
    powers: dict[str, Tensor] = {}
    with _gradients_restored(reference, candidate, kept):
        for batch in batches:
            outputs: dict[str, list[Tensor]] = defaultdict(list)
            with _recording(reference, outputs), precision():
                value = loss(reference, batch)
            value.backward()
            seen: dict[str, list[Tensor]] = defaultdict(list)
            with _recording(candidate, seen), precision():
                value = loss(candidate, batch)
            value.backward()
            for name in outputs.keys() & seen.keys():
                for a, b in zip(outputs[name], seen[name], strict=False):
                    if a.shape == b.shape:
                        power = torch.stack([a.square().sum(), (a - b).square().sum()])
                        powers[name] = powers.get(name, torch.zeros_like(power)) + power
        return _layer_records(reference, candidate, powers)


@contextmanager
def _gradients_restored(reference: nn.Module, candidate: nn.Module, kept: dict[int, Tensor | None]) -> Iterator[None]:
    models = (reference, candidate)
    try:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = None
        yield
    finally:
        for model in models:
            for parameter in model.parameters():
                parameter.grad = kept[id(parameter)]


@contextmanager
def _recording(model: nn.Module, outputs: dict[str, list[Tensor]]) -> Iterator[None]:
    """Collect the float outputs of every leaf module, in call order, as fp64 copies."""

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if type(output) in (Tensor, nn.Parameter) and output.is_floating_point():
                outputs[name].append(output.detach().double())

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(record(name)) for name, module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_records(
    reference: nn.Module, candidate: nn.Module, powers: dict[str, Tensor]
) -> tuple[tuple[LayerAgreement, ...], float]:
    twins = dict(candidate.named_modules())
    layers = []
    total = torch.zeros(3, dtype=torch.float64)
    for name, module in reference.named_modules():
        twin = twins.get(name)
        if twin is None:
            continue
        products = _grad_products(module, twin)
        if products is not None:
            total += products
        if name in powers or products is not None:
            layers.append(
                LayerAgreement(
                    layer=name,
                    quantized=type(twin) is not type(module),
                    sqnr_db=_sqnr_db(powers[name]) if name in powers else None,
                    grad_cosine=None if products is None else _cosine(products),
                    grad_norm_ratio=None if products is None else _norm_ratio(products),
                )
            )
    return tuple(layers), _cosine(total)


def _grad_products(module: nn.Module, twin: nn.Module) -> Tensor | None:
    """(g_r . g_c, |g_r|^2, |g_c|^2) over the module's own parameters, fp64 on the CPU."""
    products = torch.zeros(3, dtype=torch.float64)
    found = False
    for name, parameter in module.named_parameters(recurse=False):
        a, b = parameter.grad, getattr(twin, name).grad
        if a is None or b is None:
            continue
        a, b = (g.to_dense() if g.is_sparse else g for g in (a, b))
        a, b = a.double().flatten(), b.double().flatten()
        products += torch.stack([a @ b, a @ a, b @ b]).cpu()
        found = True
    return products if found else None


def _cosine(products: Tensor) -> float:
    """1 where both gradients vanish or are equal; NaN stays NaN."""
    dot, a, b = products.tolist()
    if dot == a == b:
        return 1.0
    return dot / math.sqrt(a * b) if a * b > 0 else (math.nan if math.isnan(a * b) else 0.0)


def _norm_ratio(products: Tensor) -> float:
    _, a, b = products.tolist()
    if a == b:
        return 1.0
    return math.sqrt(b / a) if a > 0 else math.inf


def _sqnr_db(power: Tensor) -> float:
    signal, noise = power.tolist()
    if math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
