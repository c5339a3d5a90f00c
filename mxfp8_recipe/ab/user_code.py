"""Tells an exception out of a user's own `--data` or `--model` code from one of ours."""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mxfp8_recipe
from mxfp8_recipe.ab.data.lookup import DataError

_OURS = Path(mxfp8_recipe.__file__).resolve().parent
_INTERCEPTORS = ("__torch_function__", "__torch_dispatch__")
"""They carry out the operation that a user's forward asked for; an error under one is the user's."""


def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return tuple({Path(path).resolve() for path in found})


@contextmanager
def user_code(*references: str) -> Iterator[None]:
    """Turn what a user's function raises into one `DataError` that names where.

    An exception is the user's when the innermost frame that belongs to no library lies outside this package. Without a
    `module:function` among `references` there is no user's code, and everything passes unchanged.
    """
    named = [r for r in references if ":" in r]
    try:
        yield
    except (DataError, KeyboardInterrupt):
        raise
    except Exception as error:
        first = _first_cause(error)
        where = _user_frame(first) if named else None
        if where is None:
            raise
        raise DataError(
            f"{' or '.join(named)}: raised {type(first).__name__}: {first} (at {where.filename}:{where.lineno}, in "
            f"{where.name})"
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    """What a user's forward raised, where our own message about it was raised from that."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    return error


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's own, or None where one of ours lies further in."""
    libraries, user = _library_folders(), None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_file():
            continue  # generated code
        if frame.name in _INTERCEPTORS:
            break
        path = path.resolve()
        if path.is_relative_to(_OURS) or path.is_relative_to(_OURS.parent / "fused"):
            user = None
        elif not any(path.is_relative_to(folder) for folder in libraries):
            user = frame
    return user
