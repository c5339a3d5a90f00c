"""What the rows of a results file share: the machine, the commit, quantiles of the times, and how they are appended."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "h200.jsonl"


def add_options(parser: argparse.ArgumentParser, out: Path | None = None) -> None:
    """`--out FILE` and `--commit HASH`."""
    parser.add_argument("--out", type=Path, default=out, help=f"append JSON lines here (default: {out or 'nowhere'})")
    parser.add_argument("--commit", default=None, help="commit to record, where git is missing")


def commit_hash() -> str:
    """Hash of the checkout, or `unknown` outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def gpu_environment(commit: str | None = None) -> dict[str, str]:
    """The GPU, the versions that made its code, and the commit."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or commit_hash(),
    }


def quantiles_ms(times: Iterable[float]) -> dict[str, float]:
    """Median and outer deciles of milliseconds."""
    ordered = sorted(times)
    picked = {"ms_median": len(ordered) // 2, "ms_p10": len(ordered) // 10, "ms_p90": -1 - len(ordered) // 10}
    return {name: round(ordered[i], 5) for name, i in picked.items()}


def append(out: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Add lines to a results file; nowhere if `out` is None."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
