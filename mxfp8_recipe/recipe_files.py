"""Recipes and overrides as YAML files, shipped or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from .config import Override, Recipe, merge, validate
from .fused.spec import near_misses

_SHIPPED = "mxfp8_recipe.recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(f.name.removesuffix(".yaml") for f in resources.files(_SHIPPED).iterdir() if f.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path | Recipe) -> Recipe:
    """A shipped recipe by name, or a YAML file by path.

    A file may begin with `extends: NAME_OR_PATH`, a path being relative to that file, and then state only
    what differs. Its name, unless it states one, is the file's.

    Raises:
        ValueError: unknown name (with near misses), broken YAML (with line), nothing in it, or bad fields, all at once.
        FileNotFoundError: a path that does not exist.
    """
    return name_or_path if isinstance(name_or_path, Recipe) else _load(name_or_path, ())


def _load(name_or_path: str | Path, chain: tuple[str, ...]) -> Recipe:
    if str(name_or_path) in chain:
        raise ValueError(f"recipe: extends itself: {' -> '.join((*chain, str(name_or_path)))}")
    text, where = _read(name_or_path)
    values = _parse_mapping(text, where)
    values.setdefault("name", Path(str(name_or_path)).stem)
    if "extends" in values:
        extended = values.pop("extends")
        if not isinstance(extended, str):
            raise ValueError(f"{where}: extends: got {extended!r}, expected a recipe's name or a path")
        base = _load(_beside(name_or_path, extended), (*chain, str(name_or_path)))
        values = merge(base.model_dump(mode="json"), values)
    return validate(Recipe, values, where)


def _beside(name_or_path: str | Path, extended: str) -> str | Path:
    """A file named in `extends` is meant relative to the file that names it; a recipe's name stays a name."""
    return Path(name_or_path).parent / extended if _is_path(extended) else extended


def load_overrides(overrides: Mapping[str, Override] | str | Path | None) -> dict[str, Override]:
    """Overrides from a mapping, or from a YAML file that holds one (at top level or under `overrides:`)."""
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping):
        return dict(overrides)
    if not isinstance(overrides, str | Path):
        raise TypeError(
            f"overrides: got {overrides!r}, expected a mapping of layer patterns to precisions, or a YAML file"
        )
    path = Path(overrides)
    if not path.is_file():
        raise FileNotFoundError(f"overrides: no file {path}; expected a YAML file of layer patterns and precisions")
    values = _parse_mapping(path.read_text(), f"overrides {path}")
    if set(values) == {"overrides"}:
        values = values["overrides"]
        if not isinstance(values, Mapping):
            raise ValueError(f"overrides {path}: got {values!r} under `overrides`, expected a mapping")
    return dict(values)


def _read(name_or_path: str | Path) -> tuple[str, str]:
    text = str(name_or_path)
    if _is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise FileNotFoundError(f"recipe: no file {path}; shipped recipes are {', '.join(recipe_names())}")
        return path.read_text(), f"recipe {path}"
    names = recipe_names()
    if text not in names:
        raise ValueError(
            f"recipe: got {text!r}{near_misses(text, names)}, expected one of {', '.join(names)}, "
            "or a path to a YAML file"
        )
    return (resources.files(_SHIPPED) / f"{text}.yaml").read_text(), f"recipe {text}"


def _is_path(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text


def _parse_mapping(text: str, where: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{where}: not valid YAML{place}: {getattr(error, 'problem', error)}") from None
    if values is None:
        raise ValueError(f"{where}: got a file that states nothing, expected a mapping")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{where}: got {type(values).__name__}, expected a mapping with text keys")
    return values
