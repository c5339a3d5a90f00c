"""Where a run happened, as far as it matters to its numbers."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch


def describe(device: str, threads: int) -> dict[str, str]:
    """Versions and hardware as text, in the order a reader wants them."""
    return {
        "mxfp8_recipe": _version("mxfp8-recipe"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "threads": f"{threads} an arm, {os.cpu_count()} CPUs",
        "platform": platform.platform(terse=True),
        "BF16 products": "native" if device.startswith("cuda") else "emulated: operands and results rounded, FP32 sums",
    }


def command_line() -> str:
    """The command that started this process: `python -m` its module, or its script without the directory."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    started = [Path(sys.argv[0]).name] if module is None else ["python", "-m", module.name.removesuffix(".__main__")]
    return " ".join([*started, *map(_quoted, sys.argv[1:])])


def _quoted(argument: str) -> str:
    import shlex

    return shlex.quote(argument)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    """The CPU's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
