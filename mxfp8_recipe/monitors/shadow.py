"""Two models with the same weights on the same rows: what quantization alone does to logits, layers and gradients.

Training noise cannot hide here, so the hard gates of a verdict sit on these numbers. Logit error e of independent
rows with RMS s costs about 0.5 s^2 E[p(1 - p)] nats; its mean moves calibration directly. The reference model also
runs in FP32, which shows what BF16 itself does to the same logits and gradients.
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

from mxfp8_recipe.monitors.records import GradientAgreement, LayerAgreement, SameWeights, SegmentShift, TaskAgreement

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
Judge = Callable[[Tensor, Any], tuple[Tensor, Tensor]]


def as_predicted(logits: Tensor, batch: LabeledBatch) -> tuple[Tensor, Tensor]:
    """The default `Judge`: logits and weights (B, T) as they are."""
    return logits.detach().double(), batch.weights


def compare_same_weights(
    reference: nn.Module,
    candidate: nn.Module,
    batches: Iterable[Any],
    *,
    tasks: tuple[str, ...],
    seed: int,
    precision: Precision,
    loss: LossFunction,
    judge: Judge = as_predicted,
    gradient_batches: int = 4,
) -> SameWeights:
    """Run both models over the same batches in eval mode; parameters, buffers, modes and grads stay as they were.

    Args:
        reference: the model that serves, `model(batch) -> logits (B, T)`.
        candidate: its quantized twin; equal parameters under equal names.
        batches: `LabeledBatch`es.
        tasks: T names.
        seed: goes into the record.
        precision: context to run a forward in: autocast to BF16. Without it, a forward is FP32.
        loss: scalar loss of a model on a batch.
        judge: logits in fp64 and weights to judge a batch by, such as corrected for negative sampling.
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
                outputs = [reference(batch), candidate(batch)]
            with torch.no_grad():
                outputs.append(reference(batch))
            logits, weights = torch.stack([judge(p, batch)[0] for p in outputs]), judge(outputs[0], batch)[1]
            for column, task in enumerate(errors):
                task.add(logits[..., column], batch.labels[:, column], weights[:, column], batch.segments)
            if len(first) < gradient_batches:
                first.append(batch)
        layers, gradient = _compare_layers(reference, candidate, first, precision=precision, loss=loss)
    finally:
        for module, training in modes:
            module.training = training
    return SameWeights(seed=seed, tasks=tuple(task.record() for task in errors), layers=layers, gradient=gradient)


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
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two rows."""
        if self.count < 2:
            return math.inf
        variance = (self.squares - self.count * self.mean**2) / (self.count - 1)
        return math.sqrt(max(variance, 0.0) / self.count)


def _total_error(count: float, total: float, squares: float) -> float:
    """Standard error of a total over rows, from its sum and sum of squares; infinite below two rows."""
    return math.sqrt(max(squares - total**2 / count, 0.0) * count / (count - 1)) if count > 1 else math.inf


@dataclass
class _LogitErrors:
    """Accumulates one task's errors over batches."""

    task: str
    errors: _Moments = field(default_factory=_Moments)
    bf16: _Moments = field(default_factory=_Moments)
    largest: float = 0.0
    segments: dict[int, _Moments] = field(default_factory=lambda: defaultdict(_Moments))
    predicted: Tensor | None = None
    entropy: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, weights: Tensor, segments: Tensor | None) -> None:
        """`logits`: of reference, candidate and reference in FP32 (3, B); the rest (B,)."""
        pair, error = logits[:2], logits[1] - logits[0]
        self.errors.add(error)
        self.bf16.add(logits[0] - logits[2])
        self.largest = max(self.largest, float(error.abs().nan_to_num(math.inf).max())) if len(error) else self.largest
        y, w = labels.double(), weights.double()
        p = w * pair.sigmoid()
        predicted = torch.cat([p.sum(1), (p[1] - p[0]).square().sum(0, keepdim=True)])
        entropy = F.binary_cross_entropy_with_logits(pair, y.expand_as(pair), reduction="none")
        difference = entropy[1] - entropy[0]
        sums = torch.stack([(w * difference).sum(), (w * difference).square().sum(), (w * entropy[0]).sum()])
        self.predicted = predicted if self.predicted is None else self.predicted + predicted
        self.entropy = sums if self.entropy is None else self.entropy + sums
        if segments is not None:
            order = segments.argsort(stable=True)
            names, sizes = segments[order].unique_consecutive(return_counts=True)
            for segment, errors in zip(names.tolist(), error[order].split(sizes.tolist()), strict=True):
                self.segments[segment].add(errors)

    def record(self) -> TaskAgreement:
        if self.predicted is None or self.entropy is None:
            raise ValueError(f"task {self.task!r}: no held-out rows to compare two models on")
        difference, squares, entropy = self.entropy.tolist()
        reference, candidate, moved = self.predicted.tolist()
        return TaskAgreement(
            task=self.task,
            rows=int(self.errors.count),
            logit_rms=self.errors.rms,
            logit_mean=self.errors.mean,
            logit_mean_error=self.errors.error,
            logit_max=self.largest,
            calibration=candidate / reference - 1 if reference else 0.0,
            calibration_error=_total_error(self.errors.count, candidate - reference, moved) / (reference or math.inf),
            cross_entropy=difference / entropy if entropy else 0.0,
            cross_entropy_error=math.sqrt(squares) / entropy if entropy else 0.0,
            bf16_logit_rms=self.bf16.rms,
            bf16_logit_mean=self.bf16.mean,
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


Gradients = dict[str, Tensor]
"""Gradient of each parameter by name, dense, flat, fp64."""


def _compare_layers(
    reference: nn.Module, candidate: nn.Module, batches: list[Any], *, precision: Precision, loss: LossFunction
) -> tuple[tuple[LayerAgreement, ...], GradientAgreement]:
    """SQNR of every module's output and agreement of every module's own gradient, over the batches together."""
    powers: dict[str, Tensor] = {}
    grads: list[Gradients] = [{}, {}, {}]
    for batch in batches:
        outputs: list[dict[str, list[Tensor]]] = [defaultdict(list), defaultdict(list)]
        for index, model in enumerate((reference, candidate)):
            with _recording(model, outputs[index]), precision():
                value = loss(model, batch)
            _add_gradients(grads[index], model, value)
        _add_gradients(grads[2], reference, loss(reference, batch))
        _add_powers(powers, *outputs)
    return _layer_records(reference, candidate, powers, grads)


def _add_gradients(into: Gradients, model: nn.Module, loss: Tensor) -> None:
    """Add the gradient of `loss`; `.grad` is not touched."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, grad in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True):
        if grad is not None:
            flat = (grad.to_dense() if grad.is_sparse else grad).double().flatten()
            into[name] = into[name] + flat if name in into else flat


def _add_powers(
    powers: dict[str, Tensor], reference: dict[str, list[Tensor]], candidate: dict[str, list[Tensor]]
) -> None:
    """Add each module's (signal, noise) power."""
    for name in reference.keys() & candidate.keys():
        for a, b in zip(reference[name], candidate[name], strict=False):
            if a.shape == b.shape:
                power = torch.stack([a.square().sum(), (a - b).square().sum()])
                powers[name] = powers[name] + power if name in powers else power


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
    reference: nn.Module, candidate: nn.Module, powers: dict[str, Tensor], grads: list[Gradients]
) -> tuple[tuple[LayerAgreement, ...], GradientAgreement]:
    twins = dict(candidate.named_modules())
    common = grads[0].keys() & grads[1].keys() & grads[2].keys()
    products = {name: _products(*(g[name] for g in grads)) for name in common}
    layers = []
    for name, module in reference.named_modules():
        own = [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
        mine = [products[p] for p in own if p in products]
        if name in twins and (name in powers or mine):
            layers.append(
                LayerAgreement(
                    layer=name,
                    quantized=type(twins[name]) is not type(module),
                    sqnr_db=_sqnr_db(powers[name]) if name in powers else None,
                    gradient=_agreement(mine) if mine else None,
                )
            )
    return tuple(layers), _agreement(list(products.values()))


def _products(bf16: Tensor, candidate: Tensor, fp32: Tensor) -> Tensor:
    """What `_agreement` needs of one parameter's three gradients: six inner products, on the CPU."""
    difference, own = candidate - bf16, bf16 - fp32
    pairs = (
        (bf16, candidate),
        (bf16, bf16),
        (candidate, candidate),
        (difference, difference),
        (own, own),
        (fp32, fp32),
    )
    return torch.stack([a @ b for a, b in pairs]).cpu()


def _agreement(products: list[Tensor]) -> GradientAgreement:
    """Of several parameters taken as one vector; equal gradients agree exactly, zero ones included."""
    total = torch.stack(products).sum(0).tolist() if products else [0.0] * 6
    dot, bf16, candidate, difference, own, fp32 = total
    if difference == 0:
        cosine = 1.0
    else:
        cosine = dot / math.sqrt(bf16 * candidate) if bf16 * candidate > 0 else math.nan if math.isnan(dot) else 0.0
    return GradientAgreement(cosine=cosine, error=_relative(difference, bf16), bf16_error=_relative(own, fp32))


def _relative(squared_error: float, squared_norm: float) -> float:
    if squared_error == 0:
        return 0.0
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else math.inf


def _sqnr_db(power: Tensor) -> float:
    signal, noise = power.tolist()
    if math.isnan(noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
