"""Launches past Triton's binder: what is remembered, by what, and what the compiled kernel then gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton compiles the kernels")

from triton import language as tl  # noqa: E402

from mxfp8_recipe.fused.jit import Kernel  # noqa: E402


def body(x_ptr, out_ptr, n, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class Launches:
    """Stands for Triton's binder and for what it compiles; remembers the calls of each."""

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.launched: list[Any] = []

    def bind(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.bound.append((args, kwargs))
        return SimpleNamespace(packed_metadata=None, function=len(self.bound), run=lambda *a: self.launched.append(a))


@pytest.fixture
def launches() -> Any:
    found = Launches()
    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", lambda *a, **k: found.bind(*a, **k)),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
    ):
        yield found


def test_a_second_launch_passes_the_binder_with_its_own_arguments(launches: Launches) -> None:
    kernel = Kernel(body, do_not_specialize=["n"])
    for n in (5, 16):
        x, out = torch.zeros(64), torch.zeros(64)
        kernel[n, 2](x, out, n, FLAG=True, SIZE=8, num_warps=4)
    assert len(launches.bound) == 1
    assert launches.launched == [(16, 2, 1, 7, 1, None, None, None, None, x.data_ptr(), out.data_ptr(), 16, 8, True)]


@pytest.mark.parametrize(
    "change",
    [
        {"SIZE": 16},
        {"num_warps": 8},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"x": None},
        {"n": 2**31},
    ],
    ids=str,
)
def test_what_the_code_depends_on_is_bound_anew(launches: Launches, change: dict[str, Any]) -> None:
    kernel = Kernel(body, do_not_specialize=["n"])
    call = {"x": torch.zeros(64), "n": 5, "SIZE": 8, "num_warps": 4}
    for values in (call, call | change, call):
        rest = {name: values[name] for name in ("SIZE", "num_warps")}
        kernel[(1,)](values["x"], torch.zeros(64), values["n"], FLAG=True, **rest)
    assert (len(launches.bound), len(launches.launched)) == (2, 1)


def test_a_specialized_integer_is_bound_by_divisibility(launches: Launches) -> None:
    kernel = Kernel(body, do_not_specialize=[])
    for n in (32, 48, 5, 1, 7):
        kernel[(1,)](torch.zeros(64), torch.zeros(64), n, FLAG=True, SIZE=8)
    assert (len(launches.bound), len(launches.launched)) == (3, 2)
