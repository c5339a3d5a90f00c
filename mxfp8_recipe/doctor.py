"""What this machine runs natively, what it emulates, and why: the table that `mxfp8 doctor` prints.

Every line is a `Finding`: what was looked at, its status, the reason, and the remedy where there is one.
Nothing here needs triton or a GPU, and a check that fails becomes a line of the table.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

NATIVE_MX_CAPABILITY = 10
"""First major compute capability whose tensor cores multiply MXFP8 blocks (Blackwell)."""

FP8_CAPABILITY = (8, 9)
"""First compute capability whose tensor cores multiply FP8 operands (Ada; Hopper is 9.0)."""

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")

BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags in the order of preference; the last one is what an Arm processor calls it."""

OPTIONAL = {
    "ab": ("matplotlib", "jinja2", "torchmetrics"),
    "data": ("pandas", "pyarrow"),
    "tensorboard": ("tensorboard",),
    "te": ("transformer_engine",),
    "bench": ("torchao",),
}
"""Modules behind each extra."""

STYLES = {"native": "green", "emulated": "yellow", "missing": "red", "absent": "dim", "info": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table.

    Attributes:
        what: the thing looked at, such as "GEMM" or "torch".
        status: `native` (hardware does it), `emulated` (computed another way, same bits), `missing`
            (needed and not there), `absent` (optional and not there) or `info`.
        reason: why the status is what it is.
        remedy: what to do about it; empty when there is nothing to do.
    """

    what: str
    status: str
    reason: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """All findings, from the software up to the ops."""
    return [
        *_versions(),
        *_devices(),
        _cpu_bf16(),
        *_fp8_dtypes(),
        *_backends(),
        _transformer_engine(),
        *_extras(),
    ]


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print findings as a table, remedies under their reasons."""
    table = Table(title="MXFP8 on this machine", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("why")
    for finding in findings:
        why = Text(finding.reason)
        if finding.remedy:
            why.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.what), Text(finding.status, style=STYLES.get(finding.status, "")), why)
    console.print(table)


def as_dicts(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Findings as plain data, for `mxfp8 doctor --json`."""
    return [asdict(finding) for finding in findings]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _versions() -> list[Finding]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    findings = [
        Finding(what="mxfp8-recipe", status="info", reason=_version("mxfp8-recipe") or "imported from a source tree"),
        Finding(what="python", status="info", reason=f"{platform.python_version()} on {platform.platform()}"),
        Finding(what="torch", status="info", reason=f"{torch.__version__} ({build})"),
    ]
    return [*findings, _triton()]


def _triton() -> Finding:
    if not _importable("triton"):
        return Finding(
            what="triton",
            status="absent",
            reason="not importable; the GPU kernels need it, the reference backend does not",
            remedy="pip install triton" if platform.system() == "Linux" else "triton is published for Linux only",
        )
    return Finding(what="triton", status="info", reason=_version("triton") or "version unknown")


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [
                Finding(
                    what="GPU",
                    status="absent",
                    reason="this torch is a CPU build; every op runs on the reference backend",
                    remedy="on a machine with an NVIDIA GPU, install a CUDA build of torch",
                )
            ]
        return [
            Finding(
                what="GPU",
                status="absent",
                reason=f"torch was built for CUDA {torch.version.cuda} and finds no device",
                remedy="check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES",
            )
        ]
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Finding:
    major, minor = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    if major >= NATIVE_MX_CAPABILITY:
        return Finding(what=f"GPU {index}", status="native", reason=f"{name}: tensor cores multiply MXFP8 blocks")
    if (major, minor) >= FP8_CAPABILITY:
        reason = f"{name}: FP8 tensor cores without block scales; scales are applied to partial sums"
        remedy = "recipe mxfp8_hopper needs the fewest of them" if major == 9 else ""
        return Finding(what=f"GPU {index}", status="emulated", reason=reason, remedy=remedy)
    reason = f"{name}: no FP8 tensor cores; MXFP8 values are multiplied in a wider type"
    return Finding(what=f"GPU {index}", status="emulated", reason=reason)


def _cpu_flags() -> set[str] | None:
    """Instruction-set flags of the first processor, or None where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    listed = next((line for line in lines if line.lower().startswith(("flags", "features"))), None)
    return set(listed.split(":", 1)[1].split()) if listed else None


def _cpu_bf16() -> Finding:
    flags = _cpu_flags()
    if flags is None:
        return Finding(
            what="CPU BF16 matmul",
            status="info",
            reason="this system does not list the processor's instructions",
        )
    found = next((flag for flag in BF16_CPU_FLAGS if flag in flags), None)
    if found:
        return Finding(
            what="CPU BF16 matmul",
            status="native",
            reason=f"the processor has {found}",
        )
    return Finding(
        what="CPU BF16 matmul",
        status="emulated",
        reason="no BF16 instructions: torch's BF16 matmul is far slower than fp32 here, so operands are rounded to "
        "BF16 and multiplied in fp32",
    )


def _fp8_dtypes() -> list[Finding]:
    missing = [name for name in FP8_DTYPES if not hasattr(torch, name)]
    if missing:
        return [
            Finding(
                what="FP8 dtypes",
                status="missing",
                reason=f"torch {torch.__version__} has no {', '.join(missing)}",
                remedy="pip install 'torch>=2.11'",
            )
        ]
    return [Finding(what="FP8 dtypes", status="info", reason=", ".join(FP8_DTYPES))]


def _backends() -> list[Finding]:
    """What each op would use on this machine, as the backend table itself says."""
    try:
        from mxfp8_recipe import backends
    except ImportError as error:
        return [Finding(what="backends", status="missing", reason=f"mxfp8_recipe.backends does not import: {error}")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = backends.choose(torch.device(device))
    status = "emulated" if choice.emulates else "native"
    chosen = Finding(what="backend", status=status, reason=f"{choice.backend}: {choice.why}", remedy=choice.remedy)
    rows = [
        Finding(
            what=f"op {row.op}",
            status=row.status,
            reason=f"backend {row.backend}" + (f": {row.reason}" if row.reason else ""),
        )
        for row in backends.describe(device)
    ]
    return [chosen, *rows]


def _transformer_engine() -> Finding:
    version = _version("transformer-engine")
    limit = f"it cannot run MXFP8 below compute capability {NATIVE_MX_CAPABILITY}"
    if version is None:
        reason = f"an optional peer to compare with; {limit}"
        return Finding(what="transformer-engine", status="absent", reason=reason, remedy=_remedy("te"))
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= NATIVE_MX_CAPABILITY:
        return Finding(what="transformer-engine", status="native", reason=f"{version} runs MXFP8 on this GPU")
    return Finding(what="transformer-engine", status="info", reason=f"{version} is installed, but {limit}")


def _extras() -> list[Finding]:
    findings = []
    for extra, modules in OPTIONAL.items():
        lacking = [module for module in modules if not _importable(module)]
        if not lacking:
            findings.append(Finding(what=f"extra [{extra}]", status="info", reason=f"{', '.join(modules)} installed"))
        elif extra != "te":
            reason = f"not installed: {', '.join(lacking)}"
            findings.append(Finding(what=f"extra [{extra}]", status="absent", reason=reason, remedy=_remedy(extra)))
    return findings


def _remedy(extra: str) -> str:
    return f"pip install 'mxfp8-recipe[{extra}]'"
