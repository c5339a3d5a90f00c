"""Jagged attention's Gluon kernels for Hopper, as Python here; natively in `test_jagged_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton defines the kernels")

from fused.attention import _hopper_tiles, jagged, jagged_hopper
from numerics_tests import gluon_hazards, gluon_in_python, jagged_checks
from numerics_tests.jagged_checks import GLUON, GLUON_IN_TURN, WIDE


@pytest.fixture
def launches() -> Iterator[list[str]]:
    """Names of the kernels that were launched in Python, as older triton launches them."""
    found: list[str] = []

    def launch(kernel: Any, key: Any, device: Any, programs: int, args: tuple[Any, ...], **options: int) -> None:
        found.append(kernel.fn.__name__)
        gluon_hazards.launch(kernel, programs, args)

    def boxes(x: Tensor, shape: tuple[int, int], stride: int, *block: int) -> gluon_in_python.Descriptor:
        return gluon_in_python.Descriptor(x.as_strided(shape, (stride, 1)))

    def few(device: Any) -> tuple[int, bool]:
        return 1, True  # multiprocessors: so few that tiles are mixed

    with mock.patch.multiple(jagged_hopper, launch=launch, _boxes=boxes, KEEP=True, processors=few):
        yield found


def calls(checks: Callable[..., Iterator[Any]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Of the checks that a GPU gets, those that say how to launch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for _ in checks(lambda *args, **options: found.append((args, options)) or (lambda: None)):
        pass
    return [(args, options) for args, options in found if options.get("config", args) is not None]


@pytest.mark.parametrize(
    ("args", "options"),
    calls(jagged_checks.hopper_checks),
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_kernels_agree_with_float64(args: Any, options: Any, launches: list[str]) -> None:
    case, mask, dtype = args
    jagged_checks.check(case, mask, dtype, "cpu", **options)
    assert len(launches) == (2 + bool(sum(case.k_lengths)) if sum(case.q_lengths) else 0)


@pytest.mark.parametrize(
    ("args", "options"),
    calls(jagged_checks.hopper_window_checks),
    ids=lambda x: str(x[0]) if isinstance(x, tuple) else str(x["window"]),
)
def test_windows_agree_with_float64(args: Any, options: Any, launches: list[str]) -> None:
    jagged_checks.forward_check(*args, "cpu", **options)
    assert launches == (["forward_hopper_kernel"] if sum(args[0].q_lengths) else [])


def test_samples_are_apart_and_strides_are_read(launches: list[str]) -> None:
    jagged_checks.isolation_check("cpu", WIDE, GLUON_IN_TURN)
    jagged_checks.stride_check("cpu", WIDE, GLUON)
    assert len(launches) == 18


def test_heads_are_apart(launches: list[str]) -> None:
    for config in (GLUON, GLUON_IN_TURN):
        jagged_checks.heads_check("cpu", config)
    assert len(launches) == 18


@pytest.mark.parametrize("each", [1, 8])
def test_mixed_tiles_are_all_tiles(each: int) -> None:
    """Of any list, with any number of pairs that fits: the first half and the other in turn, the rest as it was."""
    taken = gluon_in_python.plain(_hopper_tiles.mixed, {"gl": gluon_in_python.Gluon(0)}, {})
    for tiles, pairs in ((1, 0), (2, 1), (5, 0), (5, 1), (5, 2), (12, 5), (12, 6)):
        ranks = [int(taken(torch.tensor(rank), pairs, each)) for rank in range(tiles * each)]
        half = torch.arange(2 * pairs).view(2, -1).T.flatten().tolist()
        assert [rank // each for rank in ranks[::each]] == [*half, *range(2 * pairs, tiles)]
        assert [rank % each for rank in ranks] == [*range(each)] * tiles


def test_heads_in_turn_have_the_bits_of_heads_apart(launches: list[str]) -> None:
    # Products added to one another round once on a GPU, where this is held too, and here each by itself.
    with mock.patch.object(jagged_hopper, "KEEP", False):
        jagged_checks.turns_check("cpu")
    assert len(launches) == 6


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
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
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON_IN_TURN)
    with (
        mock.patch.object(gluon_in_python.Barrier, "wait", never),
        pytest.raises(AssertionError, match="not finite"),
    ):
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON_IN_TURN)


@pytest.mark.parametrize("left_out", ["barrier", "fence", "wait for stores"])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_order_too_little_is_noticed(kernel: str, left_out: str, launches: list[str]) -> None:
    """Between threads, what they write and what copies, products and stores read: nothing comes out wrong here, where
    one thread stands for all.
    """
    owner, name = {
        "barrier": (gluon_hazards.Memory, "barrier"), "fence": (gluon_hazards.Memory, "fence"),
        "wait for stores": (gluon_hazards.Gluon, "store_wait"),
    }[left_out]  # fmt: skip
    real = getattr(owner, name)

    def none(self: Any, *args: Any) -> None:
        if launches[-1] != f"{kernel}_hopper_kernel":
            real(self, *args)

    expected = {"barrier": "no barrier since|without a barrier of threads", "fence": "no fence since"}
    found = expected.get(left_out, "still reads it|while buffers are stored")
    with mock.patch.object(owner, name, none), pytest.raises(AssertionError, match=found):
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON_IN_TURN)


def test_a_kernel_ahead_of_the_one_it_reads_from_is_noticed(launches: list[str]) -> None:
    """dK and dV are launched under dQ, and read what that writes."""
    with (
        mock.patch.object(gluon_hazards.Gluon, "wait_for_launch"),
        pytest.raises(AssertionError, match="ahead of"),
    ):
        jagged_checks.check(WIDE, "full", torch.bfloat16, "cpu", config=GLUON)
    assert launches[-1] == "dkdv_hopper_kernel"


@pytest.mark.parametrize(
    ("change", "forward", "backward"),
    [
        ({}, True, True), ({"window": 9}, True, False), ({"dtype": torch.float16}, False, False),
        ({"dim": 64}, False, False), ({"groups": 2}, False, False), ({"causal": True}, False, False),
        ({"scale": -0.1}, False, False),
    ],
)  # fmt: skip
def test_a_hopper_gets_what_was_held_against_float64_there(
    change: dict[str, Any], forward: bool, backward: bool
) -> None:
    """Anything else stays with the portable kernels, and so does every other GPU."""
    dim, dtype, groups = change.get("dim", 128), change.get("dtype", torch.bfloat16), change.get("groups", 4)
    q, kv = (torch.zeros(64, heads, dim, dtype=dtype) for heads in (4, groups))
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.1, "causal": False, "window": None}
    options |= {name: value for name, value in change.items() if name in options}
    problem = jagged.problem_of(q, kv, kv, offsets, offsets, 64, 64, None, None, **options)
    assert not jagged_hopper.fits(problem)
    with mock.patch.object(jagged_hopper, "is_hopper", return_value=True):
        assert jagged_hopper.fits(problem) == forward
        assert jagged_hopper.fits_backward(problem) == backward
