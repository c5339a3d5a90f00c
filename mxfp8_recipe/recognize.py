"""Which layers can become MXFP8, found by what they do rather than by what they are called.

torch's own layers and their subclasses are known by type. Any other leaf module is asked: its forward runs on
a few probe rows, on a stand-in with made-up parameters, and is compared with what a linear with a transposed
weight, a norm or an activation would give (`probe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import NormConfig
from .fused.spec import BLOCK
from .modules import (
    ActivationConfig,
    JaggedAttention,
    MXFP8Activation,
    MXFP8JaggedAttention,
    MXFP8Linear,
    MXFP8LinearTransposed,
    MXFP8MultiheadAttention,
    MXFP8Norm,
    NormModuleConfig,
    jagged_problem,
    multihead_problem,
)
from .probe import probe_activation, probe_norm, probe_transposed_linear
from .te_interop import KINDS as TE_KINDS
from .te_interop import te_class

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu"}
_OTHER_NORMS = (
    nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase, nn.CrossMapLRN2d,
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A layer a recipe could convert, or the reason it cannot.

    Attributes:
        kind: layer kind, the key of a recipe's precision.
        in_features, out_features: of a GEMM; 0 where unknown or none.
        implementation: the MXFP8 class, or None with `reason` saying why not.
        config: what the implementation needs to know of the module besides its precision.
    """

    kind: str
    in_features: int = 0
    out_features: int = 0
    implementation: type[nn.Module] | None = None
    reason: str = ""
    config: Any = None


def recognize(module: nn.Module, parent: nn.Module | None, cache: dict[object, Any]) -> Candidate | None:
    """What `module` is to a recipe; None when it is no candidate at all.

    `cache` keeps the probes' answers for the modules of one plan.
    """
    of_te = te_class(module)
    if of_te is not None:
        return _recognize_te(module, of_te)
    if isinstance(module, nn.MultiheadAttention):
        return _recognize_multihead(module)
    if isinstance(module, JaggedAttention):
        reason = _forward_problem(module, JaggedAttention) or jagged_problem(module)
        return Candidate("attention", implementation=None if reason else MXFP8JaggedAttention, reason=reason)
    if isinstance(module, nn.Linear):
        return None if isinstance(parent, nn.MultiheadAttention) else _recognize_linear(module)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return _recognize_torch_norm(module, cache)
    if isinstance(module, _OTHER_NORMS):
        return Candidate("norm", reason=f"{type(module).__name__} does not normalize over a token's features")
    if isinstance(module, nn.ReLU | nn.SiLU | nn.GELU):
        return _recognize_torch_activation(module)
    if module._modules or module._buffers or type(module).__module__.startswith("torch."):
        return None
    return _recognize_by_behavior(module, cache)


def _recognize_te(module: nn.Module, of_te: type) -> Candidate:
    """A module of TransformerEngine is planned around: it quantizes by a recipe of its own."""
    sizes = [int(getattr(module, name, 0) or 0) for name in ("in_features", "out_features")]
    reason = (
        f"{of_te.__module__.split('.')[0]}'s {of_te.__name__} quantizes by its own recipe; "
        "Recipe.to_transformer_engine() gives it the matching one"
    )
    return Candidate(TE_KINDS.get(of_te.__name__, "linear"), sizes[0], sizes[1], reason=reason)


def _recognize_by_behavior(module: nn.Module, cache: dict[object, Any]) -> Candidate | None:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if "forward" in module.__dict__ or any(p.device.type != "meta" and p.is_sparse for p in parameters.values()):
        return None
    shapes = tuple((name, tuple(p.shape)) for name, p in parameters.items())
    key = (type(module), shapes, repr(module), tuple(sorted(_plain_attributes(module).items())))
    if key not in cache:
        cache[key] = _probe(module, parameters)
    return cache[key]


def _plain_attributes(module: nn.Module) -> dict[str, str]:
    return {k: repr(v) for k, v in vars(module).items() if isinstance(v, int | float | str | bool) and k != "training"}


def _probe(module: nn.Module, parameters: Mapping[str, Tensor]) -> Candidate | None:
    shapes = [p.dim() for p in parameters.values()]
    if not parameters:
        found = probe_activation(module)
        if found is None:
            return None
        return Candidate("activation", implementation=MXFP8Activation, config=ActivationConfig(*found))
    if set(shapes) == {1} and len(shapes) <= 2:
        return _probe_norm(module, parameters)
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 2 or not set(parameters) <= {"weight", "bias"}:
        return None
    if not probe_transposed_linear(module):
        return None
    in_features, out_features = weight.shape
    reason = _weight_problem(weight) or _alignment_problem(in_features, out_features)
    return Candidate("linear", in_features, out_features, None if reason else MXFP8LinearTransposed, reason)


def _probe_norm(module: nn.Module, parameters: Mapping[str, Tensor]) -> Candidate | None:
    found = probe_norm(module)
    if found is None:
        return None
    weight = parameters[found.weight]
    features = weight.shape[0]
    reason = _weight_problem(weight) or _alignment_problem(features, features, "normalized features")
    config = NormModuleConfig(
        norm=NormConfig(found.kind, found.eps),
        weight=found.weight,
        bias=found.bias,
        weight_offset=found.weight_offset,
        promotes=found.promotes,
    )
    return Candidate("norm", features, features, None if reason else MXFP8Norm, reason, config)


def _recognize_multihead(module: nn.MultiheadAttention) -> Candidate:
    """The whole layer, its projections included: it reads their weights and never calls them."""
    reason = _forward_problem(module, nn.MultiheadAttention) or multihead_problem(module)
    implementation = None if reason else MXFP8MultiheadAttention
    return Candidate("attention", module.embed_dim, module.embed_dim, implementation, reason)


def _recognize_linear(module: nn.Linear) -> Candidate:
    reason = (
        _forward_problem(module, nn.Linear)
        or _weight_problem(module.weight)
        or _alignment_problem(module.in_features, module.out_features)
    )
    return Candidate("linear", module.in_features, module.out_features, None if reason else MXFP8Linear, reason)


def _recognize_torch_norm(module: nn.LayerNorm | nn.RMSNorm, cache: dict[object, Any]) -> Candidate:
    known: type[nn.Module] = nn.LayerNorm if isinstance(module, nn.LayerNorm) else nn.RMSNorm
    features = module.normalized_shape[-1]
    reason = _forward_problem(module, known)
    if reason and not module._modules and not module._buffers:
        found = _recognize_by_behavior(module, cache)  # a forward of its own may compute the same
        if found is not None and found.kind == "norm":
            return found
    if not reason and len(module.normalized_shape) > 1:
        reason = f"normalizes over {tuple(module.normalized_shape)}, not over one dim of features"
    reason = reason or (_weight_problem(module.weight) if module.weight is not None else "")
    reason = reason or _alignment_problem(features, features, "normalized features")
    # eps=None of RMSNorm is the machine epsilon of the dtype torch computes in, which is fp32 for half inputs too.
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    has_bias = getattr(module, "bias", None) is not None
    config = NormModuleConfig(
        norm=NormConfig("layer" if known is nn.LayerNorm else "rms", eps),
        weight="weight" if module.weight is not None else None,
        bias="bias" if has_bias else None,
    )
    return Candidate("norm", features, features, None if reason else MXFP8Norm, reason, config)


def _recognize_torch_activation(module: nn.ReLU | nn.SiLU | nn.GELU) -> Candidate:
    known: type[nn.Module] = next(cls for cls in (nn.ReLU, nn.SiLU, nn.GELU) if isinstance(module, cls))
    in_place = bool(getattr(module, "inplace", False))
    reason = _forward_problem(module, known)
    if in_place and known is not nn.ReLU:
        reason = reason or f"{known.__name__}(inplace=True) overwrites its input, which backward needs"
    if isinstance(module, nn.GELU):
        kind = "gelu_tanh" if module.approximate == "tanh" else "gelu"
    else:
        kind = _ACTIVATIONS[known]
    config = ActivationConfig(kind, in_place=in_place)
    return Candidate("activation", implementation=None if reason else MXFP8Activation, reason=reason, config=config)


def _forward_problem(module: nn.Module, known: type[nn.Module]) -> str:
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a swap would bypass; apply the recipe before that"
    owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if owner is not known:
        return f"{owner.__name__} has a forward of its own, which a swap would bypass"
    return ""


def _weight_problem(weight: Tensor) -> str:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its parameters are not initialized yet; run one batch, then apply the recipe"
    if weight.dtype not in _FLOAT_DTYPES:
        return f"weight dtype {weight.dtype} is not float32, bfloat16 or float16"
    return ""


def _alignment_problem(in_features: int, out_features: int, name: str = "") -> str:
    for what, size in ((name or "in_features", in_features), (name or "out_features", out_features)):
        if size % BLOCK or size == 0:
            return f"{what}={size} is not a multiple of {BLOCK}"
    return ""
