"""Listens to one sampled step and keeps, on the device, the statistics of every layer's operands and GEMMs.

A linear's *input* on a fused edge exists in MXFP8 alone. Its statistics are those of the high-precision value that was
quantized: the producer's op computes it again from what it saved, with the bits of the unfused model, and the edge
stays fused. `grad_output` comes from a hook on the layer's output, which reads the gradient and leaves it as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mxfp8_recipe import backends
from mxfp8_recipe.autograd import AttentionConfig, LinearConfig
from mxfp8_recipe.functional.listening import AttentionCall, LinearCall, listening
from mxfp8_recipe.fused.spec import QuantSpec
from mxfp8_recipe.monitors.live.attention_statistics import (
    AttentionSample,
    grad_scores_fields,
    probs_fields,
    sample_attention,
)
from mxfp8_recipe.monitors.live.tensor_statistics import (
    Fields,
    peaks_of,
    product_error,
    quantized,
    sample_rows,
    tensor_fields,
    unquantized_fields,
)
from mxfp8_recipe.mx_tensor import Traveling

Key = tuple[str, str]
"""A layer, and a tensor or a GEMM of it."""

SUSPECT_ROWS = 4
MOST_SUSPECTS = 8


@dataclass(frozen=True)
class _Held:
    """What backward's statistics need of a linear's forward: sampled rows of its input, and its weight."""

    input: Tensor
    weight: Tensor
    config: LinearConfig
    needs_input: bool
    needs_weight: bool


@dataclass(frozen=True)
class Suspects:
    """The rows of largest magnitude of one tensor, non-finite ones first: what a dump shows of it."""

    index: Tensor
    rows: Tensor


class Collector:
    """A `Listener` for the layers of one model.

    Args:
        names: FQN of every module.
        rows: at most this many rows of each tensor are quantized again and multiplied again.

    Attributes:
        forward_open: whether forwards are heard; those that checkpointing repeats in backward always are.
        half: whether some gradient was fp16.
        seconds: host time spent.
    """

    def __init__(self, names: Mapping[nn.Module, str], rows: int) -> None:
        self.names, self.rows = names, rows
        self.fields: dict[Key, Fields] = {}
        self.errors: dict[Key, list[Tensor]] = {}
        self.suspects: dict[Key, list[Suspects]] = {}
        self.weights: dict[str, Tensor] = {}
        self.problems: dict[str, str] = {}
        self.forward_open, self.half = True, False
        self.seconds = 0.0

    @property
    def heard(self) -> set[str]:
        """Layers that were heard."""
        return {layer for layer, _ in self.fields}

    def linear(self, call: LinearCall) -> None:
        owner = self.names.get(call.owner)
        if owner is None or not (self.forward_open or in_backward()):
            return
        layer = ".".join(filter(None, (owner, call.part)))
        with self._aside(layer):
            whole = _high(call)
            weight, needs = call.weight.detach().to(call.dtype), (call.input.requires_grad, call.weight.requires_grad)
            held = _Held(sample_rows(whole, self.rows), weight, call.config, *needs)
            if not (in_backward() and layer in self.heard):
                self._forward(layer, whole, held, call.repeated)
            if call.output.requires_grad:
                call.output.register_hook(partial(self._gradient, layer, held))

    def attention(self, call: AttentionCall) -> None:
        if not (self.forward_open or in_backward()):
            return
        layer = self._attention_layer(call.config)
        if layer is None:
            return
        with self._aside(layer):
            sample = sample_attention(call)
            if sample is None:
                return
            probs = probs_fields(sample)
            if probs is not None and not (in_backward() and layer in self.heard):
                self._add((layer, "probs"), probs)
            if call.output.requires_grad:
                call.output.register_hook(partial(self._attention_gradient, layer, sample))

    def _attention_layer(self, config: AttentionConfig) -> str | None:
        """The layer that runs with exactly this config; None for one of another model.

        The name in a config is that of the model its recipe was applied to: two towers may share it.
        """
        return next((n for m, n in self.names.items() if m.__dict__.get("mxfp8_config") is config), None)

    @contextmanager
    def _aside(self, layer: str) -> Iterator[None]:
        """Compute beside the training: no graph, no autocast, nobody listening, and no error that stops it."""
        device, started = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
        try:
            with torch.no_grad(), torch.autocast(device, enabled=False), torch.autocast("cpu", enabled=False):
                with listening(None):
                    yield
        except Exception as error:
            self.problems[layer] = f"{layer}: no statistics: {type(error).__name__}: {error}"
        finally:
            self.seconds += time.perf_counter() - started

    def _forward(self, layer: str, whole: Tensor, held: _Held, repeated: bool) -> None:
        x, w, config = held.input, held.weight, held.config
        x_spec, w_spec = config.fprop
        w_q, w_s = _rowwise(w, w_spec)
        x_q, x_s = _rowwise(x, x_spec)
        if not repeated:
            self._tensor((layer, "input"), whole, x, x_q, x_s, x_spec)
        slab, slab_q, slab_s = (sample_rows(part, self.rows) for part in (w, w_q, w_s)) if w_spec else (w, w_q, w_s)
        self._tensor((layer, "weight"), w, slab, slab_q, slab_s, w_spec)
        self.weights[layer] = w
        if x_spec:
            product = backends.gemm(x_q, x_s, x_spec, w_q, w_s, w_spec, None, x.dtype, "auto")
            self._error((layer, "fprop"), product, x, w)

    def _gradient(self, layer: str, held: _Held, grad: Tensor) -> None:
        self.half |= grad.dtype is torch.float16
        with self._aside(layer):
            g_all = grad.detach().reshape(-1, grad.shape[-1])
            g, x, config = sample_rows(g_all, self.rows), held.input, held.config
            seed = torch.zeros((), dtype=torch.int64, device=g.device)
            g_q, g_s, g_t, g_t_s = quantized(g, config.dgrad[0], config.wgrad[0], seed, 0) if _any(config) else (g,) * 4
            if config.dgrad[0]:
                self._tensor((layer, "grad_output"), g_all, g, g_q, g_s, config.dgrad[0])
            elif config.wgrad[0]:
                self._tensor((layer, "grad_output"), g_all, g.t(), g_t, g_t_s, config.wgrad[0])
            else:
                self._tensor((layer, "grad_output"), g_all, g, g, g, "")
            if config.dgrad[0] and held.needs_input:
                w_t, dtype = quantized(held.weight, "", config.dgrad[1], seed, 0)[2:], held.weight.dtype
                product = backends.gemm(g_q, g_s, config.dgrad[0], *w_t, config.dgrad[1], None, dtype, "auto")
                self._error((layer, "dgrad"), product, g, held.weight.t())
            if config.wgrad[0] and held.needs_weight:
                x_t = quantized(x, "", config.wgrad[1], seed, 0)[2:]
                product = backends.gemm(g_t, g_t_s, config.wgrad[0], *x_t, config.wgrad[1], None, x.dtype, "auto")
                self._error((layer, "wgrad"), product, g.t(), x.t())

    def _attention_gradient(self, layer: str, sample: AttentionSample, grad: Tensor) -> None:
        self.half |= grad.dtype is torch.float16
        with self._aside(layer):
            fields = grad_scores_fields(sample, grad.detach())
            if fields is not None:
                self._add((layer, "grad_scores"), fields)

    def _tensor(self, key: Key, whole: Tensor, sampled: Tensor, qdata: Tensor, scale: Tensor, spec: str) -> None:
        peaks = peaks_of(whole)
        if spec:
            self._add(key, tensor_fields(peaks, sampled, qdata, scale, QuantSpec.decode(spec)))
        else:
            self._add(key, unquantized_fields(peaks))
        kept = self.suspects.setdefault(key, [])
        if len(kept) < MOST_SUSPECTS and peaks.blocks and key[1] != "weight":
            index = peaks.rows.topk(min(SUSPECT_ROWS, len(whole))).indices  # NaN counts as the largest
            kept.append(Suspects(index, whole[index]))

    def _add(self, key: Key, fields: Fields) -> None:
        if key in self.fields:
            self.fields[key].add(fields)
        else:
            self.fields[key] = fields

    def _error(self, key: Key, product: Tensor, a: Tensor, b: Tensor) -> None:
        """Compare an MXFP8 product with that of the same operands (R, C) and (N, C) in BF16."""
        expected = backends.matmul(a.bfloat16(), b.bfloat16(), None, torch.float32, "auto")
        norms = product_error(product, expected)
        before = self.errors.get(key)
        self.errors[key] = norms if before is None else [torch.hypot(a, b) for a, b in zip(before, norms)]


def _high(call: LinearCall) -> Tensor:
    """The input (M, K) that was quantized, in the compute dtype."""
    high = call.input.materialize() if isinstance(call.input, Traveling) else call.input
    return high.detach().to(call.dtype).reshape(-1, high.shape[-1])


def _rowwise(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    if not spec:
        return x, x
    qdata, scale, _, _ = quantized(x, spec, "", torch.zeros((), dtype=torch.int64, device=x.device), 0)
    return qdata, scale


def _any(config: LinearConfig) -> bool:
    return bool(config.dgrad[0] or config.wgrad[0])


def in_backward() -> bool:
    """Whether autograd runs: a forward then is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]
