"""Snippets of models that the tests of norms, activations and edges share, and what only looks like one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mxfp8_recipe import Recipe, load_recipe
from mxfp8_recipe.ab.types import Batch, FeatureSpec

WIDTH, HIDDEN = 64, 96


class RMSCastBeforeWeight(nn.Module):
    """fp32 inside; the normalized value is rounded to the input's dtype, then multiplied by the weight."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


class RMSZeroCentered(nn.Module):
    """The weight is stored less 1; everything in fp32, rounded once."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) - 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.scale.float())).type_as(x)


class RMSInPlainDtype(nn.Module):
    """No cast anywhere: computed in the dtype of the input, promoted by the weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self.g


class LayerNormByHand(nn.Module):
    """Mean and biased variance, under the names of older code."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-12) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.randn(width))
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        mean = h.mean(-1, keepdim=True)
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
        return (self.gamma * (h - mean) / torch.sqrt(variance + self.epsilon) + self.beta).to(x.dtype)


class OwnForwardLayerNorm(nn.LayerNorm):
    """A subclass that writes `forward` anew and computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class OneVector(nn.Module):
    """A look-alike: a leaf with a vector of parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)


class ScaleOnly(OneVector):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class L2Norm(OneVector):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * self.weight


class WeightedSoftmax(OneVector):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) * self.weight


class NormOverTokens(OneVector):
    """Over dim 1: the features of a matrix, but the tokens of a batch of sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * self.weight


class UnbiasedLayerNorm(OneVector):
    """Divides by the sample standard deviation plus eps."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.bias


class RMSEpsOutside(OneVector):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3) * self.weight


class RMSThenTanh(OneVector):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class TanhGELU(nn.Module):
    """The approximation written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class PackedGate(nn.Module):
    """`act(one half) * the other half` of the last dim."""

    def __init__(self, kind: str, first: bool = True, dim: int = -1) -> None:
        super().__init__()
        self.kind, self.first, self.dim = kind, first, dim

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, self.dim)
        return getattr(F, self.kind)(a) * b if self.first else a * getattr(F, self.kind)(b)


class Pair(nn.Module):
    """A norm and the linear that reads it."""

    def __init__(self, norm: nn.Module | None = None, out: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm is None else norm
        self.linear = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class SwiGLU(nn.Module):
    """The gated MLP of language models, its pointwise code in `forward`."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal self-attention with separate q, k and v, which share their input's quantization."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block: RMS norms, q, k and v, a gated MLP, residuals. (B, T, WIDTH)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class QKV(nn.Module):
    """A norm read by three linears whose outputs are added: (..., WIDTH) to (..., WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.q(h) + self.k(h) * self.v(h)


def unfused(recipe: str | Recipe = "mxfp8") -> Recipe:
    """The same recipe with every edge storing its value."""
    return load_recipe(recipe).model_copy(update={"fuse": False})


def twins(model: nn.Module, count: int = 2) -> list[nn.Module]:
    return [copy.deepcopy(model) for _ in range(count)]


def fused_producers(report: Any) -> list[str]:
    """Producers of the fused edges, in the plan's order."""
    return [edge.producer for edge in report.plan.edges if edge.fused]


def reason_of(report: Any, producer: str) -> str:
    """Why an edge of this producer is not fused; "" for one that is."""
    (edge,) = [edge for edge in report.plan.edges if edge.producer == producer]
    return edge.reason


@dataclass(frozen=True)
class Allocation:
    """A tensor some op returned, and the bytes of its own storage."""

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@contextmanager
def allocations() -> Iterator[list[Allocation]]:
    """Every tensor the ops inside the block return."""
    seen: list[Allocation] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, Tensor):
                    seen.append(Allocation(str(func), tuple(t.shape), t.dtype, t.untyped_storage().nbytes()))
            return out

    with Watch():
        yield seen


def click_batch(lengths: tuple[int, ...] = (3, 0, 6, 1)) -> tuple[FeatureSpec, Batch]:
    """A jagged batch with an empty history, and its features."""
    spec = FeatureSpec(num_dense=5, cardinalities=(40, 7, 9), history_field=0, max_history=6, tasks=("ctr", "cvr"))
    rows = len(lengths)
    labels = torch.randint(0, 2, (rows, 2)).float()
    batch = Batch(
        dense=torch.randn(rows, 5),
        sparse=torch.stack([torch.randint(0, n, (rows,)) for n in spec.cardinalities], 1),
        labels=labels,
        weights=torch.ones_like(labels),
        history=torch.randint(1, 40, (sum(lengths),)),
        history_offsets=torch.tensor([0, *lengths]).cumsum(0),
    )
    return spec, batch
