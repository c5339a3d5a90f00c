"""Jagged attention's Gluon kernels for Hopper, as Python here; natively in `test_jagged_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton defines the kernels")

from fused.attention import jagged_hopper
from numerics_tests import gluon_in_python, jagged_checks

SHARE = 9
"""One in so many of the checks that a GPU gets: every mask, both widths, shared keys."""


@pytest.fixture
def launches() -> Iterator[list[str]]:
    """Names of the kernels that were launched in Python."""
    found: list[str] = []

    def launch(kernel: Any, key: Any, device: Any, programs: int, args: tuple[Any, ...], warps: int) -> None:
        found.append(kernel.fn.__name__)
        gluon_in_python.launch(kernel, programs, args)

    def boxes(x: torch.Tensor, shape: tuple[int, int], stride: int, *block: int) -> gluon_in_python.Descriptor:
        return gluon_in_python.Descriptor(x.as_strided(shape, (stride, 1)))

    with mock.patch.multiple(jagged_hopper, launch=launch, _boxes=boxes):
        yield found


def sampled() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in jagged_checks.hopper_checks(lambda *args, **options: calls.append((args, options)) or (lambda: None)):
        pass
    return [call for call in calls if call[1]["config"] is not None][::SHARE]


@pytest.mark.parametrize(
    ("args", "options"), sampled(), ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else ""
)
def test_kernels_agree_with_float64(args: Any, options: Any, launches: list[str]) -> None:
    case, mask, dtype = args
    jagged_checks.check(case, mask, dtype, "cpu", **options)
    assert len(launches) == (3 if sum(case.q_lengths) else 0)


def test_samples_are_apart_and_strides_are_read(launches: list[str]) -> None:
    jagged_checks.isolation_check("cpu", jagged_checks.WIDE, jagged_checks.GLUON_64)
    jagged_checks.stride_check("cpu", jagged_checks.WIDE, jagged_checks.GLUON)
    assert len(launches) == 18


def test_a_wait_too_few_is_noticed(launches: list[str]) -> None:
    """What a product leaves in flight is not there to be read, nor a block that is still on its way."""
    case, config = jagged_checks.WIDE, jagged_checks.GLUON

    def early(self: Any, outstanding: int, deps: Any) -> Any:
        return wait(self, outstanding + 1, deps)

    wait = gluon_in_python.Gluon.warpgroup_mma_wait
    with (
        mock.patch.object(gluon_in_python.Gluon, "warpgroup_mma_wait", early),
        pytest.raises(AssertionError, match="in flight"),
    ):
        jagged_checks.check(case, "full", torch.bfloat16, "cpu", config=config)
    with (
        mock.patch.object(gluon_in_python.Barrier, "wait"),
        pytest.raises(AssertionError, match="out: not finite"),
    ):
        jagged_checks.check(case, "full", torch.bfloat16, "cpu", config=config)
