"""Generalized attention's Hopper kernels: on threads here (`gluon_threads`), natively on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton defines the kernels")

from fused.attention import gdpa, gdpa_hopper
from fused.attention.activations import act, act_grad
from numerics_tests import gdpa_checks, gluon_threads
from numerics_tests.test_gdpa_kernels import run_checks


class OnThreads:
    """A kernel that is launched as Triton's are, and writes its name down."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches.append(self.kernel.fn.__name__)
            names = {"weight": weight, "weight_and_slope": weight_and_slope}
            gluon_threads.launch(self.kernel, grid[0], args, constants, **names)

        return launch


def weight(s: torch.Tensor, scale: float, kind: str) -> torch.Tensor:
    return act(s * scale, kind) / scale


def weight_and_slope(s: torch.Tensor, scale: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    return weight(s, scale, kind), act_grad(s * scale, kind)


@contextmanager
def on_threads() -> Iterator[list[str]]:
    """The CPU passes for a Hopper. Names of the kernels that were launched."""
    launches: list[str] = []
    names = "gdpa_hopper_queries_kernel", "gdpa_hopper_keys_kernel"
    with ExitStack() as stack:
        kernels = {name: OnThreads(getattr(gdpa_hopper, name), launches) for name in names}
        stack.enter_context(mock.patch.multiple(gdpa_hopper, **kernels))
        stack.enter_context(mock.patch.object(gdpa_hopper, "is_hopper", return_value=True))
        boxes = mock.patch.object(gdpa_hopper, "boxes", lambda x, rows: gluon_threads.Descriptor(x.flatten(1)))
        stack.enter_context(boxes)
        yield launches


def test_kernels_on_threads_agree_with_float64() -> None:
    with on_threads() as launches:
        for check in gdpa_checks.hopper_checks("cpu"):
            check()
    assert launches.count("gdpa_hopper_queries_kernel") > 12
    assert launches.count("gdpa_hopper_keys_kernel") > 5


@pytest.mark.parametrize("first", range(3), ids=["out", "dq", "dkdv"])
def test_a_wait_too_few_is_noticed(first: int) -> None:
    """What a product leaves in flight is not there to be read, nor a block that is still on its way."""

    def early(self: Any, outstanding: int, deps: Any) -> Any:
        return wait(self, outstanding + (len(launches) > first), deps)

    def never(self: Any) -> None:
        if len(launches) <= first:
            land(self)

    wait, land = gluon_threads.Gluon.warpgroup_mma_wait, gluon_threads.Barrier.land
    for owner, name, broken, match in (
        (gluon_threads.Gluon, "warpgroup_mma_wait", early, "in flight"), (gluon_threads.Barrier, "land", never, "dB")
    ):  # fmt: skip
        with (
            on_threads() as launches,
            mock.patch.object(gluon_threads, "PATIENCE_S", 1.0),
            mock.patch.object(owner, name, broken),
            pytest.raises(AssertionError, match=match),
        ):
            next(iter(gdpa_checks.hopper_checks("cpu")))()


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, (True, True)), ({"groups": 2}, (True, False)), ({"dim": 64}, (False, False)),
        ({"causal": True}, (False, False)), ({"window": 9}, (False, False)), ({"samples": 65}, (False, False)),
        ({"samples": 64}, (True, False)), ({"pre_scale": -0.1, "dtype": torch.float16}, (True, True)),
    ],
)  # fmt: skip
def test_what_a_hopper_takes(change: dict[str, Any], taken: tuple[bool, bool]) -> None:
    """Anything else stays with the portable kernels, and so does every other GPU."""
    dim, groups, samples = change.get("dim", 128), change.get("groups", 4), change.get("samples", 4)
    q, kv = (torch.zeros(4096, heads, dim, dtype=change.get("dtype", torch.bfloat16)) for heads in (4, groups))
    offsets = torch.linspace(0, 4096, samples + 1).int()
    options: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.1, "causal": False, "window": None}
    options |= {name: value for name, value in change.items() if name in options}
    problem = gdpa.problem_of(q, kv, kv, offsets, offsets, 1024, 1024, None, None, broadcast_q=False, **options)
    assert not gdpa_hopper.takes(problem)
    with mock.patch.object(gdpa_hopper, "is_hopper", return_value=True):
        assert (gdpa_hopper.takes(problem), gdpa_hopper.takes_keys(problem)) == taken


@pytest.mark.gpu
def test_native_kernels_agree_with_float64() -> None:
    run_checks("hopper", "cuda", 0, 1, "0")
