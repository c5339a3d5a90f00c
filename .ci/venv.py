"""Create or top up `.venv` for the Makefile: standard library only, idempotent, silent when there is nothing to do.

A torch that the calling Python already has is used when it fits, however it was built; otherwise the `--torch`
requirement is installed first and then held in place, so that no extra can pull in another build of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "stamp.json"
CONSTRAINTS = VENV / "constraints.txt"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 10)
LINKED = ("fused", "recipes")
"""Directories that install under `mxfp8_recipe`, though they lie beside it."""

PROBE = """
import sys
from importlib import metadata
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
requirement = Requirement(sys.argv[1])
try:
    version = metadata.version("torch")
except metadata.PackageNotFoundError:
    sys.exit("no torch")
print(version)
sys.exit(0 if requirement.specifier.contains(version, prereleases=True) else 1)
"""
"""Prints the version of torch that an interpreter sees; exits 0 when it satisfies the requirement."""


def main() -> None:
    """Do what is missing, in order: interpreter, torch, project, links, stamp."""
    arguments = parse_arguments()
    if sys.version_info < OLDEST:
        sys.exit(
            f"mxfp8-recipe needs Python {OLDEST[0]}.{OLDEST[1]} or newer, and {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=python3.12 ..."
        )
    extras = set(filter(None, arguments.extras.split(",")))
    done = read_stamp()
    if done.get("key") == stamp_key(arguments) and extras <= set(done["extras"]) and PYTHON.exists():
        return
    extras = sorted(extras | set(done.get("extras", [])))
    create_venv(arguments.fits)
    install_torch(arguments.torch, arguments.fits)
    install_project(extras)
    link_for_tools()
    STAMP.write_text(json.dumps({"key": stamp_key(arguments), "extras": extras}))


def parse_arguments() -> argparse.Namespace:
    """What the Makefile asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="requirement to install when no fitting torch is there")
    parser.add_argument("--exactly", action="store_true", help="a torch already installed must meet --torch to fit")
    parser.add_argument("--extras", default="test", help="comma-separated extras of the project")
    arguments = parser.parse_args()
    arguments.fits = arguments.torch if arguments.exactly else supported_torch()
    return arguments


def supported_torch() -> str:
    """The requirement in pyproject.toml, read without a TOML parser: Python 3.10 has none."""
    found = re.search(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        sys.exit("[setup] pyproject.toml names no torch among its dependencies")
    return found[1]


def stamp_key(arguments: argparse.Namespace) -> str:
    """Everything that makes an existing environment out of date."""
    wanted = "\n".join([arguments.torch, arguments.fits, str(ROOT), (ROOT / "pyproject.toml").read_text()])
    return hashlib.sha256((wanted + Path(__file__).read_text()).encode()).hexdigest()


def read_stamp() -> dict:
    """What the last complete set-up left, or nothing."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def say(text: str) -> None:
    """Tell the user what happens next."""
    print(f"[setup] {text}", flush=True)


def run(*command: str | Path) -> None:
    """Run a command in the project's root and stop with its text when it fails."""
    outcome = subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    if outcome.returncode:
        sys.exit(f"[setup] failed ({outcome.returncode}): {' '.join(map(str, command))}")


def pip_install(*arguments: str | Path) -> None:
    """Install with progress on a terminal, and only errors elsewhere."""
    run(PYTHON, "-m", "pip", "install", *([] if sys.stdout.isatty() else ["-q"]), *arguments)


def torch_version(python: str | Path, requirement: str) -> tuple[str | None, bool]:
    """The torch that `python` sees, and whether it satisfies `requirement`."""
    outcome = subprocess.run([str(python), "-c", PROBE, requirement], capture_output=True, text=True, check=False)
    return outcome.stdout.strip() or None, outcome.returncode == 0


def create_venv(fits: str) -> None:
    """Create the environment, open to the calling Python's packages when a fitting torch is among them."""
    if PYTHON.exists() and subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        say("using the .venv that is here")
        return
    found, fitting = torch_version(sys.executable, fits)
    say(f"creating .venv with Python {sys.version.split()[0]}")
    run(sys.executable, "-m", "venv", "--clear", *(["--system-site-packages"] if fitting else []), VENV)
    if fitting and sys.prefix != sys.base_prefix:
        share_active_environment()
    if fitting:
        say(f"sharing the packages of {sys.executable}, which has torch {found}: {fits} is met")
    elif found:
        say(f"leaving aside torch {found} of {sys.executable}: {fits} is not met")


def share_active_environment() -> None:
    """`--system-site-packages` reaches the base installation only: add the virtual environment that runs this."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = subprocess.run([str(PYTHON), "-c", where], capture_output=True, text=True, check=True).stdout
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site_packages.strip(), "_active_environment.pth").write_text("\n".join(sorted(paths)) + "\n")


def install_torch(torch: str, fits: str) -> None:
    """Install `torch` unless one that fits is there, and record the version that the rest must leave alone."""
    found, fitting = torch_version(PYTHON, fits)
    if fitting:
        say(f"torch {found} is installed and meets {fits}")
    else:
        say(f"downloading {torch} (0.2 GB as a CPU build, several GB where pip's index serves a CUDA build)")
        pip_install(torch)
        found, _ = torch_version(PYTHON, fits)
    CONSTRAINTS.write_text(f"torch=={found}\n")


def install_project(extras: list[str]) -> None:
    """Install the project in place, editable, with its extras."""
    say(f"downloading what the project and its extras {', '.join(extras)} lack, as listed in pyproject.toml")
    pip_install("-c", CONSTRAINTS, "-e", f".[{','.join(extras)}]")


def link_for_tools() -> None:
    """An editable install maps directories at import time only: links let type checkers and editors follow."""
    for name in LINKED:
        link = ROOT / "mxfp8_recipe" / name
        if not link.is_symlink():
            link.symlink_to(Path("..", name), target_is_directory=True)


if __name__ == "__main__":
    main()
