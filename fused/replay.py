"""Replay what a function of tensors launches: its Python runs once for every kind of arguments.

An eager linear allocates a dozen tensors and launches eight kernels each way; deciding anew what and how takes longer
than a small layer takes on the GPU. `Replayed` runs the function the first time it sees shapes, strides, dtypes,
alignments and constants, and records allocations and launches. Later calls allocate, put the new addresses in their
places and launch: same kernels, same arguments, same bits. A function that did anything else is never replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .direct import Direct, direct

PLAIN = (Tensor, nn.Parameter)
ALIGNMENT = 16
"""Bytes, or elements of an integer, that code may depend on the multiple of."""
MOST_KEYS = 1024
"""Token counts may never repeat: then remember the latest."""
_ZEROS = torch.ops.aten.zeros.default
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_strided.default)


_state = threading.local()


@contextmanager
def launches_seen_by(found: list[tuple[Any, tuple[int, ...], Sequence[Any]]]) -> Iterator[None]:
    """Append to `found` what this thread launches meanwhile: compiled kernel, grid, and all arguments in order."""
    before, _state.found = getattr(_state, "found", None), found
    try:
        yield
    finally:
        _state.found = before


def launches_seen() -> bool:
    """Whether somebody looks at this thread's launches: ops then run outside of the dispatcher."""
    return getattr(_state, "found", None) is not None


def launched(compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
    """Tell whoever looks at this thread's launches."""
    found = getattr(_state, "found", None)
    if found is not None:
        found.append((compiled, grid, args))


def launch_compiled(compiled: Any, grid: tuple[int, ...], device: int | None, args: Sequence[Any]) -> None:
    """Launch a compiled kernel with all its arguments in order, pointers as tensors or addresses."""
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


class Address:
    """Stands for a tensor where only its address is asked for."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def data_ptr(self) -> int:
        return self.value


class Record(TorchDispatchMode):
    """Sees the allocations and launches of a call, and whether there was anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []  # alive until the end, so that no address comes twice
        self.zeros: list[Tensor] = []  # those among them that are zero
        self.launches: list[tuple[Any, tuple[int, ...], Sequence[Any]]] = []
        self.other: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY or func is _ZEROS:
            self.allocated.append(out)
            if func is _ZEROS:
                self.zeros.append(out)
        elif not all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.other = func
        return out


@dataclass(frozen=True)
class Launch:
    """A launch: addresses are `(position, slot, offset)`, descriptors have their fields in between."""

    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    addresses: tuple[tuple[int, int, int], ...]
    descriptors: tuple[tuple[int, type, dict[str, Any], int, int], ...]
    direct: Direct | None = None


@dataclass(frozen=True)
class Tape:
    """One recorded call.

    Slots are numbered: the inputs, then what is allocated for outputs, then zeros, then the workspace that holds the
    rest.

    Attributes:
        made: of each allocated output shape, strides and dtype, and columns where it is those of padded rows, else 0.
        zeros: shape and dtype of each tensor of zeros. workspace: bytes of everything else.
        outputs: the slot of each output, None for None.
    """

    made: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int], ...]
    zeros: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    workspace: int
    outputs: tuple[int | None, ...]
    launches: tuple[Launch, ...]

    def play(self, inputs: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor | None, ...]:
        tensors = [*inputs]
        for shape, strides, dtype, columns in self.made:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)  # a third less time than `empty`
            tensors.append(out[:, :columns] if columns else out)
        tensors += [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.zeros]
        if self.workspace:
            tensors.append(torch.empty_strided((self.workspace,), (1,), dtype=torch.uint8, device=device))
        base = [0 if t is None else t.data_ptr() for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launch in self.launches:
            if launch.direct is not None:
                launch.direct(base, stream)
                continue
            args = list(launch.args)
            for position, slot, offset in launch.addresses:
                args[position] = base[slot] + offset
            for position, kind, fields, slot, offset in launch.descriptors:
                descriptor = args[position] = kind.__new__(kind)
                descriptor.__dict__.update(fields, base=Address(base[slot] + offset))
            launch_compiled(launch.compiled, launch.grid, device.index, args)
        return tuple([None if slot is None else tensors[slot] for slot in self.outputs])


class Replayed:
    """`fn(*tensors, *constants)`, a tuple of tensors and None, from a tape where there is one.

    Args:
        fn: deterministic in shapes, strides, dtypes, alignments and constants as far as what it launches goes.
    """

    def __init__(self, fn: Callable[..., tuple[Tensor | None, ...]]) -> None:
        self.fn = fn
        self.tapes: dict[Any, Tape | None] = {}

    def __call__(self, tensors: tuple[Tensor | None, ...], constants: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        device = None if torch.compiler.is_compiling() else _device(tensors)
        if device is None:
            return self.fn(*tensors, *constants)
        key = (device, constants, *[
            None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors
        ])  # fmt: skip
        tape = self.tapes.get(key, self)
        if tape is None:
            return self.fn(*tensors, *constants)
        if isinstance(tape, Tape):
            return tape.play(tensors, device)
        if len(self.tapes) >= MOST_KEYS:
            self.tapes.clear()
        outputs, self.tapes[key] = record(self.fn, tensors, constants)
        return outputs


def _device(tensors: tuple[Tensor | None, ...]) -> torch.device | None:
    """The current CUDA device that all of them are on, where calls are plain eager calls; else None."""
    if torch._C._len_torch_dispatch_stack():
        return None
    device = None
    for t in tensors:
        if t is not None:
            if type(t) not in PLAIN or t.device != (device or t.device):
                return None
            device = t.device
    if device is None or device.type != "cuda" or device.index != torch.cuda.current_device():
        return None
    return device


def record(
    fn: Callable[..., tuple[Tensor | None, ...]], tensors: tuple[Tensor | None, ...], constants: tuple[Any, ...]
) -> tuple[tuple[Tensor | None, ...], Tape | None]:
    """Outputs of a call, and its tape, None if it cannot be replayed."""
    with Record() as seen, launches_seen_by(seen.launches):
        outputs = fn(*tensors, *constants)
    return outputs, None if seen.other is not None else _tape(tensors, outputs, seen)


def _tape(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], seen: Record) -> Tape | None:
    slots: dict[int, tuple[int, int]] = {}  # address of a storage -> slot, address that the slot's base has
    for i, t in enumerate(inputs):
        if t is not None and t.numel():
            if t.untyped_storage().data_ptr() in slots:
                return None  # which of two inputs an address belongs to is not to be told
            slots[t.untyped_storage().data_ptr()] = i, t.data_ptr()
    ids, made = {id(t): i for i, t in enumerate(inputs) if t is not None}, []
    for out in outputs:
        if out is None or id(out) in ids:
            continue
        output = _output(out, seen)
        if output is None:
            return None
        ids[id(out)] = len(inputs) + len(made)
        if out.numel():
            slots[out.untyped_storage().data_ptr()] = ids[id(out)], out.data_ptr()
        made.append(output)
    zeros = [t for t in seen.zeros if t.numel()]
    if any(t.untyped_storage().data_ptr() in slots for t in zeros):
        return None  # an output of zeros
    for i, t in enumerate(zeros, len(inputs) + len(made)):
        slots[t.untyped_storage().data_ptr()] = i, t.data_ptr()
    size, last = 0, len(inputs) + len(made) + len(zeros)
    for t in seen.allocated:
        if t.numel() and t.untyped_storage().data_ptr() not in slots:
            slots[t.untyped_storage().data_ptr()] = last, t.untyped_storage().data_ptr() - size
            size += -(-t.untyped_storage().nbytes() // 512) * 512
    launches = [_launch(slots, *launch) for launch in seen.launches]
    if any(launch is None for launch in launches):
        return None
    zeroed = tuple((tuple(t.shape), t.dtype) for t in zeros)
    return Tape(tuple(made), zeroed, size, tuple(None if t is None else ids[id(t)] for t in outputs), tuple(launches))  # pyright: ignore[reportArgumentType]


def _output(out: Tensor, seen: Record) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int] | None:
    """What was allocated for an output, as `Tape.made` has it; None for anything but a whole or the start of rows."""
    for t in seen.allocated:
        same = t is out or (t.data_ptr() == out.data_ptr() and t.dtype == out.dtype)
        if same and t.shape == out.shape and out.is_contiguous():
            return tuple(t.shape), t.stride(), t.dtype, 0
        padded = same and t.is_contiguous() and t.dim() == out.dim() == 2 and t.stride() == out.stride()
        if padded and t.shape[0] == out.shape[0] and 0 < out.shape[1] < t.shape[1]:
            return tuple(t.shape), t.stride(), t.dtype, out.shape[1]
    return None


def _launch(
    slots: dict[int, tuple[int, int]], compiled: Any, grid: tuple[int, ...], args: Sequence[Any]
) -> Launch | None:
    constants, addresses, descriptors = list(args), [], []
    for i, arg in enumerate(args):
        t = arg if isinstance(arg, Tensor) else getattr(arg, "base", None)
        if not isinstance(t, Tensor):
            continue
        if not t.numel():
            constants[i] = 0
            if t is not arg:
                return None
            continue
        found = slots.get(t.untyped_storage().data_ptr())
        if found is None:
            return None
        slot, base = found
        constants[i] = None
        if t is arg:
            addresses.append((i, slot, t.data_ptr() - base))
        else:
            fields = {name: value for name, value in vars(arg).items() if name != "base"}
            descriptors.append((i, type(arg), fields, slot, t.data_ptr() - base))
    short = direct(compiled, grid, constants, addresses, descriptors)
    return Launch(compiled, grid, tuple(constants), tuple(addresses), tuple(descriptors), short)
