"""CTR models to compare precisions on, in plain torch: `build_model(name, spec)`."""

from __future__ import annotations

from torch import nn

from mxfp8_recipe.ab.data.lookup import DataError, resolve_function, unknown_name
from mxfp8_recipe.ab.models import dcnv2, dlrm, gem_small
from mxfp8_recipe.ab.types import FeatureSpec, ModelBuilder

__all__ = ["MODELS", "build_model"]

MODELS: dict[str, ModelBuilder] = {"gem-small": gem_small.build, "dlrm": dlrm.build, "dcnv2": dcnv2.build}


def build_model(name: str, spec: FeatureSpec) -> nn.Module:
    """The model called `name`, for data of `spec`: `forward(batch)` gives logits (B, num_tasks).

    Args:
        name: a key of `MODELS`, or `module:function` where `function(spec)` returns an `nn.Module`.
    """
    check_spec(spec)
    if name in MODELS:
        return MODELS[name](spec)
    if ":" not in name:
        raise unknown_name("model", name, [*MODELS, "module:function"])
    model = resolve_function("model", name)(spec)
    if not isinstance(model, nn.Module):
        raise DataError(f"model {name}: it returned {type(model).__name__}, expected an nn.Module")
    return model


def check_spec(spec: FeatureSpec) -> None:
    """Reject a spec no model can be built from, every bad field at once."""
    problems = []
    if spec.num_dense < 0:
        problems.append(f"num_dense: got {spec.num_dense}, expected >= 0")
    if spec.num_dense == 0 and not spec.cardinalities:
        problems.append("num_dense and cardinalities: got neither dense nor categorical features")
    if any(n < 1 for n in spec.cardinalities):
        problems.append(f"cardinalities: got {spec.cardinalities}, expected each >= 1 (id 0 is missing)")
    if spec.history_field is not None:
        if not 0 <= spec.history_field < len(spec.cardinalities):
            problems.append(
                f"history_field: got {spec.history_field}, expected the index of one of "
                f"{len(spec.cardinalities)} categorical fields"
            )
        if spec.max_history < 1:
            problems.append(f"max_history: got {spec.max_history}, expected >= 1 with a history_field")
    if not spec.tasks or len(set(spec.tasks)) != len(spec.tasks):
        problems.append(f"tasks: got {spec.tasks}, expected one or more different names")
    if problems:
        raise DataError("FeatureSpec: " + "; ".join(problems))
