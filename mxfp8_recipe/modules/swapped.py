"""Turning a module into its MXFP8 counterpart in place: its class changes, the object does not.

Parameters, hooks, optimizer references, `state_dict` keys and tied weights stay what they were, because
nothing but `module.__class__` and one config attribute is touched. A subclass of a known layer, or a
parametrized one, gets a class made for it that derives from its own; such a class pickles as a recipe to
make it again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from ..fused.spec import QuantSpec

_CONFIG = "mxfp8_config"
_NAME = "mxfp8_name"
_CARRIED = ("forward", "extra_repr", "original_class", "__doc__")


def is_swapped(module: nn.Module) -> bool:
    """Whether `module` was turned into an MXFP8 layer, or was made as one."""
    return getattr(type(module), "original_class", None) is not None and _CONFIG in module.__dict__


def swap_class(module: nn.Module, implementation: type[nn.Module], config: Any, name: str = "") -> None:
    """Make `module` an `implementation` that runs with `config`, keeping its identity and state.

    `name`: FQN, for errors.
    """
    module.__class__ = swapped_class(type(module), implementation)
    module.__dict__[_CONFIG] = config
    module.__dict__[_NAME] = name


def restore(module: nn.Module) -> None:
    """Undo `swap_class`. A parametrization registered since stays in place."""
    cls = type(module)
    owner = next(c for c in cls.__mro__ if "original_class" in vars(c))
    if cls is owner:
        module.__class__ = owner.original_class  # pyright: ignore[reportAttributeAccessIssue]
    else:  # a class torch made for this one instance, on top of ours
        bases = tuple(owner.original_class if base is owner else base for base in cls.__bases__)
        cls.__bases__ = bases  # pyright: ignore[reportAttributeAccessIssue]
    del module.__dict__[_CONFIG]
    module.__dict__.pop(_NAME, None)


@cache
def swapped_class(original: type[nn.Module], implementation: type[nn.Module]) -> type[nn.Module]:
    """`implementation` itself where it replaces exactly `original`, else a class deriving from `original`."""
    if implementation.original_class is original:  # pyright: ignore[reportAttributeAccessIssue]
        return implementation
    carried = (*_CARRIED, *getattr(implementation, "carried", ()))
    namespace = {name: vars(implementation)[name] for name in carried if name in vars(implementation)}
    namespace |= {
        "original_class": original,
        "__module__": original.__module__,
        "__reduce_ex__": lambda self, protocol: (_rebuild, (original, implementation), self.__getstate__()),
    }
    return type(f"MXFP8{original.__name__}", (original,), namespace)


def _rebuild(original: type[nn.Module], implementation: type[nn.Module]) -> nn.Module:
    cls = swapped_class(original, implementation)
    return cls.__new__(cls)


def describe_config(config: Any) -> str:
    """The text an MXFP8 module adds to its `extra_repr`, from the config's three GEMMs."""
    parts = []
    for gemm in ("fprop", "dgrad", "wgrad"):
        first, second = getattr(config, gemm)
        parts.append(f"{gemm}={_short(first)} @ {_short(second)}" if first else f"{gemm}=bf16")
    return ", ".join(parts)


def _short(spec: str) -> str:
    return QuantSpec.decode(spec).short
