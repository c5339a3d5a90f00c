"""What the A/B check was asked to do: frozen, validated, and comparable with what an earlier run was asked."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator

from mxfp8_recipe.config import Frozen, Override, validate
from mxfp8_recipe.recipe_files import load_overrides, load_recipe

DEFAULT_OUT = Path("ab_report")
DEFAULT_ROWS = {"synthetic": 30_000}
"""Rows where `--rows` is not given, so that the default check takes about a minute on two cores."""


def cpu_count() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ABConfig(Frozen):
    """Options of `mxfp8 ab`; the command's help says what each means.

    `overrides` holds the content of the file, so that a changed file is a changed configuration.
    """

    data: str = "synthetic"
    model: str = "gem-small"
    recipe: str = "mxfp8"
    overrides: dict[str, Override] = Field(default_factory=dict)
    seeds: int = Field(default=2, ge=1, le=1000)
    rows: int | None = Field(default=None, ge=2)
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0, lt=1)
    ne_budget: float = Field(default=0.001, gt=0, lt=1)
    weight_column: str | None = None
    negative_sampling_rate: float = Field(default=1.0, gt=0, le=1)
    device: str = Field(default="auto", validate_default=True)
    strict: bool = False
    offline: bool = False
    jobs: int = Field(default=1, ge=1)

    @field_validator("device")
    @classmethod
    def _available(cls, device: str) -> str:
        """`auto` becomes the GPU if there is one."""
        if device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            kind = torch.device(device).type
        except RuntimeError:
            raise ValueError(f"got {device!r}, expected auto, cpu, cuda or cuda:N") from None
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"got {device!r}, expected auto, cpu, cuda or cuda:N")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"got {device!r}, but this torch sees no CUDA device; say --device cpu")
        return device

    @property
    def threads(self) -> int:
        """Threads of each process that measures."""
        return torch.get_num_threads() if self.jobs == 1 else max(1, cpu_count() // self.jobs)

    @property
    def rows_wanted(self) -> int | None:
        """`rows`, or the default for this data; None for all there are."""
        return self.rows or DEFAULT_ROWS.get(self.data)

    @classmethod
    def parse(cls, *, overrides: Path | None = None, **options: Any) -> ABConfig:
        """From command-line options; every bad one at once, in one `ValueError`. Reads the overrides file."""
        return validate(cls, {**options, "overrides": load_overrides(overrides)}, "options")

    def fingerprint(self) -> dict[str, Any]:
        """Everything that results depend on, as JSON values: options, recipe content, versions.

        The budget is left out: the same results can be judged by another. So is `seeds`: more can be added.
        """
        options = self.model_dump(mode="json", exclude={"ne_budget", "seeds", "offline", "jobs"})
        return options | {
            "recipe_digest": load_recipe(self.recipe).digest,
            "torch": torch.__version__,
            "threads": self.threads,
            "machine": platform.machine(),
        }


def difference(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One sentence for every entry of two fingerprints that differs."""
    keys = sorted(earlier.keys() | now.keys())
    return [
        f"{k}: the earlier run has {earlier.get(k)!r}, this one {now.get(k)!r}"
        for k in keys
        if earlier.get(k) != now.get(k)
    ]
