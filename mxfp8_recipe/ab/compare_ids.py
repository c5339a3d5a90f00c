"""Ids that are text: 64 mixed bits of each are held, and the texts stay in their file, from where they are read again.

    bits = 0;  bits = mix(bits ^ word) for each eight bytes of the text, the last ones filled up with NUL

`mix` is the mixer of SplitMix64 (Steele et al. 2014). Ranks of text would take minutes, and the texts of two files of
10,000,000 rows up to a gigabyte. So rows are matched by their bits; then the texts of the matched rows are read once
more and compared, as many of one file at a time as `PIECE` holds against all of the other.

Two of n texts share their bits by chance in n^2 / 2^65 of all files, 3 in a million for 10,000,000 rows. Two of one
file are then reported as one id that occurs twice; a row of one file is never taken for a row of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

BLOCK = 1 << 16
"""Rows that are read, mixed or compared at a time."""
PIECE = 1 << 28
"""Bytes of text held at a time while texts are compared."""
PADDED = 1 << 25
"""Bytes of texts that are read at a time, each taken to be as long as the longest of them."""


@dataclass(frozen=True, kw_only=True)
class TextIds:
    """The id column of N rows of a file.

    Attributes:
        blocks: from the start of the file each time, its texts as arrays of bytes, `BLOCK` rows at most.
        bits: (N,) int64.
        rows: (N,) which rows of the file these are, ascending; None for all of them.
    """

    blocks: Callable[[], Iterator[np.ndarray]]
    bits: np.ndarray
    rows: np.ndarray | None = None

    @classmethod
    def of(cls, blocks: Callable[[], Iterator[np.ndarray]], rows: int) -> TextIds:
        """Of all rows of a file, which is read once."""
        bits, start = np.empty(rows, dtype=np.int64), 0
        for texts in _ahead(blocks()):
            bits[start : start + len(texts)] = mixed(texts)
            start += len(texts)
        return cls(blocks=blocks, bits=bits)

    @classmethod
    def of_array(cls, values: np.ndarray) -> TextIds:
        """Of text, or of integers as they would be written."""
        return cls.of(partial(blocks_of, values), len(values))

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, rows: np.ndarray) -> TextIds:
        """Some of the rows, ascending."""
        return replace(self, bits=self.bits[rows], rows=rows if self.rows is None else self.rows[rows])

    def texts(self) -> Iterator[np.ndarray]:
        """The texts of these rows, some at a time."""
        start = 0
        for block in self.blocks():
            if self.rows is None:
                yield block
            else:
                first, last = np.searchsorted(self.rows, [start, start + len(block)])
                yield block[self.rows[first:last] - start]
            start += len(block)

    def at(self, rows: np.ndarray) -> list[bytes]:
        """The texts of a few rows, in their order."""
        found, start = {}, 0
        for block in self.texts():
            found |= {row: block[row - start] for row in rows.tolist() if start <= row < start + len(block)}
            start += len(block)
            if len(found) == len(rows):
                break
        return [found[row] for row in rows.tolist()]

    def alike(self, other: TextIds, place: np.ndarray) -> np.ndarray:
        """(N,) bool: which rows' texts are those at `place`, (N,), of the other file; -1 is no place."""
        mine = np.full(len(other), -1)
        placed = np.flatnonzero(place >= 0)
        mine[place[placed]] = placed
        del placed
        found, first = np.zeros(len(self), dtype=bool), 0
        for texts in self._pieces():
            start = 0
            for block in _ahead(other.texts()):
                rows = mine[start : start + len(block)] - first
                here = np.flatnonzero((rows >= 0) & (rows < len(texts)))
                for part in _equal_parts(here, max(texts.dtype.itemsize, block.dtype.itemsize)):
                    found[first + rows[part]] = texts[rows[part]] == block[part]
                start += len(block)
            first += len(texts)
            del texts  # before the next piece is read
        return found

    def _pieces(self) -> Iterator[np.ndarray]:
        """The texts of these rows, as many at a time as `PIECE` holds; one long text makes only its own piece short."""
        piece, end = np.empty(0, dtype="S1"), 0
        for block in self.texts():
            width = max(piece.dtype.itemsize, block.dtype.itemsize)
            if end and (end + len(block)) * width > PIECE:
                yield piece[:end]
                end, width = 0, block.dtype.itemsize
            if not end or width > piece.dtype.itemsize:
                wider = np.empty(max(len(block), min(PIECE // width, len(self))), dtype=f"S{width}")
                wider[:end] = piece[:end]
                piece = wider
            piece[end : end + len(block)] = block
            end += len(block)
        yield piece[:end]


def parts_of(lengths: np.ndarray, first: int = 0) -> Iterator[slice]:
    """Rows from `first` on in halves of halves, down to parts that fill `PADDED` at most, or to one row."""
    rows = len(lengths)
    if rows > 1 and rows * int(lengths.max()) > PADDED:
        yield from parts_of(lengths[: rows // 2], first)
        yield from parts_of(lengths[rows // 2 :], first + rows // 2)
    elif rows:
        yield slice(first, first + rows)


def _equal_parts(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Some rows at a time, whose texts of this width fill `PADDED` at most."""
    step = max(PADDED // width, 1)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _ahead(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same blocks; a thread of its own reads the next one while one is worked on."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, blocks, None)
        while (block := following.result()) is not None:
            following = pool.submit(next, blocks, None)
            yield block


def blocks_of(values: np.ndarray) -> Iterator[np.ndarray]:
    """Text, or integers as they would be written, some rows at a time."""
    return (values[start : start + BLOCK].astype(bytes, copy=False) for start in range(0, len(values), BLOCK))


def mixed(texts: np.ndarray) -> np.ndarray:
    """(N,) int64 bits of an array of bytes; how wide the array is does not matter."""
    words = -(-texts.dtype.itemsize // 8)
    columns = texts.astype(f"S{8 * words}").view(np.uint64).reshape(-1, words).T
    lengths = np.char.str_len(texts)
    bits = _mix(columns[0].copy())
    for index, column in enumerate(columns[1:], 1):
        further = _mix(bits ^ column)
        bits = further if lengths.min() > 8 * index else np.where(lengths > 8 * index, further, bits)
    return bits.view(np.int64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """In place."""
    bits += np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits
