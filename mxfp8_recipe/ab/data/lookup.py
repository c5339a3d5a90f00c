"""Names on the command line to things: explicit tables, near misses, and `module:function` references."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any


class DataError(ValueError):
    """A data set, model or row that cannot be used; the message says what, got, expected and remedy."""


def unknown_name(what: str, got: str, choices: Iterable[str]) -> DataError:
    """The error for `got`, which is none of `choices`, naming the near misses among them."""
    names = list(choices)
    near = difflib.get_close_matches(got.lower().replace("_", "-"), [n.partition(":")[0] for n in names], n=3)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return DataError(f"{what}: got {got!r}, expected one of {', '.join(names)}.{hint}")


def resolve_function(what: str, reference: str) -> Callable[..., Any]:
    """Import `module:function`; the current directory is searched too, as `python -m` does."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise DataError(f"{what}: got {reference!r}, expected module:function, such as my_package.data:load")
    try:
        target: Any = _import_from_cwd(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise DataError(
            f"{what}: got {reference!r}, but there is no module {error.name!r} on the Python path or in the current "
            "directory; run from the directory that holds it, or install it"
        ) from error
    for name in attribute.split("."):
        if not hasattr(target, name):
            near = difflib.get_close_matches(name, dir(target), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise DataError(f"{what}: got {reference!r}, but {module_name!r} has no {name!r}{hint}")
        target = getattr(target, name)
    if not callable(target):
        raise DataError(f"{what}: got {reference!r}, which is {type(target).__name__}, expected a function")
    return target


def _import_from_cwd(module_name: str) -> Any:
    cwd = os.getcwd()
    added = cwd not in sys.path
    if added:
        sys.path.insert(0, cwd)
    try:
        return importlib.import_module(module_name)
    finally:
        if added:
            sys.path.remove(cwd)
