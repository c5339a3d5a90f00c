"""Jagged attention's Gluon kernels for Hopper, as Python here; natively in `test_jagged_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton defines the kernels")

from fused.attention import jagged, jagged_hopper, jagged_reference
from numerics_tests import gluon_in_python, jagged_checks
from numerics_tests.jagged_checks import GLUON, GLUON_64, WIDE


def forward(q: Tensor, k: Tensor, v: Tensor, *layout: Any, config: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What the forward would leave for backward, rounded once."""
    out, lse = jagged_reference.jagged_forward(q.double(), k.double(), v.double(), *layout, **kwargs)
    return out.to(q.dtype), lse.float()


@pytest.fixture
def launches() -> Iterator[list[str]]:
    """Names of the kernels that were launched in Python."""
    found: list[str] = []

    def launch(kernel: Any, key: Any, device: Any, programs: int, args: tuple[Any, ...], warps: int) -> None:
        found.append(kernel.fn.__name__)
        gluon_in_python.launch(kernel, programs, args)

    def boxes(x: Tensor, shape: tuple[int, int], stride: int, *block: int) -> gluon_in_python.Descriptor:
        return gluon_in_python.Descriptor(x.as_strided(shape, (stride, 1)))

    with (
        mock.patch.multiple(jagged_hopper, launch=launch, _boxes=boxes),
        mock.patch.object(jagged, "forward", forward),
    ):
        yield found


def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Of the checks that a GPU gets, those that say how to launch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in jagged_checks.hopper_checks(lambda *args, **options: found.append((args, options)) or (lambda: None)):
        pass
    return [call for call in found if call[1]["config"] is not None]


@pytest.mark.parametrize(
    ("args", "options"), calls(), ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else ""
)
def test_kernels_agree_with_float64(args: Any, options: Any, launches: list[str]) -> None:
    case, mask, dtype = args
    jagged_checks.check(case, mask, dtype, "cpu", **options)
    assert len(launches) == (1 + bool(sum(case.k_lengths)) if sum(case.q_lengths) else 0)


def test_samples_are_apart_and_strides_are_read(launches: list[str]) -> None:
    jagged_checks.isolation_check("cpu", WIDE, GLUON_64)
    jagged_checks.stride_check("cpu", WIDE, GLUON)
    assert len(launches) == 12


@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
def test_a_wait_too_few_is_noticed(kernel: str, launches: list[str]) -> None:
    """What a product leaves in flight is not there to be read, nor a block that is still on its way."""

    def early(self: Any, outstanding: int, deps: Any) -> Any:
        return wait(self, outstanding + (launches[-1] == f"{kernel}_hopper_kernel"), deps)

    def never(self: Any, parity: Any) -> None:
        if launches[-1] != f"{kernel}_hopper_kernel":
            arrived(self, parity)

    wait, arrived = gluon_in_python.Gluon.warpgroup_mma_wait, gluon_in_python.Barrier.wait
    with (
        mock.patch.object(gluon_in_python.Gluon, "warpgroup_mma_wait", early),
        pytest.raises(AssertionError, match="in flight"),
    ):
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON)
    with (
        mock.patch.object(gluon_in_python.Barrier, "wait", never),
        pytest.raises(AssertionError, match="not finite"),
    ):
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True), ({"dtype": torch.float16}, False), ({"dim": 64}, False), ({"groups": 2}, False),
        ({"causal": True}, False), ({"window": 9}, False), ({"scale": -0.1}, False),
    ],
)  # fmt: skip
def test_a_hopper_gets_what_was_held_against_float64_there(change: dict[str, Any], taken: bool) -> None:
    """Anything else stays with the portable kernels, and so does every other GPU."""
    dim, dtype, groups = change.get("dim", 128), change.get("dtype", torch.bfloat16), change.get("groups", 4)
    q, kv = (torch.zeros(64, heads, dim, dtype=dtype) for heads in (4, groups))
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.1, "causal": False, "window": None}
    options |= {name: value for name, value in change.items() if name in options}
    problem = jagged.problem_of(q, kv, kv, offsets, offsets, 64, 64, None, None, **options)
    assert not jagged_hopper.fits(problem)
    with mock.patch.object(jagged_hopper, "is_hopper", return_value=True):
        assert jagged_hopper.fits(problem) == taken
