"""Runs the benchmark scripts of the source tree, which hold each speed claim of the README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = {
    "quantize": ("bench_memory.py", "quantize"),
    "norm_quantize": ("bench_memory.py", "norm_quantize"),
    "activation_quantize": ("bench_memory.py", "activation_quantize"),
    "gemm": ("bench_gemm.py",),
    "linear": ("bench_linear.py", "linear"),
    "norm_linear": ("bench_linear.py", "norm_linear"),
    "block": ("bench_linear.py", "block"),
    "attention": ("bench_attention.py",),
}
"""The script of each bench, and its arguments."""


def run_benchmarks(bench: str | None, out: Path, commit: str | None) -> int:
    """Run one bench, or all, each in a process of its own, and append its rows to `out`.

    Returns:
        0, or the exit code of the first that failed.

    Raises:
        ValueError: for a name that is no bench, without a GPU, or where there is no source tree.
    """
    import torch

    if bench is not None and bench not in SCRIPTS:
        raise ValueError(f"bench: got {bench!r}, expected one of {', '.join(SCRIPTS)}")
    if not FOLDER.is_dir():
        raise ValueError(
            f"bench: the benchmarks are not part of an installed package, and {FOLDER} does not exist; run it from a "
            "clone of the repository, installed with 'pip install -e .'"
        )
    if not torch.cuda.is_available():
        raise ValueError("bench: found no CUDA device; the CPU's benchmarks are 'make bench'")
    for script, *arguments in [SCRIPTS[bench]] if bench else SCRIPTS.values():
        command = [sys.executable, str(FOLDER / script), *arguments, "--out", str(out)]
        code = subprocess.run([*command, *(["--commit", commit] if commit else [])], check=False).returncode
        if code:
            return code
    return 0
