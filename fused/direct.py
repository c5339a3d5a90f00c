"""Launch past Triton's Python launcher, which encodes TMA descriptors anew every time: 12 us for three of them.

Knows the launcher of triton 3.6, which ships with torch 2.11. With any other, `direct` finds nothing and Triton's own
launcher runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MOST_ADDRESSES = 256
_STREAM = 3
"""Place of the stream among the launcher's arguments, after the grid."""
_WRAPPER = {"launcher", "tensordesc_indices", "tensordesc_meta"}


class Direct:
    """A launch of `compiled` with these arguments but for addresses.

    Args:
        raw: Triton's launcher in C.
        args: as it takes them, a descriptor as the encoded map, its shape and its strides.
        addresses: `(position, slot, offset)` of pointers; maps: of descriptors, each with what encodes one.
    """

    def __init__(
        self, raw: Callable[..., None], compiled: Any, grid: tuple[int, ...], args: list[Any],
        addresses: list[tuple[int, int, int]], maps: list[tuple[int, int, int, Callable[[int], Any]]],
    ) -> None:  # fmt: skip
        run = compiled.run
        head = [
            *(*grid, 1, 1)[:3], None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        self.raw, self.args = raw, [*head, *args]
        self.addresses = tuple((len(head) + i, slot, offset) for i, slot, offset in addresses)
        self.maps = tuple((len(head) + i, *place, {}) for i, *place in maps)

    def __call__(self, base: Sequence[int], stream: int) -> None:
        args = self.args.copy()
        args[_STREAM] = stream
        for i, slot, offset in self.addresses:
            args[i] = base[slot] + offset
        for i, slot, offset, encode, known in self.maps:
            address = base[slot] + offset
            found = known.get(address)
            if found is None:
                if len(known) >= MOST_ADDRESSES:
                    known.clear()
                found = known[address] = encode(address)
            args[i] = found
        self.raw(*args)


def direct(
    compiled: Any, grid: tuple[int, ...], args: Sequence[Any], addresses: Sequence[tuple[int, int, int]],
    descriptors: Sequence[tuple[int, type, dict[str, Any], int, int]],
) -> Direct | None:  # fmt: skip
    """What launches `compiled` directly; the arguments are those of `replay.Launch`. None for a launcher not known."""
    run = compiled.run
    if getattr(run, "global_scratch_size", None) != 0 or getattr(run, "profile_scratch_size", None) != 0:
        return None
    if hasattr(run, "arg_annotations"):  # triton 3.7 and later
        return None
    raw, metas = run.launch, []
    if descriptors:
        names = getattr(getattr(raw, "__code__", None), "co_freevars", ())
        if set(names) != _WRAPPER:
            return None
        held = dict(zip(names, (cell.cell_contents for cell in raw.__closure__)))
        raw, metas = held["launcher"], held["tensordesc_meta"]
    described = {place[0]: (place, meta) for place, meta in zip(descriptors, metas)}
    if len(described) != len(descriptors) or None in metas:
        return None
    flat, moved, maps = [], {}, []
    for i, arg in enumerate(args):
        moved[i] = len(flat)
        if i in described:
            (_, _, fields, slot, offset), meta = described[i]
            maps.append((len(flat), slot, offset, _encoder(fields, meta)))
            flat += [None, *fields["shape"], *fields["strides"]]
        else:
            flat.append(arg)
    return Direct(raw, compiled, grid, flat, [(moved[i], slot, offset) for i, slot, offset in addresses], maps)


def _encoder(fields: dict[str, Any], meta: dict[str, Any]) -> Callable[[int], Any]:
    """What gives the TMA descriptor of a tensor at an address."""
    import triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = triton.runtime.driver.active.utils.fill_tma_descriptor  # pyright: ignore[reportAttributeAccessIssue]
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    head = meta["swizzle"], meta["elem_size"], element, meta["block_size"]
    tail = fields["shape"], fields["strides"], 1 if fields["padding"] == "nan" else 0
    return lambda address: fill(address, *head, *tail)
