"""Which layers can become MXFP8, found by what they do rather than by what they are called.

`nn.Linear` and its subclasses are known by type; any other leaf module with a 2-D `weight` is asked: its
forward runs on a few probe rows and is compared with `x @ weight + bias` and `x @ weight.T + bias`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .fused.spec import BLOCK
from .modules import MXFP8Linear, MXFP8LinearTransposed

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROBE_ROWS = 3
_PROBE_LIMIT = 1 << 27  # elements of a weight made up to probe a layer that lives on the meta device


@dataclass(frozen=True)
class Candidate:
    """A layer a recipe could convert, or the reason it cannot.

    Attributes:
        kind: layer kind, the key of a recipe's precision.
        in_features, out_features: of the GEMM; 0 where unknown.
        implementation: the MXFP8 class, or None with `reason` saying why not.
    """

    kind: str
    in_features: int
    out_features: int
    implementation: type[nn.Module] | None
    reason: str = ""


def recognize(module: nn.Module, parent: nn.Module | None, cache: dict[object, bool]) -> Candidate | None:
    """What `module` is to a recipe; None when it is no candidate at all.

    `cache` keeps the probes' answers for the modules of one plan.
    """
    if isinstance(module, nn.Linear):
        return _recognize_linear(module, parent)
    weight = _plain_weight(module)
    if weight is None or type(module).__module__.startswith("torch.nn."):
        return None
    key = (type(module), weight.shape, weight.device.type, module.extra_repr())
    if key not in cache:
        cache[key] = "forward" not in module.__dict__ and _computes_transposed_linear(module, weight)
    if not cache[key]:
        return None
    in_features, out_features = weight.shape
    reason = _weight_problem(weight) or _alignment_problem(in_features, out_features)
    return Candidate("linear", in_features, out_features, None if reason else MXFP8LinearTransposed, reason)


def _recognize_linear(module: nn.Linear, parent: nn.Module | None) -> Candidate:
    reason = (
        _forward_problem(module)
        or _parent_problem(parent)
        or _weight_problem(module.weight)
        or _alignment_problem(module.in_features, module.out_features)
    )
    return Candidate("linear", module.in_features, module.out_features, None if reason else MXFP8Linear, reason)


def _forward_problem(module: nn.Linear) -> str:
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a swap would bypass; apply the recipe before that"
    owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if owner is not nn.Linear:
        return f"{owner.__name__} has a forward of its own, which a swap would bypass"
    return ""


def _parent_problem(parent: nn.Module | None) -> str:
    if isinstance(parent, nn.MultiheadAttention):
        return f"{type(parent).__name__} reads its weight and never calls it"
    return ""


def _weight_problem(weight: Tensor) -> str:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its parameters are not initialized yet; run one batch, then apply the recipe"
    if weight.dtype not in _FLOAT_DTYPES:
        return f"weight dtype {weight.dtype} is not float32, bfloat16 or float16"
    return ""


def _alignment_problem(in_features: int, out_features: int) -> str:
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size % BLOCK or size == 0:
            return f"{name}={size} is not a multiple of {BLOCK}"
    return ""


def _plain_weight(module: nn.Module) -> Tensor | None:
    """The 2-D weight of a leaf module that owns nothing but a weight and perhaps a bias."""
    names = set(module._parameters)
    weight = module._parameters.get("weight")
    if module._modules or not names <= {"weight", "bias"} or weight is None or weight.dim() != 2:
        return None
    return weight


@torch.no_grad()
def _computes_transposed_linear(module: nn.Module, weight: Tensor) -> bool:
    """Whether `module(x)` is `x @ weight (+ bias)`, tried on a stand-in that shares the module's attributes."""
    stand_in = copy.copy(module)
    stand_in._parameters = dict(module._parameters)
    generator = torch.Generator().manual_seed(0)
    if weight.device.type == "meta":
        if weight.numel() > _PROBE_LIMIT:
            return False
        for name, p in module._parameters.items():
            if p is not None:
                stand_in._parameters[name] = nn.Parameter(torch.randn(p.shape, generator=generator))
    real = stand_in._parameters["weight"]
    bias = stand_in._parameters.get("bias")
    assert real is not None
    x = torch.randn(_PROBE_ROWS, real.shape[0], generator=generator).to(real)
    try:
        out = type(module).forward(stand_in, x)
    except Exception:  # a module that cannot take the probe is no linear
        return False
    expected = x.float() @ real.float() + (0 if bias is None else bias.float())
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return False
    error = (out.float() - expected).norm()
    return bool(error <= 2 * torch.finfo(real.dtype).eps * real.shape[0] ** 0.5 * expected.norm() + 1e-30)
