"""Prediction files as people have them: packed, exported, stamped; and what each mistake is told."""

import gzip
import itertools
import subprocess
import sys
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from mxfp8_recipe.ab import compare_columns
from mxfp8_recipe.ab.compare_files import CompareError, PredictionFile

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PLAIN = "label,prediction,id\n0,0.25,7\n1,0.5,8\n"


def packed(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def csv_file(folder: Path, text: str | bytes, name: str = "a.csv") -> PredictionFile:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return PredictionFile(folder / name)


def parquet_file(folder: Path, name: str = "a.parquet", **more) -> PredictionFile:
    pq.write_table(pa.table({"label": [0, 1], "prediction": [0.25, 0.5]} | more), folder / name)
    return PredictionFile(folder / name)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"\xef\xbb\xbf" + PLAIN.encode(), "mark.csv"),
        (PLAIN.replace("\n", "\r\n"), "windows.csv"),
        (PLAIN + "\n\n", "blank.csv"),
        (packed(PLAIN), "packed.csv.gz"),
        (packed("\ufeff" + PLAIN), "PACKED.GZ"),
    ],
)
def test_csv_as_other_programs_write_it(tmp_path, content, name):
    rows = csv_file(tmp_path, content, name).read_all()
    assert rows.label.tolist() == [0, 1]
    assert rows.prediction.tolist() == [0.25, 0.5]
    assert isinstance(rows.id, np.ndarray)
    assert rows.id.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "its first line is empty, expected a header with label, prediction"),
        (PLAIN.replace(",", ";"), "it has label;prediction;id, where columns are expected to be parted by commas"),
        ("label,prediction,prediction\n0,0.5,0.1\n", "column 'prediction' is there more than once; leave one in"),
        ("label,prediction\n0,0.5," + "x" * 200_000, "not a CSV file .field larger"),
        ("label,prediction\n,0.5\n", "column label: got '' in row 1, expected a number"),
        ("label,prediction\nnan,0.5\n", "label: 1 of 1 values are NaN or missing"),
        ("label,prediction,time\n1,0.5,nan\n", "time: 1 of 1 values are NaN"),
        ("label,prediction,time\n1,0.5,\n", "time: 1 of 1 values are missing"),
        ("label,prediction,time\n1,0.5,3/5/2024\n", "time: got '3/5/2024' in row 1, expected a number or ISO 8601"),
    ],
)
def test_mistakes_in_csv(tmp_path, text, message):
    with pytest.raises(CompareError, match=message):
        csv_file(tmp_path, text).read_all()


COMMENTED = ["label,prediction,id,comment", *(f"{i % 2},0.25,r{i},ok" for i in range(3))]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("quotes", [1, 2])
def test_a_stray_quote_anywhere_loses_no_row(tmp_path, quotes, end):
    """One or two of them at every place: each row is read, or what is wrong is told with its line."""
    text, told = end.join([*COMMENTED, ""]), []
    for places in itertools.combinations(range(len(text) + 1), quotes):
        parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        try:
            rows = csv_file(tmp_path, '"'.join(parts)).rows
        except CompareError as error:
            told.append(str(error))
        else:
            assert rows == len(COMMENTED) - 1, parts
    assert told
    assert all("a.csv line " in error or "a.csv: no column " in error for error in told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('0,0.5,"r1,x\n0,0.5,r2,x\n', r'line 3: not a CSV file .unexpected end of data.; is there a quote \("\) that'),
        ('0,0.5,"r1,x\n0,0.5,r2,x\n0,0.5,"r3",x\n', "line 3: not a CSV file"),
        ('0,0.5,"r1,x\n0,0.5,r2,x\n0,0.5,r3",x\n', "line 3: column id: got a text with line breaks; is there"),
        ('0,0.5,r1,"x\n0,0.5,r2,x"\n', "line 3: column comment: got a text with line breaks"),
        ('0,0.5,r1,"x\n0,0.5,r2,y\n0,0.5,r3,z"\n', "line 3: column comment: got"),
        ('0,0.5,r1,"x\ny"\n0,0.5,"r2\nr3",x\n', "line 5: column id: got"),
        ('0,0.5,r1,"x\ny"\n0,0.5,"r2,x\n0,0.5,r3"\n', "line 5: 3 columns, expected 4, over several lines; is there"),
    ],
)
def test_a_quote_that_takes_in_rows_is_told_with_its_line(tmp_path, text, message):
    for name, pack in (("a.csv", str.encode), ("a.csv.gz", packed)):
        with pytest.raises(CompareError, match=message):
            csv_file(tmp_path, pack("label,prediction,id,comment\n0,0.5,r0,x\n" + text), name)
    head = text.count("\n") * "0,0.5,s,x\n"
    with pytest.raises(CompareError, match="line 1: the header goes on over rows"):
        csv_file(tmp_path, 'label,prediction,id,"comment\n' + head + '"\n')


def test_line_breaks_where_they_belong(tmp_path):
    """In a comment or its name; and in rows of their own, which are none."""
    text = 'label,prediction,id,"a\ncomment"\n\n0,0.25,"7","two\nlines, and, a, few"\n\n1,0.5,8,"1, 2,\n3, 4"\n'
    rows = csv_file(tmp_path, text).read_all()
    assert np.asarray(rows.id).tolist() == [7, 8]
    assert rows.prediction.tolist() == [0.25, 0.5]


def test_a_truncated_packed_file_and_a_directory(tmp_path):
    with pytest.raises(CompareError, match="not a CSV file"):
        csv_file(tmp_path, packed(PLAIN)[:-9], "short.csv.gz")
    (tmp_path / "parts.parquet").mkdir()
    with pytest.raises(CompareError, match="got a directory, expected one parquet or CSV file"):
        PredictionFile(tmp_path / "parts.parquet")


@pytest.mark.parametrize("ids", [["007", "7"], ["1_0", "10"], ["9223372036854775808", "1"], ["+5", "5"], ["a", "1"]])
def test_ids_that_are_written_apart_stay_apart(tmp_path, ids):
    found = csv_file(tmp_path, f"label,prediction,id\n0,0.25,{ids[0]}\n1,0.5,{ids[1]}\n").read("id")
    assert found is not None
    assert found.tolist() == [i.encode() for i in ids]


def test_one_moment_in_every_notation_is_one_number(tmp_path):
    """Dates, units, zones, text: so that files of two programs agree, and offsets sort."""
    moment = datetime(2024, 5, 31, 13, tzinfo=timezone.utc)
    stamps = [pa.array([moment] * 2, pa.timestamp(u, tz=z)) for u in ("s", "ms", "us", "ns") for z in (None, "UTC")]
    found = [parquet_file(tmp_path, time=stamp).read("time") for stamp in stamps]
    for text in ("2024-05-31 13:00:00", "2024-05-31T15:00:00+02:00", "2024-05-31T13:00:00Z"):
        found.append(csv_file(tmp_path, f"label,prediction,time\n0,0.5,{text}\n1,0.5,{text}\n").read("time"))
        found.append(parquet_file(tmp_path, time=[text] * 2).read("time"))
    assert {tuple(np.asarray(f).tolist()) for f in found} == {(int(moment.timestamp() * 1e6),) * 2}
    day = parquet_file(tmp_path, time=pa.array([date(2024, 5, 31)] * 2)).read("time")
    of_text = csv_file(tmp_path, "label,prediction,time\n0,0.5,2024-05-31\n1,0.5,2024-05-31\n").read("time")
    assert np.array_equal(np.asarray(day), np.asarray(of_text))


TYPES = [
    *(
        pa.array([1, 2], kind)
        for kind in (pa.time32("s"), pa.time64("us"), pa.duration("ms"), pa.date32(), pa.uint64())
    ),
    *(pa.array(["1", "2"], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    pa.array([Decimal(1), Decimal(2)], pa.decimal128(20, 0)),
    pa.array([False, True]),
    pa.array([1.0, 2.0]),
    pa.array([b"1", b"2"]),
    pa.array([[1], [2]]),
    pa.nulls(2),
]


@pytest.mark.parametrize("column", ["time", "segment", "seed", "id"])
def test_every_type_is_read_or_told(tmp_path, column):
    for number, values in enumerate(TYPES):
        file, told = parquet_file(tmp_path, f"{number}.parquet", **{column: values}), ""
        try:
            assert len(np.unique(np.asarray(file.read(column)))) == 2, values.type
        except CompareError as error:
            told = str(error)
        assert not told or f"{number}.parquet: column {column}: " in told, values.type


def test_ids_of_a_database_export_are_integers(tmp_path):
    ids = pa.array([Decimal(7), Decimal(8)], pa.decimal128(38, 0))
    assert np.asarray(parquet_file(tmp_path, id=ids).read("id")).tolist() == [b"7", b"8"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.float64()])
@pytest.mark.parametrize("column", ["label", "prediction", "weight"])
def test_integers_that_fp64_rounds(tmp_path, column, kind):
    big = pa.array([Decimal(1), Decimal(2**53 + 1)]).cast(kind, safe=False)
    file = parquet_file(tmp_path, **{column: big})
    if column == "weight":
        assert np.asarray(file.read(column)).tolist() == [1, 2**53]
    else:
        with pytest.raises(CompareError, match=rf"column {column}: 1 of 2 values lie outside \[0, 1\]"):
            file.read(column)


def test_a_damaged_parquet_file_is_told_wherever_it_is(tmp_path):
    """Bytes overwritten at places all over it: what cannot be read names the file, the column and a remedy."""
    rows = 200
    text = [f"r{i}" for i in range(rows)]
    more = {"id": text, "segment": pa.array([t[:2] for t in text]).dictionary_encode(), "seed": np.arange(rows)}
    table = pa.table({"label": np.arange(rows) % 2, "prediction": np.arange(rows) / rows, **more})
    pq.write_table(table, tmp_path / "good.parquet", row_group_size=100)
    good, told = (tmp_path / "good.parquet").read_bytes(), []
    for place in range(4, len(good) - 8, 23):
        (tmp_path / "a.parquet").write_bytes(good[:place] + b"\xa7" * 4 + good[place + 4 :])
        try:
            PredictionFile(tmp_path / "a.parquet").read_all()
        except CompareError as error:
            told.append(str(error))
    pages = [error for error in told if "its values cannot be read" in error]
    assert len(pages) > 20
    assert all("a.parquet: " in error for error in told)
    assert all("a.parquet: column " in error and "write the file anew" in error for error in pages)


def test_a_zone_that_is_not_known(tmp_path):
    file = parquet_file(tmp_path, id=pa.array([1, 2], pa.timestamp("us", "Nowhere/Atlantis")))
    with pytest.raises(
        CompareError, match=r"column id: its values cannot be read .*Nowhere/Atlantis.* as numbers or text"
    ):
        file.read("id")


@pytest.mark.parametrize("column", ["id", "segment", "seed"])
def test_a_text_that_ends_in_nul_is_not_the_one_without(tmp_path, column):
    for ending in ("r1\0", "\0", "r\0\0", "x" * 50 + "\0"):
        for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
            values = pa.array(["r1", ending]).cast(kind)
            with pytest.raises(CompareError, match=f"column {column}: got '.*which ends in the character NUL; write"):
                parquet_file(tmp_path, **{column: values}).read_all()
        with pytest.raises(CompareError, match=f"column {column}: got '.*which ends in the character NUL; write"):
            csv_file(tmp_path, f"label,prediction,{column}\n0,0.5,r1\n1,0.5,{ending}\n").read_all()
    inside = f"label,prediction,{column}\n0,0.5,r\0001\n1,0.5,r\n"
    assert np.asarray(csv_file(tmp_path, inside).read(column)).tolist() == [b"r\x001", b"r"]


@pytest.mark.parametrize("column", ["segment", "seed"])
def test_a_name_too_long_to_be_held_for_every_row(tmp_path, monkeypatch, column):
    monkeypatch.setattr(compare_columns, "HELD", 100)
    for long, told in ((50, False), (51, True)):
        names = ["a", "x" * long]
        text = "".join(f"{i},0.5,{name}\n" for i, name in enumerate(names))
        for file in (
            csv_file(tmp_path, f"label,prediction,{column}\n{text}"),
            parquet_file(tmp_path, **{column: pa.array(names)}),
        ):
            if not told:
                assert np.asarray(file.read(column)).tolist() == [name.encode() for name in names]
                continue
            with pytest.raises(
                CompareError, match=f"column {column}: got a text of 51 bytes, expected at most 50 for 2"
            ):
                file.read(column)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("id", ["1", ""], "1 of 2 values are missing; fill them in"),
        ("time", ["1", "x"], "got 'x' in row 2, expected a number or ISO"),
        ("label", ["1", "x"], "got 'x' in row 2, expected a number"),
        ("label", ["1", "2"], "1 of 2 values lie outside"),
        ("weight", ["1", "-1"], "1 of 2 values are negative"),
        ("prediction", ["1", "nan"], "1 of 2 values are NaN or missing"),
        (
            "id",
            pa.array([1.0, 2.0]),
            "got values of type double, expected integers or text; cast them to int64 or string",
        ),
        ("seed", pa.array([b"1", b"2"]), "got values of type binary, expected integers or text; cast them to int64"),
        ("segment", pa.array([[1], [2]]), "got values of type list.*, expected integers or text; cast them to int64"),
        ("time", pa.array([[1], [2]]), "got values of type list.*, expected numbers, dates or text; cast them to time"),
        ("weight", pa.array(["1", "2"]), "got values of type string, expected numbers; cast them to double"),
        ("seed", pa.array([1, None]), "1 of 2 values are missing; fill them in"),
        ("segment", pa.array(["a", None]).dictionary_encode(), "1 of 2 values are missing"),
    ],
)
@pytest.mark.parametrize("name", ["", "Own Name"])
def test_errors_name_the_column_as_the_file_does(tmp_path, column, values, message, name):
    table = {"label": pa.array([0, 1]), "prediction": pa.array([0.5, 0.5]), column: values}
    names = [name if name and c == column else c for c in table]
    if isinstance(values, list):
        lines = [names, *zip(*(v if isinstance(v, list) else map(str, v.to_pylist()) for v in table.values()))]
        path = tmp_path / "a.csv"
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    else:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table(list(table.values()), names), path)
    shown = rf"{name} \({column}\)" if name else column
    with pytest.raises(CompareError, match=rf"{path.name}: column {shown}: {message}"):
        PredictionFile(path, {column: name} if name else {}).read_all()


KEPT = """
import sys
from pathlib import Path
from mxfp8_recipe.ab.compare_files import PredictionFile
from mxfp8_recipe.ab.compare_rows import align

def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

def aligned(rows):
    return align(PredictionFile(Path(f"a{rows}.parquet")), [PredictionFile(Path(f"b{rows}.parquet"))])

aligned(250_000)  # loads what is loaded once
before = resident()
rows = aligned(1_000_000)
print((resident() - before) / len(rows.rows))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_columns_that_are_dropped_are_given_back(tmp_path):
    """Label and two predictions are 24 bytes a row. Measured: 50 to 57, as threads keep memory; 77 by whole columns."""
    rng = np.random.default_rng(0)
    for rows in (250_000, 1_000_000):
        own = {"id": np.arange(rows), "time": np.arange(rows), "seed": np.zeros(rows, np.int64)}
        first = pa.table({"label": np.zeros(rows), "prediction": rng.random(rows), **own})
        pq.write_table(first, tmp_path / f"a{rows}.parquet")
        pq.write_table(first.take(rng.permutation(rows)), tmp_path / f"b{rows}.parquet")
    root = Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, "-c", KEPT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(found.stdout) < 64
