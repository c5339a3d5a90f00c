"""Tells an exception out of a user's own `--data` or `--model` code from one of ours, and shows it as theirs."""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mxfp8_recipe
from mxfp8_recipe.ab.data.lookup import DataError

_OURS = Path(mxfp8_recipe.__file__).resolve().parent
_INTERCEPTORS = ("__torch_function__", "__torch_dispatch__")
"""They carry out the operation that a user's forward asked for; an error under one is the user's."""


class UserCodeError(DataError):
    """What a user's function raised, in one line; `trace` is the traceback from its first line in their code on."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace

    def __reduce__(self) -> tuple[type[UserCodeError], tuple[str, str]]:
        return UserCodeError, (str(self), self.trace)


def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return tuple({Path(path).resolve() for path in found})


@contextmanager
def user_code(*references: str) -> Iterator[None]:
    """Turn what a user's function raises into one `UserCodeError` that names the function and where.

    An exception is the user's when the innermost frame that belongs to no library lies outside this package, or when
    code of theirs called ours in a way that ours refuses by a ValueError or TypeError; so is leaving the process, whose
    exit code would pass for a verdict. Without a `module:function` among `references` there is no user's code, and
    everything passes unchanged.
    """
    named = [r for r in references if ":" in r]
    try:
        yield
    except (DataError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        first = _first_cause(error)
        frames = _frames_from_user(first) if named else []
        user = _user_frame(first, frames)
        if user is None:
            raise
        what = f"{type(first).__name__}: {first}"
        trace = traceback.format_list(frames) + traceback.format_exception_only(first)
        raise UserCodeError(
            f"{' or '.join(_called(named, frames))}: raised {what} (at {user.filename}:{user.lineno}, in {user.name})",
            "Traceback (most recent call last):\n" + "".join(trace),
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    """What a user's forward raised, where our own message about it was raised from that."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    return error


def _frames_from_user(error: BaseException) -> Sequence[traceback.FrameSummary]:
    """The frames of an error from the user's first on; a file that does not parse has one."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    start = next((i for i, frame in enumerate(frames) if _whose(frame) == "user"), len(frames))
    return frames[start:]


def _whose(frame: traceback.FrameSummary) -> str:
    """`ours`, `user`, or `library`, which generated code counts as."""
    path = Path(frame.filename)
    if not path.is_file():
        return "library"
    path = path.resolve()
    if path.is_relative_to(_OURS) or path.is_relative_to(_OURS.parent / "fused"):
        return "ours"
    return "library" if any(path.is_relative_to(folder) for folder in _library_folders()) else "user"


def _user_frame(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of the user's own, or None where an error of ours lies further in."""
    user, inside_ours = None, False
    for frame in frames:
        if frame.name in _INTERCEPTORS:
            break
        whose = _whose(frame)
        if whose == "user":
            user = frame
        inside_ours = whose == "ours" or (inside_ours and whose == "library")
    return None if inside_ours and not isinstance(error, ValueError | TypeError) else user


def _called(named: Sequence[str], frames: Sequence[traceback.FrameSummary]) -> Sequence[str]:
    """Those of the functions that the frames show; all where they show none."""
    names, modules = {frame.name for frame in frames}, {Path(frame.filename).stem for frame in frames}
    by_file = [r for r in named if r.partition(":")[0].rpartition(".")[2] in modules] or named
    return [r for r in by_file if r.rpartition(":")[2].rpartition(".")[2] in names] or by_file
