"""Replayed calls: the same launches with the addresses of the new tensors, and only where that is all there was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import bench_host_launches
from mxfp8_recipe.fused import replay
from mxfp8_recipe.fused.replay import Replayed, launched

LAUNCHES: list[tuple[Any, ...]] = []


class Compiled:
    """What a compiled kernel is to a launch; remembers the arguments in order."""

    function = packed_metadata = None

    def run(self, *args: Any) -> None:  # has none of a launcher's attributes: not launched directly
        LAUNCHES.append((args[:3], *args[9:]))


class Block:
    """A descriptor: a tensor and how to cut it."""

    def __init__(self, base: Tensor, rows: int) -> None:
        self.base, self.rows = base, rows


COMPILED = Compiled()
UNKNOWN = torch.zeros(1)


def launch(*args: Any) -> None:
    launched(COMPILED, (2,), args)


def address(value: Any) -> Any:
    if isinstance(value, Block):
        return value.base.data_ptr(), value.rows
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    LAUNCHES.clear()
    with (
        mock.patch.object(replay, "_device", lambda tensors: next(t.device for t in tensors if t is not None)),
        mock.patch.object(replay.torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
    ):
        yield


def two_launches(x: Tensor, weight: Tensor | None, size: int) -> tuple[Tensor | None, ...]:
    out = x.new_empty(x.shape, dtype=torch.float32)
    scratch, unused = torch.empty(size, 4), torch.empty(0)
    launch(x[1:], scratch.view(torch.int32), unused, 5, None)
    launch(Block(scratch[1:], 64), weight, Block(out, 32), 2.5)
    return out, None, x


def test_a_replay_launches_the_same_with_new_addresses() -> None:
    call, runs = Replayed(two_launches), SimpleNamespace(count=0)
    plain = call.fn
    call.fn = lambda *args: (setattr(runs, "count", runs.count + 1), plain(*args))[1]
    call((torch.zeros(4, 8), torch.zeros(3)), (16,))
    assert (runs.count, LAUNCHES) == (1, [])
    for _ in range(2):
        x, weight = torch.zeros(4, 8), torch.zeros(3)
        LAUNCHES.clear()
        out, nothing, same = call((x, weight), (16,))
        assert out is not None
        assert (runs.count, nothing, same) == (1, None, x)
        assert (out.shape, out.dtype) == (torch.Size([4, 8]), torch.float32)
        (grid, rows, scratch, unused, five, none), (_, cut, given, into, half) = LAUNCHES
        assert (grid, rows, unused, five, none) == ((2, 1, 1), x[1:].data_ptr(), 0, 5, None)
        assert (address(cut), given) == ((scratch + 16, 64), weight.data_ptr())
        assert (address(into), half) == ((out.data_ptr(), 32), 2.5)


def test_an_output_may_be_the_start_of_padded_rows() -> None:
    def padded(x: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.empty(6, 16, dtype=torch.uint8)
        launch(whole, x)
        return whole[:, :9], x

    call = Replayed(padded)
    for _ in range(2):
        x = torch.zeros(4)
        out, _ = call((x,), ())
        assert out is not None
        assert (out.shape, out.stride(), out.dtype) == ((6, 9), (16, 1), torch.uint8)
        assert out.untyped_storage().nbytes() == 6 * 16
    assert [((2, 1, 1), out.data_ptr(), x.data_ptr())] == LAUNCHES


def test_other_shapes_constants_and_alignments_are_recorded_anew() -> None:
    call = Replayed(two_launches)
    x, weight = torch.zeros(4, 8), torch.zeros(3)
    wide = torch.zeros(4, 16)
    for tensors, size in (
        ((x, weight), 16), ((x, weight), 32), ((torch.zeros(5, 8), weight), 16), ((x, None), 16),
        ((x.double(), weight), 16), ((wide[:, :8], weight), 16), ((wide[:, 1:9], weight), 16),
    ):  # fmt: skip
        call(tensors, (size,))
    assert len(call.tapes) == 7
    assert LAUNCHES == []


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x + 1,),
        lambda x: (torch.zeros(4),),
        lambda x: (x.new_empty(4).fill_(2.0),),
        lambda x: (torch.empty(8, 2)[1:],),
        lambda x: (launch(UNKNOWN), x)[1:],
    ],
    ids=["arithmetic", "zeros", "fill", "a view of something", "an unknown tensor"],
)
def test_what_did_anything_else_is_never_replayed(body: Any) -> None:
    call = Replayed(body)
    for _ in range(2):
        x = torch.ones(3)
        (out,) = call((x,), ())
        assert out is not None
        assert out.shape == body(x)[0].shape
    assert list(call.tapes.values()) == [None]
    assert LAUNCHES == []


def test_inputs_that_share_memory_are_not_recorded() -> None:
    call, flat = Replayed(two_launches), torch.zeros(64)
    call((flat[:32].view(4, 8), flat[32:]), (16,))
    assert list(call.tapes.values()) == [None]


class Utilities:
    """Triton's: encodes a descriptor, and counts how often."""

    def __init__(self) -> None:
        self.encoded: list[Any] = []

    def fill_tma_descriptor(self, address: int, *rest: Any) -> tuple[str, int]:
        self.encoded.append((address, *rest))
        return "map", address


def test_a_direct_launch_passes_what_triton_s_own_launcher_would() -> None:
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6"):
        pytest.skip("the launcher of triton 3.6")
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

    calls: list[tuple[Any, ...]] = []
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    signature = {0: "*fp32", 1: "tensordesc<bf16[64, 64]>", 2: "i32"}
    launcher.launch = wrap_handle_tensordesc(lambda *args: calls.append(args), signature, [meta])
    compiled = SimpleNamespace(run=launcher, function=11, packed_metadata=("meta",))
    utilities = Utilities()
    driver = SimpleNamespace(active=SimpleNamespace(utils=utilities))

    def body(x: Tensor) -> tuple[Tensor | None, ...]:
        out = torch.empty(128, 64)
        block = Block(out[64:], 0)
        block.shape, block.strides, block.padding = (64, 64), (64, 1), "zero"  # pyright: ignore[reportAttributeAccessIssue]
        launched(compiled, (3,), (x, block, 9))
        return (out,)

    with mock.patch.object(triton.runtime, "driver", driver):
        call = Replayed(body)
        for _ in range(3):
            call((torch.zeros(8),), ())
        (tape,) = call.tapes.values()
        assert isinstance(tape, replay.Tape)
        (launch_,) = tape.launches
        assert launch_.direct is not None
        base = [4096, 8192]
        launch_.direct(base, 7)
        launch_.direct(base, 7)
        block = Block(SimpleNamespace(data_ptr=lambda: 8192 + 64 * 64 * 4), 0)  # pyright: ignore[reportArgumentType]
        block.shape, block.strides, block.padding = (64, 64), (64, 1), "zero"  # pyright: ignore[reportAttributeAccessIssue]
        launcher(3, 1, 1, 7, 11, ("meta",), None, None, None, 4096, block, 9)
    assert calls[-1] == calls[-2] == calls[-3]
    assert utilities.encoded[-1] == utilities.encoded[-2]


def calls_of(step: Callable[[], Any]) -> list[str]:
    """Every function that Python calls in a step, by name; not what other libraries hang on garbage collection."""
    found: list[str] = []

    def see(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            found.append(frame.f_code.co_name if event == "call" else getattr(arg, "__name__", str(arg)))

    gc.collect()
    gc.disable()
    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_zeros_are_made_anew_and_an_output_of_zeros_is_not_replayed() -> None:
    def counted(x: Tensor) -> tuple[Tensor | None, ...]:
        out, counter = torch.empty(4), torch.zeros(3, dtype=torch.int32)
        launch(out, counter, x)
        return (out,)

    call = Replayed(counted)
    for _ in range(2):
        with mock.patch.object(replay.torch, "zeros", wraps=torch.zeros) as zeros:
            (out,) = call((torch.ones(2),), ())
    assert out is not None
    assert zeros.call_count == 1
    ((_, address_of_out, counter, _),) = LAUNCHES
    assert address_of_out == out.data_ptr() != counter


@pytest.mark.parametrize("input", ["ours", "ours, input quantized"])
def test_a_linear_in_eager_mode_does_little_besides_launching(input: str) -> None:
    """Measured: 200 calls in Python 3.11, 218 with a quantized input, less those that warm bytecode does not report."""
    with bench_host_launches.launches_that_do_nothing():
        step = bench_host_launches.steps()[input]
        for _ in range(2):
            step()
        calls = calls_of(step)
        bench_host_launches.check_replayed()
    kernels = {"ours": 8, "ours, input quantized": 7}[input]
    assert calls.count("nothing") == kernels  # quantize, gemm; the sums of the bias and of the weight's split: 2 more
    assert not {"quantize", "gemm", "quantize_and_sum"} & set(calls)
    assert calls.count("empty_strided") == {"ours": 10, "ours, input quantized": 8}[input]
    assert "to" not in calls
    reported = [name for name in calls if name not in ("len", "isinstance")]
    assert len(reported) <= {"ours": 210, "ours, input quantized": 228}[input]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(256, 512), (100, 2048), (96, 64)], ids=str)
def test_norms_launch_from_a_tape_too(kind: str, shape: tuple[int, int]) -> None:
    """The real launchers, whose kernels do nothing here: what they do besides launching and allocating is no obstacle.

    LayerNorm's backward copies the bias's part out of the sums of both, and is never replayed.
    """
    pytest.importorskip("triton")
    from mxfp8_recipe.autograd import norm
    from mxfp8_recipe.backends import table
    from mxfp8_recipe.fused.jit import Kernel
    from mxfp8_recipe.fused.spec import QuantSpec

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        rest = [kwargs[p.name] for p in kernel.params[len(args) :]]
        launched(COMPILED, grid, (*args, *rest))

    kernels = {(op, "reference"): table._TABLE[op, "hopper"] for op in ("norm_quantize", "norm_backward")}
    spec = QuantSpec(tile=(1, 128)).encode()
    config = norm.NormConfig(kind, 1e-6, spec, spec, emit_high=False)
    call, back = Replayed(norm._forward.fn), Replayed(norm._backward.fn)
    weight, bias = torch.ones(shape[1]), torch.zeros(shape[1]) if kind == "layer" else None
    laid = mock.patch.dict(table.LAYOUTS, {"reference": table.LAYOUTS["hopper"]})
    with mock.patch.dict(table._TABLE, kernels), laid, mock.patch.object(Kernel, "run", run):
        table.resolve.cache_clear()
        table.layout.cache_clear()
        for _ in range(3):
            x, grad = (torch.randn(shape).bfloat16() for _ in range(2))
            outputs = call((x, weight, bias, None), (config, torch.bfloat16))
            backward = back((grad, x, weight, outputs[5], outputs[6]), (bias is not None, config))
    table.resolve.cache_clear()
    table.layout.cache_clear()
    (tape,), (backward_tape,) = call.tapes.values(), back.tapes.values()
    assert isinstance(tape, replay.Tape)
    assert isinstance(backward_tape, replay.Tape) == (kind == "rms")
    rows, cols = shape
    shapes = [tuple(t.shape) for t in outputs if t is not None]
    assert shapes[1:5] == [shape, (rows, cols // 32), (cols, rows), (cols, -(-rows // 32))]
    assert [t.shape for t in backward if t is not None] == [x.shape, weight.shape, (0 if bias is None else cols,)]
    assert len(LAUNCHES) == 2 * (len(tape.launches) + (len(backward_tape.launches) if backward_tape else 0))
