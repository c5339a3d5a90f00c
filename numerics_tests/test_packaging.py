"""What is installed: the wheel's content, the explicit package list, and prose that names nobody's machine."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

from mxfp8_recipe import cli, doctor

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"fused": "mxfp8_recipe.fused", "recipes": "mxfp8_recipe.recipes"}
"""Directories beside the package and the names they install under."""

USER_MODULES = ("tiny", "broken")

BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", "mxfp8_recipe", "fused", "recipes")


def packages_on_disk() -> set[str]:
    """Every directory that holds Python or YAML, by the name it installs under."""
    found = set()
    for directory in ("mxfp8_recipe", *OUTSIDE):
        for path in (ROOT / directory).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                inner = path.parent.relative_to(ROOT / directory).parts
                found.add(".".join((OUTSIDE.get(directory, directory), *inner)))
    return found


def declared_packages() -> list[str]:
    """The list in pyproject.toml, read without a TOML parser: Python 3.10 has none."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^packages = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block, "pyproject.toml has no explicit list of packages"
    return re.findall(r'"([\w.]+)"', block[1])


def test_package_list_equals_disk() -> None:
    declared = declared_packages()
    assert len(declared) == len(set(declared))
    assert set(declared) == packages_on_disk()


def left_out(directory: str, names: list[str]) -> set[str]:
    """Caches, and the links that setting up makes for type checkers."""
    return {name for name in names if name == "__pycache__" or Path(directory, name).is_symlink()}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside a wheel built from a copy of the sources, without a network."""
    if find_spec("setuptools") is None:  # asked, not imported: it refuses a process that has the standard distutils
        pytest.skip("setuptools is not installed")
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(target)!r})"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    (wheel,) = target.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def installed_name(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return f"mxfp8_recipe/{relative}" if relative.parts[0] in OUTSIDE else str(relative)


def test_wheel_holds_every_source_recipe_and_template(wheel_names: set[str]) -> None:
    wanted = {
        installed_name(path)
        for directory in ("mxfp8_recipe", *OUTSIDE)
        for path in (ROOT / directory).rglob("*")
        if path.suffix in (".py", ".yaml", ".html", ".j2") and "__pycache__" not in path.parts
    }
    assert wanted <= wheel_names, sorted(wanted - wheel_names)
    assert "mxfp8_recipe/py.typed" in wheel_names


def test_wheel_adds_one_import_name(wheel_names: set[str]) -> None:
    """`fused` and `recipes` at top level would collide with other distributions."""
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mxfp8_recipe"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the console script's entry point in this process, as from a directory."""

    def run(*arguments: str, cwd: Path = ROOT) -> Outcome:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["mxfp8", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        for name in USER_MODULES:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Outcome(stop.value.code or 0, *capfd.readouterr())

    return run


def test_doctor_reports_as_json(run_cli: Callable[..., Outcome]) -> None:
    outcome = run_cli("doctor", "--json")
    assert outcome.code == 0, outcome.stderr
    findings = json.loads(outcome.stdout)
    assert {"torch", "triton", "FP8 dtypes", "transformer-engine"} <= {finding["what"] for finding in findings}
    assert any(finding["what"].startswith("op ") for finding in findings)
    assert all(finding["status"] in doctor.STYLES and finding["reason"] for finding in findings)


def test_doctor_prints_every_finding(run_cli: Callable[..., Outcome]) -> None:
    outcome = run_cli("doctor")
    assert outcome.code == 0, outcome.stderr
    for finding in doctor.diagnose():
        assert finding.what.split()[0] in outcome.stdout


@pytest.mark.parametrize(
    ("major", "minor", "status"), [(8, 0, "emulated"), (8, 9, "emulated"), (9, 0, "emulated"), (10, 0, "native")]
)
def test_doctor_knows_generations(major: int, minor: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "a GPU")
    finding = doctor._gpu(0)
    assert finding.status == status
    assert f"{major}.{minor}" in finding.reason


def test_a_crash_is_no_verdict(run_cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 means "fail" to whoever reads the A/B check's; an error of ours must not look like it."""

    def crash() -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(doctor, "diagnose", crash)
    assert run_cli("doctor").code == cli.INTERNAL_ERROR


@pytest.mark.parametrize("code", [0, 1, 3])
def test_ab_passes_options_and_verdicts_through(
    code: int, run_cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ab_command(seeds: int = 1) -> None:
        typer.echo(f"seeds={seeds}")
        raise typer.Exit(code)

    monkeypatch.setitem(sys.modules, "mxfp8_recipe.ab.command", SimpleNamespace(ab_command=ab_command))
    outcome = run_cli("ab", "--seeds", "3")
    assert outcome.code == code
    assert outcome.stdout == "seeds=3\n"
    assert run_cli("ab", "--no-such-option").code == 2
    assert "--seeds" in run_cli("ab", "--help").stdout


def test_ab_names_the_extra_it_lacks(run_cli: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mxfp8_recipe.ab.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [WithoutMatplotlib(), *sys.meta_path])
    outcome = run_cli("ab")
    assert outcome.code == 2, outcome.stderr
    assert "pip install 'mxfp8-recipe[ab]'" in outcome.stderr


class WithoutMatplotlib:
    """An import hook under which the A/B check fails as it does where its extra is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mxfp8_recipe.ab.command":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "no_colon"), "expected module:function"),
        (("plan", "no_such_module:build"), "no module named no_such_module"),
        (("plan", "json:no_such_function"), "has no function no_such_function"),
        (("plan", "platform:machine"), "expected a torch.nn.Module"),
        (("plan", "tiny:build", "--recipe", "no_such_recipe"), "no_such_recipe"),
        (("plan", "tiny:build", "--overrides", "no_such_file.yaml"), "no file"),
        (("plan", "tiny:build", "--overrides", "broken.yaml"), "not valid YAML"),
        (("plan", "tiny:build", "--overrides", "list.yaml"), "expected a mapping"),
        (("plan", "tiny:build", "--overrides", "unmatched.yaml"), "no_such_layer"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: tuple[str, ...], message: str, user_files: Path, run_cli: Callable[..., Outcome]
) -> None:
    outcome = run_cli(*arguments, cwd=user_files)
    assert outcome.code == 2, outcome.stderr
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_what_a_users_builder_raises_is_one_line_then_the_traceback(
    user_files: Path, run_cli: Callable[..., Outcome]
) -> None:
    outcome = run_cli("plan", "broken:build", cwd=user_files)
    first, heading, frame, *_, last = outcome.stderr.splitlines()
    assert outcome.code == 2
    assert first == "mxfp8: broken:build: raised RuntimeError: no weights here"
    assert heading == "Traceback (most recent call last):"
    assert "broken.py" in frame
    assert last == "RuntimeError: no weights here"


@pytest.fixture
def user_files(tmp_path: Path) -> Path:
    """A user's directory: a model, a model that fails, and override files with mistakes."""
    (tmp_path / "tiny.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.SiLU(), torch.nn.Linear(32, 32))\n"
        "def with_inputs():\n"
        "    return build(), (torch.randn(4, 64),)\n"
    )
    (tmp_path / "broken.py").write_text("def build():\n    raise RuntimeError('no weights here')\n")
    (tmp_path / "broken.yaml").write_text("layers: [1, 2\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "unmatched.yaml").write_text("no_such_layer: bf16\n")
    return tmp_path


@pytest.mark.parametrize("function", ["build", "with_inputs"])
def test_plan_shows_every_linear(function: str, user_files: Path, run_cli: Callable[..., Outcome]) -> None:
    outcome = run_cli("plan", f"tiny:{function}", cwd=user_files)
    assert outcome.code == 0, outcome.stderr
    assert "MXFP8Linear" in outcome.stdout
    as_json = run_cli("plan", f"tiny:{function}", "--json", cwd=user_files)
    assert as_json.code == 0, as_json.stderr
    json.loads(as_json.stdout)


README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_code_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


ABSOLUTE = re.compile(r"(?<![\w./~:$}])/(?:work|root|home|tmp|Users|mnt|opt)/\w")
ACCOUNTS = re.compile(r"\bsub-?agents?\b|\bsessions?\b", re.IGNORECASE)
INDEXES = re.compile(r"https?://[^\s\"')>]*(?:pypi|pythonhosted|artifactory|nexus|devpi|/simple)", re.IGNORECASE)
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".html", ".j2", ".txt", ".cfg", ".sh", ""}


def tracked_text() -> list[Path]:
    """Text files of the repository, this one left out: it spells what it forbids."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in TEXT and path.is_file() and path != Path(__file__).resolve()]


def offences(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_one_machine() -> None:
    assert offences(ABSOLUTE, tracked_text()) == []


def test_no_package_index() -> None:
    assert offences(INDEXES, tracked_text()) == []


def test_prose_is_about_the_product() -> None:
    assert offences(ACCOUNTS, [path for path in tracked_text() if path.suffix == ".md"]) == []
