"""Quotes of a CSV file that open where they should not, or do not close.

An open quote takes every line up to the next quote, or to the end of the file, into one field: rows would vanish
without a word. Strict parsing tells of a quote without an end, and of one that ends before something else than a comma.
The rest shows in the lines: a record has one of them unless a field holds line breaks. In a column that is read it must
not; in another it may, such as in a comment, where no line that it holds is itself a row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence

REMEDY = 'is there a quote (") that opens and does not close? Close it, or take it out'
_BREAK = re.compile("\r\n|\r|\n")


def lines_of(record: Sequence[str]) -> int:
    """Lines of the file that a record goes over."""
    return 1 + sum(len(_BREAK.findall(value)) for value in record)


def broken_line(lines: Iterable[str]) -> int:
    """Line, from 1, where the record starts that cannot be parsed."""
    reader, line = csv.reader(lines, strict=True), 1
    try:
        for _ in reader:
            line = reader.line_num + 1
    except csv.Error:
        pass
    return line


def swallowing(
    records: Iterable[Sequence[str]], header: Sequence[str], wanted: Mapping[str, int], numbers: Sequence[str]
) -> tuple[int, str] | None:
    """The first record that took in lines which are none of its own.

    Args:
        records: rows of the file. header: names of their columns.
        wanted: names of the columns that are read, and their places. numbers: those of which each row has a number.

    Returns:
        Lines before the record, and the name of the column; None where all is well.
    """
    before = 0
    for record in records:
        broken = [place for place, value in enumerate(record) if _BREAK.search(value)]
        for name, place in wanted.items():
            if place in broken and _BREAK.search(record[place].strip()):
                return before, name
        if broken:
            inside = [line.split(",") for line in _BREAK.split(",".join(record))[1:]]
            if any(len(row) == len(header) and all(_is_number(row[wanted[n]]) for n in numbers) for row in inside):
                return before, header[min(broken[0], len(header) - 1)]
        before += lines_of(record)
    return None


def holds_numbers(header: Sequence[str]) -> bool:
    """Whether a name has line breaks and a number after one: rows that a quote of the header took in."""
    return any(_is_number(value) for name in header for line in _BREAK.split(name)[1:] for value in line.split(","))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
