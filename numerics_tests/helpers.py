"""Oracles the tests of quantized paths share: dequantize, multiply in fp64, and a derived bound on the difference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mxfp8_recipe.config import LinearPrecision
from mxfp8_recipe.fused.reference import dequantize, quantize_spec
from mxfp8_recipe.fused.spec import QuantSpec

FP32_UNIT = 2.0**-24
INPUT_STREAM, WEIGHT_STREAM, GRAD_STREAM = 0, 1, 2


@dataclass(frozen=True)
class Expected:
    """An fp64 value and how far a correct computation may lie from it, element by element."""

    value: Tensor
    bound: Tensor

    def check(self, actual: Tensor, what: str = "") -> None:
        assert actual.shape == self.value.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(self.value.shape)}"
        error = (actual.double() - self.value).abs()
        excess = (error - self.bound).max().item() if error.numel() else 0.0
        assert excess <= 0, f"{what}: {excess:.3g} beyond the derived bound; largest error {error.max():.3g}"

    def far_from(self, other: Tensor) -> bool:
        """Whether `other` lies outside the bound somewhere: it cannot be the same computation."""
        return bool(((other.double() - self.value).abs() > self.bound).any())


def rounded(value: Tensor, error: Tensor, dtype: torch.dtype) -> Expected:
    """A value known to `error`, rounded once to `dtype`."""
    unit = torch.finfo(dtype).eps / 2
    return Expected(value, error + (value.abs() + error) * unit + torch.finfo(dtype).smallest_normal * unit)


def matmul_oracle(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Expected:
    """`a @ b.T + bias` in fp64; the bound is fp32 accumulation's, `n u / (1 - n u) * |a| @ |b|.T`, and one rounding."""
    n = (a.shape[1] + 1) * FP32_UNIT
    value = a.double() @ b.double().T
    error = n / (1 - n) * (a.double().abs() @ b.double().abs().T)
    if bias is not None:
        value = value + bias.double()
        error = error + FP32_UNIT * (value.abs() + error)
    return rounded(value, error, dtype)


def seen(x: Tensor, spec: QuantSpec | None, axis: int, seed: Tensor | None = None, stream: int = 0) -> Tensor:
    """What a GEMM sees of an operand: quantized along `axis` and dequantized to fp64, or the operand itself."""
    if spec is None:
        return x.double()
    qdata, scale = quantize_spec(x, spec, axis=axis, seed=seed, stream=stream)
    return dequantize(qdata, scale, axis=axis, dtype=torch.float64)


@dataclass(frozen=True)
class LinearExpected:
    output: Expected
    grad_input: Expected
    grad_weight: Expected
    grad_bias: Expected


def linear_oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, precision: LinearPrecision, seed: Tensor | None = None
) -> LinearExpected:
    """The three GEMMs of a linear layer on explicitly quantized operands: x (M, K), weight (N, K), grad (M, N)."""

    def pair(gemm: object) -> tuple[QuantSpec | None, QuantSpec | None]:
        return (None, None) if gemm == "bf16" else gemm.operands  # pyright: ignore[reportAttributeAccessIssue]

    dtype = x.dtype
    (f_x, f_w), (d_g, d_w), (w_g, w_x) = map(pair, (precision.fprop, precision.dgrad, precision.wgrad))
    weight_grad = matmul_oracle(
        seen(grad, w_g, -2, seed, GRAD_STREAM).T, seen(x, w_x, -2, seed, INPUT_STREAM).T, None, dtype
    )
    return LinearExpected(
        output=matmul_oracle(
            seen(x, f_x, -1, seed, INPUT_STREAM), seen(weight, f_w, -1, seed, WEIGHT_STREAM), bias, dtype
        ),
        grad_input=matmul_oracle(
            seen(grad, d_g, -1, seed, GRAD_STREAM), seen(weight, d_w, -2, seed, WEIGHT_STREAM).T, None, dtype
        ),
        grad_weight=weight_grad,
        grad_bias=rounded(grad.double().sum(0), grad.double().abs().sum(0) * len(grad) * FP32_UNIT, dtype),
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


class MLP(nn.Module):
    """Two linears with an activation, a residual and a norm around them."""

    def __init__(self, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Conv1D(nn.Module):
    """GPT-2's linear: the weight is stored (in_features, out_features)."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.nf, self.nx = out_features, in_features
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * 0.1)
        self.bias = nn.Parameter(torch.randn(out_features) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], self.nf)


def gradients(
    module: nn.Module, x: Tensor, grad: Tensor | Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and gradients of the parameters of one forward and backward.

    `grad` is the output's gradient, or gives it for an output; ones if None.
    """
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(x)
    out.backward(torch.ones_like(out) if grad is None else grad(out.detach()) if callable(grad) else grad)
    assert x.grad is not None
    return out.detach(), x.grad, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], step: Callable | None = None
) -> None:
    """Least-squares steps towards a fixed target, enough to move every weight."""
    for x in batches:
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        (step or optimizer.step)()


def environment_of_tests(**variables: str) -> dict[str, str]:
    """For a process of its own: this checkout before whatever the caller's path has, and `variables`."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_ranks(script: Path, directory: Path, ranks: int, seconds: float) -> None:
    """Run `script RANK DIRECTORY` in a process for each rank, on gloo over the loopback; every one must end well."""
    environment = environment_of_tests(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(directory)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        ends = [(process.communicate(timeout=seconds)[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(code == 0 for _, code in ends), "\n".join(text[-3000:] for text, _ in ends)
