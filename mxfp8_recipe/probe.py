"""Asking a module what it computes: its forward runs on probe rows and is compared with known functions.

The module itself is left alone: the probe runs on a shallow copy whose parameters are random fp32 tensors, so
neither a degenerate initialization (all ones, all zeros) nor the meta device hides what it does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .fused.reference_ops import GATED_KINDS, PLAIN_KINDS, activation_quantize, norm_quantize

_ROWS = 3
_LIMIT = 1 << 24  # elements of a weight made up for a probe
_COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)


@dataclass(frozen=True)
class FoundNorm:
    """A norm as its behavior shows it; `weight` and `bias` are parameter names.

    `promotes`: a half-precision input with fp32 parameters gives fp32.
    """

    kind: str
    eps: float
    weight: str
    bias: str | None
    weight_offset: float
    promotes: bool


def probe_transposed_linear(module: nn.Module) -> bool:
    """Whether `module(x)` is `x @ weight (+ bias)` for its (in_features, out_features) weight."""
    stand_in = _stand_in(module)
    if stand_in is None:
        return False
    weight, bias = stand_in._parameters["weight"], stand_in._parameters.get("bias")
    assert weight is not None
    x = _random(_ROWS, weight.shape[0])
    with torch.autocast("cpu", enabled=False):
        expected = x @ weight
    return _close(_run(stand_in, x), expected if bias is None else expected + bias)


def probe_norm(module: nn.Module) -> FoundNorm | None:
    """The layer or RMS norm over the last dim that `module` computes, if it computes one."""
    stand_in = _stand_in(module)
    if stand_in is None:
        return None
    names = [name for name, p in stand_in._parameters.items() if p is not None]
    orders = [(names[0], None)] if len(names) == 1 else [(names[0], names[1]), (names[1], names[0])]
    features = stand_in._parameters[names[0]].shape[0]  # pyright: ignore[reportOptionalMemberAccess]
    # Rows of very different size: the smallest ones tell eps apart.
    x = _random(6, features) * _column(1.0, 1e-1, 1e-2, 1e-3, 3e-4, 1e2) + 0.25 * 1e-3
    out = _run(stand_in, x)
    if not isinstance(out, Tensor) or out.shape != x.shape:
        return None
    eps_choices = dict.fromkeys([*_small_floats(module), *_COMMON_EPS])
    for kind in ("rms", "layer"):
        for weight, bias in orders:
            for offset in (0.0, 1.0):
                for eps in eps_choices:
                    if _close(out, _norm(stand_in, x, kind, weight, bias, offset, eps)):
                        if not _same_in_3d(stand_in, x, out):
                            return None
                        half = _run(stand_in, x.bfloat16())
                        promotes = isinstance(half, Tensor) and half.dtype == torch.float32
                        return FoundNorm(kind, eps, weight, bias, offset, promotes)
    return None


def probe_activation(module: nn.Module) -> tuple[str, str] | None:
    """`(kind, packed)` of the activation `module` computes: `packed` is which half a gated one activates."""
    values = torch.linspace(-6.0, 6.0, 4 * 64, dtype=torch.float32, device="cpu")
    x = values.reshape(4, 64)[:, torch.randperm(64, generator=_generator(), device="cpu")]
    stand_in = _stand_in(module)
    out = _run(stand_in, x.clone())
    if not isinstance(out, Tensor) or not _same_in_3d(stand_in, x, out):
        return None
    if out.shape == x.shape:
        return next(((kind, "") for kind in PLAIN_KINDS if _close(out, _activation(x, None, kind))), None)
    first, second = x.chunk(2, -1)
    for packed, gate, up in (("first", first, second), ("second", second, first)):
        for kind in GATED_KINDS:
            if _close(out, _activation(up.contiguous(), gate.contiguous(), kind)):
                return kind, packed
    return None


def _norm(module: nn.Module, x: Tensor, kind: str, weight: str, bias: str | None, offset: float, eps: float) -> Tensor:
    scale = module._parameters[weight]
    shift = module._parameters[bias] if bias else None
    assert scale is not None
    return norm_quantize(x, None, scale + offset, shift, eps, kind, torch.float32, None, None, True)[0]


def _activation(x: Tensor, gate: Tensor | None, kind: str) -> Tensor:
    return activation_quantize(x, gate, kind, torch.float32, None, None, True)[0]


def _stand_in(module: nn.Module) -> nn.Module | None:
    """A shallow copy of a leaf module with random fp32 parameters on the CPU."""
    if sum(p.numel() for p in module._parameters.values() if p is not None) > _LIMIT:
        return None
    stand_in = copy.copy(module)
    generator = _generator()
    stand_in._parameters = {
        name: None if p is None else nn.Parameter(_random(*p.shape, generator=generator), requires_grad=False)
        for name, p in module._parameters.items()
    }
    stand_in._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return stand_in


@torch.no_grad()
def _run(module: nn.Module | None, x: Tensor) -> object:
    if module is None:
        return None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), torch.autocast("cpu", enabled=False):
        try:
            return type(module).forward(module, x)
        except Exception:  # a module that cannot take the probe is none of these
            return None


def _same_in_3d(module: nn.Module | None, x: Tensor, out: Tensor) -> bool:
    """Whether rows in a batch of sequences give what they give alone; a module that refuses those never sees them."""
    wide = None if module is None else _run(module, x.clone().reshape(2, -1, x.shape[-1]))
    return wide is None or _close(wide, out.reshape(2, -1, out.shape[-1]))


def _close(out: object, expected: Tensor) -> bool:
    if not isinstance(out, Tensor) or out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    return bool(torch.allclose(out, expected, rtol=2e-5, atol=2e-6 * max(1.0, expected.abs().max().item() / 10)))


def _small_floats(module: nn.Module) -> list[float]:
    return [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]


def _column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")[:, None]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _random(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(shape, generator=generator or _generator(), dtype=torch.float32, device="cpu")
