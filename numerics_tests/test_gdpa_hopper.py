"""Generalized attention's Hopper kernels: on threads here (`gluon_threads`), natively on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton defines the kernels")

from fused.attention import gdpa_hopper
from fused.attention.activations import act, act_grad
from numerics_tests import gdpa_checks, gluon_threads
from numerics_tests.test_gdpa_kernels import run_checks


class OnThreads:
    """A kernel that is launched as Triton's are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self.launches += 1
            names = {"weight": weight, "weight_and_slope": weight_and_slope}
            gluon_threads.launch(self.kernel, grid[0], args, constants, **names)

        return launch


def weight(s: torch.Tensor, scale: float, kind: str) -> torch.Tensor:
    return act(s * scale, kind) / scale


def weight_and_slope(s: torch.Tensor, scale: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    return weight(s, scale, kind), act_grad(s * scale, kind)


@contextmanager
def on_threads() -> Iterator[OnThreads]:
    """The CPU passes for a Hopper."""
    kernel = OnThreads(gdpa_hopper.gdpa_hopper_queries_kernel)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gdpa_hopper, "gdpa_hopper_queries_kernel", kernel))
        stack.enter_context(mock.patch.object(gdpa_hopper, "is_hopper", return_value=True))
        stack.enter_context(mock.patch.object(gdpa_hopper, "boxes", lambda x, rows: gluon_threads.Descriptor(x)))
        yield kernel


def test_kernels_on_threads_agree_with_float64() -> None:
    with on_threads() as kernel:
        for check in gdpa_checks.hopper_checks("cpu"):
            check()
    assert kernel.launches > 16


@pytest.mark.gpu
def test_native_kernels_agree_with_float64() -> None:
    run_checks("hopper", "cuda", 0, 1, "0")
