"""Joining rows whose ids are text: by mixed bits, and never two ids that differ."""

import numpy as np
import pytest

from mxfp8_recipe.ab import compare_rows
from mxfp8_recipe.ab.compare_files import CompareError, PredictionFile


def table(folder, name: str, ids, seeds=None) -> PredictionFile:
    """Predictions that tell rows apart: that of an id is its number, scaled."""
    lines = ["label,prediction,id" + (",seed" if seeds else "")]
    for index, text in enumerate(ids):
        prediction = (int("".join(c for c in text if c.isdigit())) % 9973 + 1) / 10_000
        lines.append(f"0,{prediction},{text}" + (f",{seeds[index]}" if seeds else ""))
    (folder / name).write_text("\n".join(lines) + "\n")
    return PredictionFile(folder / name)


def mixed(*texts: str, words: int = 1) -> list[int]:
    return compare_rows._mixed(np.array([t.encode() for t in texts]), words).view(np.uint64).tolist()


def test_the_mixer_is_splitmix64():
    """Its first output from the state 0, as published (xoshiro.di.unimi.it); a text's words follow each other."""
    assert mixed("") == [0xE220A8397B1DCDAF]
    assert mixed("abcdefgh1") != mixed("abcdefgh", words=2) != mixed("abcdefgh")


@pytest.mark.parametrize("width", [6, 12, 40])
def test_ids_in_sequence_share_no_bits(width):
    texts = np.array([f"{i:0{width}d}".encode() for i in range(300_000)])
    found = compare_rows._mixed(texts, -(-width // 8))
    assert len(np.unique(found)) == len(texts)
    # Each bit is set in half of them, to within six standard deviations.
    bits = np.unpackbits(found.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
    assert abs(bits - 0.5).max() < 6 * 0.5 / len(texts) ** 0.5


@pytest.mark.parametrize("seeds", [False, True])
@pytest.mark.parametrize("extra", ["", "a-much-longer-name-of-a-row-than-those-of-the-others-1"])
def test_rows_in_another_order_find_their_own(tmp_path, seeds, extra):
    ids = [f"row-{i}" for i in range(500)] * 2
    seed = ["x"] * 500 + ["y"] * 500
    if not seeds:
        ids, seed = ids[:500], None
    order = np.random.default_rng(0).permutation(len(ids))
    more = [extra] if extra else []
    other_seeds = [seed[i] for i in order] + ["x"] * len(more) if seed else None
    first = table(tmp_path, "a.csv", ids, seed)
    other = table(tmp_path, "b.csv", [ids[i] for i in order] + more, other_seeds)
    found = compare_rows.align(first, [other])
    assert np.array_equal(found.rows.prediction, found.rows.others[0])
    assert len(found.rows) == len(ids)
    assert [note.split()[0] for note in found.notes] == ["1"] * len(more)


def test_ids_that_share_their_bits_are_not_the_same_row(tmp_path, monkeypatch):
    """What chance does to one file in 300,000, forced."""
    monkeypatch.setattr(compare_rows, "_mixed", lambda text, words: np.zeros(len(text), np.int64))
    first = table(tmp_path, "a.csv", ["x1"])
    with pytest.raises(CompareError, match=r"none of its 1 rows is in .*: id y2; there: id x1"):
        compare_rows.align(first, [table(tmp_path, "b.csv", ["y2"])])
    with pytest.raises(CompareError, match="1 ids occur more than once"):
        compare_rows.align(table(tmp_path, "a.csv", ["x1"]), [table(tmp_path, "b.csv", ["y2", "z3"])])
