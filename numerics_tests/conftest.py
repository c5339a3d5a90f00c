"""What every test may rely on: fixed seeds, restored torch state, and GPU tests that say why they were skipped."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import pytest
import torch

with contextlib.suppress(ImportError):  # inductor imports it, and it refuses a process with the standard distutils
    import setuptools  # noqa: F401

SEED = 20_240


def _no_gpu_reason() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch was built for CUDA {torch.version.cuda} but finds no device"
    return None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a parameter of bytes by its argument: content may differ between workers, which must collect the same."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_gpu_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Seed all generators before a test; afterwards put back what a test could leave changed for the next one."""
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad = torch.is_grad_enabled()
    random.seed(SEED)
    numpy.random.seed(SEED)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        yield
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def monitors_write_elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor dumps operands into the working directory unless told otherwise."""
    if request.path.name.startswith("test_monitor"):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
