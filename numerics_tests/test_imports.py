"""Imports point one way: read from the sources on disk, and from what importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LAYERS = (
    ("cli",),
    ("doctor", "selftest", "selftest_attention", "selftest_gemms", "selftest_places", "ab", "bench"),
    ("monitors", "distributed"),
    ("api",),
    (
        "first_forward",
        "planner",
        "swap",
        "plan",
        "attention_edges",
        "epilogue_edges",
        "edges",
        "record",
        "rules",
        "recognize",
        "probe",
    ),
    ("modules",),
    ("functional", "mx_tensor", "mx_edge", "mx_functions", "mx_heads", "mx_ready", "mx_reshapes", "mx_awaited"),
    ("autograd",),
    ("backends",),
    ("recipe_files",),
    ("config", "costs", "epilogue_table", "efficiency", "te_interop"),
    ("recipes",),
    ("fused",),
)
"""Top to bottom. A file imports from its own layer or from lower ones."""

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

FUSED_MAY_IMPORT = {"torch", "triton", *sys.stdlib_module_names}

HEAVY = ("matplotlib", "torchmetrics", "jinja2", "typer", "pandas", "transformer_engine", "torchao")
"""What `import mxfp8_recipe` must leave alone."""


def sources() -> dict[str, Path]:
    """Dotted name under `mxfp8_recipe` of every source file, by the place where it installs."""
    found = {}
    for directory, prefix in (("mxfp8_recipe", ()), ("fused", ("fused",)), ("recipes", ("recipes",))):
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / directory).with_suffix("").parts)
            found[".".join(parts)] = path
    return found


SOURCES = sources()


def imported_modules(path: Path, name: str) -> Iterator[str]:
    """Absolute dotted names of what a file imports, anywhere in it, relative imports resolved."""
    package = ("mxfp8_recipe", *name.split(".")[:-1])
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def unit(dotted: str) -> str:
    """The part of the package that a dotted name belongs to: `mxfp8_recipe.ab.types.Batch` -> `ab`."""
    return dotted.split(".")[1]


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_downwards(name: str) -> None:
    own = name.split(".")[0]
    if own == "__init__":
        pytest.skip("the public API imports what it exports")
    assert own in RANK, f"{SOURCES[name]}: give `{own}` its place in LAYERS"
    for imported in imported_modules(SOURCES[name], name):
        top, _, rest = imported.partition(".")
        if top in ("fused", "recipes"):
            pytest.fail(f"{name} imports {imported}: its installed name is mxfp8_recipe.{imported}")
        if top != "mxfp8_recipe":
            continue
        if rest and unit(imported) in RANK:
            target = unit(imported)
            assert RANK[own] <= RANK[target], f"{name} imports {imported}: `{target}` lies above `{own}`"
        else:
            assert RANK[own] < RANK["api"], f"{name} imports {imported}: the public API lies above `{own}`"


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("fused.")])
def test_fused_is_a_leaf(name: str) -> None:
    for imported in imported_modules(SOURCES[name], name):
        top = imported.split(".")[0]
        inside = top == "mxfp8_recipe" and unit(imported) == "fused"
        assert inside or top in FUSED_MAY_IMPORT, f"{name} imports {imported}: kernels know torch and triton only"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_importing_the_package_is_light() -> None:
    """Nothing beyond what torch and the core dependencies load on their own."""
    code = (
        "import sys, torch; before = set(sys.modules); import mxfp8_recipe\n"
        f"print(sorted(set({HEAVY!r}) & (set(sys.modules) - before)))"
    )
    outcome = run_python(code)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "[]"


BLOCK_TRITON = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name="triton")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("module", ["mxfp8_recipe", "mxfp8_recipe.api", "mxfp8_recipe.backends", "mxfp8_recipe.cli"])
def test_imports_without_triton(module: str) -> None:
    outcome = run_python(f"{BLOCK_TRITON}\nimport {module}")
    assert outcome.returncode == 0, outcome.stderr


def test_doctor_without_triton_says_so() -> None:
    ask = "sys.argv = ['mxfp8', 'doctor', '--json']; from mxfp8_recipe.cli import main; main()"
    outcome = run_python(BLOCK_TRITON + ask)
    assert outcome.returncode == 0, outcome.stderr
    assert '"what": "triton",\n    "status": "absent"' in outcome.stdout
