"""Joining rows whose ids are text: by mixed bits, never two ids that differ, and without holding the texts."""

import re
import tracemalloc

import numpy as np
import pytest

from mxfp8_recipe.ab import compare_files, compare_ids, compare_rows
from mxfp8_recipe.ab.compare_files import CompareError, PredictionFile

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table(folder, name: str, ids, seeds=None) -> PredictionFile:
    """Predictions that tell rows apart: that of an id is its number, scaled."""
    lines = ["label,prediction,id" + (",seed" if seeds else "")]
    for index, text in enumerate(ids):
        prediction = (int("".join(c for c in text if c.isdigit())) % 9973 + 1) / 10_000
        lines.append(f"0,{prediction},{text}" + (f",{seeds[index]}" if seeds else ""))
    (folder / name).write_text("\n".join(lines) + "\n")
    return PredictionFile(folder / name)


def mixed(*texts: str) -> list[int]:
    return compare_ids.mixed(np.array([t.encode() for t in texts])).view(np.uint64).tolist()


def test_the_mixer_is_splitmix64():
    """Its first output from the state 0, as published (xoshiro.di.unimi.it)."""
    assert mixed("") == [0xE220A8397B1DCDAF]


def test_bits_are_of_the_text_alone():
    """Not of the longest text beside it; every word counts, and so does its place."""
    texts = ["", "a", "abcdefgh", "abcdefgh1", "1\0\0\0\0\0\0\0abcdefgh", "Zürich", "x" * 40]
    assert mixed(*texts) == [bits for text in texts for bits in mixed(text)]
    assert len(set(mixed(*texts))) == len(texts)


@pytest.mark.parametrize("width", [6, 12, 40])
def test_ids_in_sequence_share_no_bits(width):
    texts = np.array([f"{i:0{width}d}".encode() for i in range(300_000)])
    found = compare_ids.mixed(texts)
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
    monkeypatch.setattr(compare_ids, "mixed", lambda texts: np.zeros(len(texts), np.int64))
    first = table(tmp_path, "a.csv", ["x1"])
    with pytest.raises(CompareError, match=r"none of its 1 rows is in .*: id y2; there: id x1"):
        compare_rows.align(first, [table(tmp_path, "b.csv", ["y2"])])
    with pytest.raises(CompareError, match="1 ids occur more than once"):
        compare_rows.align(table(tmp_path, "a.csv", ["x1"]), [table(tmp_path, "b.csv", ["y2", "z3"])])


ROWS = 1500
TEXT = {
    "short": lambda i: f"u{i:010d}",
    "hex": lambda i: f"{i * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}",
    "mixed lengths": lambda i: "ab" * (i % 23) + str(i),
    "not ASCII": lambda i: "Zürich-東京"[: i % 10] + f"-{i}",
}


def parquet(folder, name: str, numbers, ids, prediction=None, **more) -> PredictionFile:
    """A file of several row groups; label and prediction follow from a row's number."""
    prediction = (numbers % 997 + 1) / 1000 if prediction is None else prediction
    columns = {"label": numbers % 2, "prediction": prediction, "id": ids, **more}
    pq.write_table(pa.table(columns), folder / name, row_group_size=400)
    return PredictionFile(folder / name)


@pytest.fixture
def blocks(monkeypatch):
    """Of 128 rows, and the texts of no more at a time."""
    for module in (compare_ids, compare_files, compare_rows):
        monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(compare_ids, "PIECE", 1)


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize("arrow", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_and_integers_join_alike(tmp_path, blocks, kind, arrow):
    """In another order, with rows that one file lacks, twice: each file is joined on the rows that are left."""
    rng, numbers = np.random.default_rng(0), np.arange(ROWS)
    kept = [numbers, *(rng.permutation(np.delete(numbers, rng.choice(ROWS, 40))) for _ in range(2))]
    found = []
    for text in (True, False):
        files = []
        for run, those in enumerate(kept):
            ids = pa.array([TEXT[kind](i) for i in those.tolist()]).cast(arrow) if text else those
            prediction = np.random.default_rng(run).random(ROWS)[those]
            files.append(parquet(tmp_path, f"{run}.parquet", those, ids, prediction, time=those))
        found.append(compare_rows.align(files[0], files[1:]))
    of_text, of_numbers = found
    both = np.intersect1d(kept[1], kept[2])
    assert len(of_text.rows) == len(both)
    for run, values in enumerate([of_text.rows.prediction, *of_text.rows.others]):
        assert np.array_equal(values, np.random.default_rng(run).random(ROWS)[both])
    told = [re.sub(r"(id )(\d+)", lambda m: m[1] + TEXT[kind](int(m[2])), note) for note in of_numbers.notes]
    assert of_text.notes == told
    assert len(told) == 3


def test_texts_in_the_same_order_that_differ_in_one_letter_are_told(tmp_path, blocks, monkeypatch):
    """Bits of the first letter alone, so that the two share them and only the texts can tell."""
    numbers = np.arange(ROWS)
    ids = [f"{chr(256 + i)}-{i}" for i in range(ROWS)]
    other = [*ids[:777], ids[777] + "x", *ids[778:]]
    monkeypatch.setattr(
        compare_ids, "mixed", lambda texts: np.array([ord(t.decode()[0]) for t in texts.tolist()], np.int64)
    )
    first, second = parquet(tmp_path, "a.parquet", numbers, ids), parquet(tmp_path, "b.parquet", numbers, other)
    found = compare_rows.align(first, [second])
    assert len(found.rows) == ROWS - 1
    assert [note.rpartition(": ")[2] for note in found.notes] == [f"id {ids[777]}", f"id {other[777]}"]


@pytest.mark.parametrize("kind", TEXT)
def test_ids_twice_in_different_row_groups_are_counted(tmp_path, blocks, kind):
    numbers = np.arange(ROWS)
    texts = [TEXT[kind](i) for i in numbers.tolist()]
    twice = [*texts[:-2], texts[5], texts[700]]
    files = [parquet(tmp_path, f"{i}.parquet", numbers, ids) for i, ids in enumerate([texts, twice, texts[::-1]])]
    for pair in ((files[0], files[1]), (files[1], files[2])):
        with pytest.raises(
            CompareError, match=r"1\.parquet: column id: 2 ids occur more than once, such as id "
        ) as told:
            compare_rows.align(pair[0], [pair[1]])
        assert {f"id {texts[5]}", f"id {texts[700]}"} == set(re.findall(r"id \S+?(?=, |;)", str(told.value)))


@pytest.mark.parametrize("first", [0, 900])
def test_ids_that_are_missing_are_counted_over_all_row_groups(tmp_path, blocks, first):
    ids = [None if i in (first, 1000, 1499) else f"r{i}" for i in range(ROWS)]
    file = parquet(tmp_path, "a.parquet", np.arange(ROWS), ids)
    for read in (file.read_all, file.read_ids, lambda: file.read("id")):
        with pytest.raises(CompareError, match=f"column id: 3 of {ROWS} values are missing"):
            read()


def test_integers_that_no_seed_fits_beside(tmp_path, blocks):
    """Hashed ids fill all 64 bits: their ranks are joined; 1,500 and 1,463 rows fill no block."""
    numbers, seeds = np.arange(ROWS), np.arange(ROWS) % 3
    ids = ((numbers // 3).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    those = np.random.default_rng(0).permutation(ROWS)[:1463]
    files = [
        parquet(tmp_path, f"{name}.parquet", rows, ids[rows], rows / ROWS, seed=seeds[rows])
        for name, rows in (("a", numbers), ("b", those))
    ]
    found = compare_rows.align(files[0], files[1:])
    assert np.array_equal(found.rows.prediction, found.rows.others[0])
    assert set(found.rows.prediction.tolist()) == set((those / ROWS).tolist())
    assert len(found.notes) == 1
    assert found.notes[0].startswith("37 rows of ")


@pytest.mark.parametrize("text_first", [False, True])
def test_text_that_is_an_integer_is_that_integer_in_the_other_file(tmp_path, blocks, text_first):
    numbers = np.random.default_rng(0).permutation(ROWS)
    files = [
        parquet(tmp_path, "text.parquet", np.arange(ROWS), [str(i) for i in range(ROWS)]),
        parquet(tmp_path, "numbers.parquet", numbers, numbers),
    ]
    first, second = files if text_first else files[::-1]
    found = compare_rows.align(first, [second])
    assert not found.notes
    assert np.array_equal(found.rows.prediction, found.rows.others[0])


HASHED = np.array([2**64 - 5, 2**63, 2**63 - 1, 7], np.uint64)
SIGNED = HASHED.view(np.int64)
SMALL = np.array([5, 2**63 - 1, 0, 7])


def integers(folder, name: str, column: str, values: np.ndarray) -> PredictionFile:
    """Four rows of one label, told apart by the column; the prediction is the place."""
    table = {"label": np.ones(4), "prediction": np.arange(4) / 4, "id": np.zeros(4, np.int64), column: values}
    pq.write_table(pa.table(table), folder / name)
    return PredictionFile(folder / name)


@pytest.mark.parametrize("column", ["id", "seed"])
@pytest.mark.parametrize(("first", "second"), [(HASHED, SIGNED), (SIGNED, HASHED)])
def test_equal_bits_of_two_types_are_no_equal_numbers(tmp_path, column, first, second):
    files = [integers(tmp_path, f"{i}.parquet", column, values) for i, values in enumerate((first, second))]
    told = rf"1.parquet: column {column}: got values of type {second.dtype}, expected {first.dtype} as in .*; cast one"
    with pytest.raises(CompareError, match=told):
        compare_rows.align(files[0], files[1:])


@pytest.mark.parametrize("column", ["id", "seed"])
@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (HASHED, SMALL, 2),
        (SMALL, HASHED, 2),
        (HASHED, HASHED[::-1].copy(), 4),
        (SIGNED, SIGNED[::-1].copy(), 4),
        (SMALL.astype(np.uint64), SMALL, 4),
        (np.arange(4, dtype=np.uint8), np.arange(4, dtype=np.int64)[::-1].copy(), 4),
        (np.array([-1, -2, 3, 4], np.int8), np.array([255, 254, 3, 4], np.uint64), 2),
    ],
)
def test_equal_numbers_of_two_types_are_joined(tmp_path, column, first, second, shared):
    files = [integers(tmp_path, f"{i}.parquet", column, values) for i, values in enumerate((first, second))]
    rows = compare_rows.align(files[0], files[1:]).rows
    mine, others = ((p * 4).astype(int) for p in (rows.prediction, rows.others[0]))
    assert first[mine].tolist() == second[others].tolist()
    assert len(rows) == shared


@pytest.mark.parametrize(("kind", "long"), [("parquet", 60_000), ("csv", 12_000)])
def test_one_very_long_id_takes_its_own_room(tmp_path, kind, long):
    """Not that of all rows beside it, 840 MB and more. Measured: 337 and 361 MB of arrays."""
    rows, paths = 70_000, [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, order in zip(paths, (np.arange(rows), np.random.default_rng(0).permutation(rows))):
        ids = [f"r{i}" if i != 50_000 else "x" * long for i in order.tolist()]
        if kind == "csv":
            lines = [f"{i % 2},{i / rows},{name}\n" for i, name in zip(order.tolist(), ids)]
            path.write_text("label,prediction,id\n" + "".join(lines))
        else:
            parquet(tmp_path, path.name, order, ids, order / rows)
    tracemalloc.start()
    try:
        found = compare_rows.align(PredictionFile(paths[0]), [PredictionFile(paths[1])])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not found.notes
    assert np.array_equal(found.rows.prediction, found.rows.others[0])
    assert peak < 500e6, peak


def test_parts_of_texts_hold_all_rows_once(monkeypatch):
    monkeypatch.setattr(compare_ids, "PADDED", 100)
    for lengths in ([], [3], [1000], [1] * 100, [1] * 101, [2] * 50 + [1000] + [1] * 60, [1000] * 5):
        parts = list(compare_ids.parts_of(np.array(lengths, dtype=np.int64)))
        assert [row for part in parts for row in range(len(lengths))[part]] == list(range(len(lengths)))
        for part in parts:
            assert len(lengths[part]) == 1 or len(lengths[part]) * max(lengths[part]) <= 100


def test_one_long_text_makes_its_own_piece_short(tmp_path, blocks, monkeypatch):
    """A piece up to its block, one of its block alone, and one of all that follow; texts grow within the first."""
    monkeypatch.setattr(compare_ids, "PIECE", 128 * 4 * 9)
    texts = [f"r{i}" if i != 700 else "x" * 1000 for i in range(ROWS)]
    file = parquet(tmp_path, "a.parquet", np.arange(ROWS), texts)
    ids = file.read_ids()
    assert isinstance(ids, compare_ids.TextIds)
    pieces = [piece.copy() for piece in ids._pieces()]
    assert [t.decode() for piece in pieces for t in piece.tolist()] == texts
    assert [piece.dtype.itemsize for piece in pieces].count(1000) == 1
    assert len(pieces) == 3
    order = np.random.default_rng(0).permutation(ROWS)
    other = parquet(tmp_path, "b.parquet", order, [texts[i] for i in order.tolist()])
    assert not compare_rows.align(file, [other]).notes


def test_texts_are_never_held_whole(tmp_path, monkeypatch):
    """Arrays at their peak, with ids of 64 bytes. Measured: 88 bytes a row; the texts of one file are 64 more."""
    rows = 200_000
    numbers, order = np.arange(rows), np.random.default_rng(0).permutation(rows)
    for name, those in (("a", numbers), ("b", order)):
        parquet(tmp_path, f"{name}.parquet", those, [f"{i:064x}" for i in those.tolist()], time=those, weight=those)
    for module in (compare_ids, compare_files, compare_rows):
        monkeypatch.setattr(module, "BLOCK", 1 << 10)
    monkeypatch.setattr(compare_ids, "PIECE", 1 << 20)
    tracemalloc.start()
    try:
        found = compare_rows.align(PredictionFile(tmp_path / "a.parquet"), [PredictionFile(tmp_path / "b.parquet")])
        peak = tracemalloc.get_traced_memory()[1] / rows
    finally:
        tracemalloc.stop()
    assert np.array_equal(found.rows.prediction, found.rows.others[0])
    assert peak < 110
