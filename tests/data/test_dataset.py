"""Data sets as their footers describe them, and one-sentence errors about invalid data sets."""

import ast
import datetime
import operator
import os
from decimal import Decimal

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import LocalFileSystem

from sparkring.data.dataset import open_dataset
from sparkring.data.plan import RowRange
from sparkring.data.reader import windows
from sparkring.data.where import compile_where
from sparkring.errors import DataError, PathError


def write(path, table, **options):
    """Write a Parquet file, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


@pytest.fixture
def flights(tmp_path):
    """Two files of 3 and 1 row groups; x counts the rows of both."""
    folder = tmp_path / "flights"
    write(folder / "part-0.parquet", pa.table({"x": range(25), "city": ["Ulm"] * 20 + ["Bonn"] * 5}), row_group_size=10)
    write(folder / "part-1.parquet", pa.table({"x": range(25, 30), "city": ["Bonn"] * 5}))
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").write_bytes(b"x")
    return folder


def test_the_footers_tell_files_row_groups_rows_and_columns(flights):
    """Counts and columns come from the footers. Files whose names begin with _ or . are not data."""
    found = open_dataset(flights)
    assert [os.path.basename(file.path) for file in found.files] == ["part-0.parquet", "part-1.parquet"]
    assert found.counts() == [[10, 10, 5], [5]]
    assert (found.rows, found.row_groups, found.columns) == (30, 4, ("x", "city"))
    assert 0 < found.size_bytes < sum(file.size_bytes for file in found.files)
    only = open_dataset(flights, ["x"])
    assert only.columns == ("x",)
    assert 0 < only.size_bytes < found.size_bytes


def test_the_size_in_memory_is_not_that_of_encoded_values(tmp_path):
    """Equal values are stored once, but each of them needs memory."""
    columns = {"i": [7] * 50_000, "f": pa.array([7.0] * 50_000, pa.float32()), "l": [[7, 7]] * 50_000}
    columns["b"] = pa.array([b"seven"] * 50_000, pa.binary(5))
    (group,) = open_dataset(write(tmp_path / "a.parquet", pa.table(columns))).files[0].row_groups
    assert group.size_bytes < 5_000
    assert group.stored_bytes == 50_000 * (8 + 4 + 16 + 5)
    (group,) = open_dataset(write(tmp_path / "d.parquet", pa.table({"x.y": [7] * 50_000}))).files[0].row_groups
    assert group.stored_bytes == 50_000 * 8
    (group,) = open_dataset(write(tmp_path / "s.parquet", pa.table({"s": ["a", "b"] * 5_000}))).files[0].row_groups
    assert 0 < group.stored_bytes < 10_000


def test_the_version_is_a_digest_of_the_footers_and_of_what_is_read(flights):
    """A copy has the same version. Another choice of columns or rows, or an added row, changes the version."""
    found = open_dataset(flights)
    assert open_dataset(flights).version == found.version
    copy = flights.with_name("copy")
    for name in ("part-0.parquet", "part-1.parquet"):
        write(copy / name, pq.read_table(flights / name), row_group_size=10)
    assert open_dataset(copy).version == found.version
    versions = {open_dataset(flights, ["x"]).version, open_dataset(flights, where="x > 3").version, found.version}
    write(copy / "part-1.parquet", pa.table({"x": range(6), "city": ["Bonn"] * 6}))
    assert len({*versions, open_dataset(copy).version}) == 4


def test_a_file_a_glob_a_list_and_urls(flights, monkeypatch):
    """All forms of a path lead to the same files, including DBFS paths."""
    whole = open_dataset(flights).counts()
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(flights.parent))
    for path in (
        f"{flights}/*.parquet",
        f"{flights.parent}/fl*",
        f"file:{flights}",
        f"file://{flights}",
        "dbfs:/flights",
        "dbfs:///flights",
        "/dbfs/flights",
        "file:/dbfs/flights",
        [flights / "part-0.parquet", flights / "part-1.parquet"],
    ):
        assert open_dataset(path).counts() == whole, path
    assert open_dataset(flights / "part-1.parquet").counts() == [[5]]
    flights.rename(flights.with_name("flights [2] *"))
    assert open_dataset(flights.with_name("flights [2] *")).counts() == whole, "a name that looks like a pattern"


def test_a_file_system_that_is_not_this_machines(flights):
    """Data on any file system that fsspec knows can be read."""
    memory = fsspec.filesystem("memory")
    try:
        for name in ("part-0.parquet", "part-1.parquet"):
            memory.pipe(f"/flights/{name}", (flights / name).read_bytes())
        found = open_dataset("memory://flights", where="x >= 20")
        assert not found.local
        assert found.counts() == [[0, 0, 5], [5]]
    finally:
        memory.rm("/flights", recursive=True)


def test_partitions_stand_in_the_path(tmp_path):
    """Hive's key=value folders become columns: numbers if all values are numbers, otherwise text, with nulls."""
    for year, city in ((2025, "Ulm"), (2026, "Bad%20Tölz"), (2026, "__HIVE_DEFAULT_PARTITION__")):
        write(tmp_path / f"year={year}" / f"city={city}" / "part.parquet", pa.table({"x": [year]}))
    found = open_dataset(tmp_path)
    assert found.schema == pa.schema([("x", pa.int64()), ("year", pa.int64()), ("city", pa.string())])
    assert {file.partitions for file in found.files} == {
        (("year", 2025), ("city", "Ulm")),
        (("year", 2026), ("city", "Bad Tölz")),
        (("year", 2026), ("city", None)),
    }
    assert open_dataset(tmp_path, where="year == 2026").rows == 2
    assert open_dataset(tmp_path, ["x"], "year == 2026 and city is None").rows == 1
    assert open_dataset(tmp_path, ["year"], "city == 'Ulm'").columns == ("year",)


def test_partitions_of_columns_with_odd_names(tmp_path):
    """As in Spark, folders such as _day=1 are partitions, and names are decoded like values."""
    write(tmp_path / "_day=1" / "a%3Db=x%3Dy" / "part.parquet", pa.table({"x": [1]}))
    write(tmp_path / "_day=2" / "a%3Db=z" / "part.parquet", pa.table({"x": [2]}))
    write(tmp_path / "_temporary" / "0" / "part.parquet", pa.table({"x": [3]}))
    found = open_dataset(tmp_path)
    assert [file.partitions for file in found.files] == [(("_day", 1), ("a=b", "x=y")), (("_day", 2), ("a=b", "z"))]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("x < 10", 10),
        ("x >= 25 and city == 'Bonn'", 5),
        ("x < 3 or x > 27", 5),
        ("3 < x <= 5", 2),
        ("not x < 28", 2),
        ("city in ('Bonn', 'Köln')", 10),
        ("city not in ['Bonn']", 20),
        ("city is not None", 30),
        ("city != None", 30),
        ("x = 3 OR city = 'Bonn' AND x <> 25", 10),
        ("x BETWEEN 3 AND 5", 3),
        ("NOT x BETWEEN 3 AND 5 AND x not between -1 and 2", 24),
        ("city IN ('Bonn') and city is not NULL", 10),
        ("NOT city IN ('Bonn', 'it''s')", 20),
        ('`x` < 3 AND\n "x" >= 1', 2),
        ("x > 2.5", 27),
        ([("x", ">", 20), ("city", "==", "Ulm")], 0),
        ([("x", ">", 18), ("city", "==", "Ulm")], 1),
        (pc.field("x") > 20, 9),
        ("  ", 30),
    ],
)
def test_filters_leave_rows_out_and_are_counted(flights, where, rows):
    """The counts are exact, even if the footers' statistics do not suffice."""
    if not rows:
        with pytest.raises(DataError, match=r"no row passes .*filter"):
            open_dataset(flights, where=where)
        return
    assert open_dataset(flights, where=where).rows == rows


@pytest.mark.parametrize("where", ["f < 50", "f >= 0", "not f < 0", "f != 3 and x >= 0"])
def test_nan_passes_a_filter_in_counting_as_in_reading(tmp_path, where):
    """The footers' statistics leave out NaN. Rows with NaN pass `not f < 0` and `f != 3` only."""
    values = pa.array([float("nan")] * 20 + [float(number) for number in range(30)])
    write(tmp_path / "k=1" / "a.parquet", pa.table({"x": range(50), "f": values}), row_group_size=25)
    found = open_dataset(tmp_path, ["x", "k"], where)
    ranges = [RowRange(0, group, 0, rows) for group, rows in enumerate(found.counts()[0])]
    read = [x for each in windows(found, ranges, 25) for batch in each.batches for x in batch["x"].to_pylist()]
    assert len(read) == found.rows == {"f < 50": 30, "f >= 0": 30, "not f < 0": 50, "f != 3 and x >= 0": 49}[where]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("i8 in (1, 300)", [1]),
        ("i8 in (1, 2.5)", [1]),
        ("i8 in (2.0, null)", [2, 4]),
        ("i8 not in (1, 300)", [2, 3, 4]),
        ("i8 not in ()", [1, 2, 3, 4]),
        ("i8 < 300 and i8 > 1.5", [2, 3]),
        ("u == 18446744073709551615", [3]),
        ("u in (1, 18446744073709551615)", [1, 3]),
        ("u > 1", [2, 3]),
        ("dec in (1.5, 2)", [1, 2]),
        ("dec in (1.505, 1000)", []),
        ("dec > 1.75", [2, 3]),
        ("dec < 1000", [1, 2, 3]),
        ("dec > 1.505", [2, 3]),
        ("dec < 1e300", [1, 2, 3]),
        ("dec == 3", [3]),
        ("f in (0.5, 1)", [1, 2]),
        ("u > -1", [1, 2, 3]),
        ("u == -1", []),
        ("not u != -0.5", []),
        ("big > 2.5", [1, 3]),
        ("2.5 >= big", [2]),
        ("big <= 1e300", [1, 2, 3]),
        ("big < -99999999999999999999", []),
        ("-99999999999999999999 < big", [1, 2, 3]),
        ("f < 1152921504606846977", [1, 2, 3]),
        ("word in ('a', 'b')", [1, 2]),
        ("word not in ('a',)", [2, 3, 4]),
        ("word in ('c', null)", [3, 4]),
    ],
)
def test_numbers_in_a_filter_keep_their_values(tmp_path, where, rows):
    """A number is compared with a column's values as it is written, whether the column's type can hold it or not."""
    columns = {
        "n": pa.array([1, 2, 3, 4]),
        "i8": pa.array([1, 2, 3, None], pa.int8()),
        "u": pa.array([1, 2, 2**64 - 1, None], pa.uint64()),
        "big": pa.array([2**60 + 1, -(2**62), 3, None]),
        "dec": pa.array([Decimal("1.50"), Decimal("2.00"), Decimal("3.00"), None], pa.decimal128(3, 2)),
        "f": pa.array([0.5, 1, 2, None], pa.float32()),
        "word": pa.array(["a", "b", "c", None]).dictionary_encode(),
    }
    write(tmp_path / "a.parquet", pa.table(columns))
    found = open_dataset(tmp_path, ["n"], f"n == 0 or {where}" if rows else f"n == 1 or {where}")
    (window,) = windows(found, [RowRange(0, 0, 0, found.rows)], 10)
    assert [n for batch in window.batches for n in batch["n"].to_pylist()] == (rows or [1])


@pytest.mark.parametrize("number", ["2.5", "-2.5", "2.0", "127.0", "128.5", "16777216.5", "9007199254740993", "1e300"])
@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64()], ids=str)
def test_integers_are_compared_exactly(tmp_path, kind, number):
    """Integers of any size can be compared with any number, on either side of the comparison."""
    values = [
        None,
        *([-128, -3, -2, 0, 2, 3, 127] if kind == pa.int8() else [0, 2, 3, 2**24, 2**53, 2**53 + 1, 2**64 - 1]),
    ]
    write(tmp_path / "a.parquet", pa.table({"n": range(8), "i": pa.array(values, kind)}))
    value = ast.literal_eval(number)
    compared = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
    for sign, compare in {**compared, "!=": operator.ne}.items():
        for where, passes in (
            (f"i {sign} {number}", lambda each, compare=compare: compare(each, value)),
            (f"{number} {sign} i", lambda each, compare=compare: compare(value, each)),
            (f"not i {sign} {number}", lambda each, compare=compare: not compare(each, value)),
        ):
            found = open_dataset(tmp_path, ["n"], f"n == 0 or {where}")
            (window,) = windows(found, [RowRange(0, 0, 0, found.rows)], 10)
            wanted = [n for n, each in enumerate(values) if not n or passes(each)]
            assert [n for batch in window.batches for n in batch["n"].to_pylist()] == wanted, where


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("`a b` > 1", [2, 3]),
        ("a.b = 1 OR `a.b` = 3", [1, 3]),
        ("`back``tick` = 'x  y'", [1]),
        ("word NOT IN ('a')", [2]),
        ("word not in ('a')", [2, 3]),
        ("word <> 'a' OR word IS NULL", [2, 3]),
        ("day >= DATE '2026-01-02' AND not yes", [2]),
        ("yes", [1, 3]),
        ("NOT `yes`", [2]),
        ("`between` = 3 OR between = 1", [1, 3]),
        ("word LIKE 'a%'", [1]),
        ("word NOT LIKE '_b' AND NOT word LIKE 'a'", [2]),
        ("`back``tick` LIKE 'x_y' OR a.b NOT BETWEEN 1 AND 2", [2, 3]),
        ("path LIKE '10\\%%' or path like 'it''s'", [1, 2]),
    ],
)
def test_filters_in_sql(tmp_path, where, rows):
    """Names may be in backticks, also with dots and spaces. Nulls are as in Spark if the filter has SQL's operators."""
    columns = {
        "n": [1, 2, 3],
        "a b": [1, 2, 3],
        "a.b": [1, 2, 3],
        "back`tick": ["x  y", "x y", ""],
        "word": ["a", "b", None],
        "day": [datetime.date(2026, 1, day) for day in (1, 2, 3)],
        "yes": [True, False, True],
        "between": [1, 2, 3],
        "path": ["10%", "it's", "100"],
    }
    write(tmp_path / "a.parquet", pa.table(columns))
    found = open_dataset(tmp_path, ["n"], where)
    (window,) = windows(found, [RowRange(0, 0, 0, found.rows)], 10)
    assert [n for batch in window.batches for n in batch["n"].to_pylist()] == rows


def test_like_leaves_row_groups_out(tmp_path):
    """The beginning of the pattern is compared with the footers' statistics."""
    cities = pa.table({"city": [f"{letter}{number}" for letter in "abcd" for number in range(10)]})
    write(tmp_path / "a.parquet", cities, row_group_size=10)
    condition, _ = compile_where("city LIKE 'b_'", cities.schema)
    fragment = ds.ParquetFileFormat().make_fragment(str(tmp_path / "a.parquet"), LocalFileSystem())
    (group,) = fragment.split_by_row_group(filter=condition, schema=cities.schema)
    assert (group.row_groups[0].id, open_dataset(tmp_path, where="city LIKE 'b_'").counts()) == (1, [[0, 10, 0, 0]])


def test_dates_in_a_filter_are_strings(tmp_path):
    """Strings in a filter are converted to the column's type."""
    days = [datetime.datetime(2026, 1, day) for day in range(1, 11)]
    write(
        tmp_path / "a.parquet", pa.table({"t": days, "day": pa.array(days).cast(pa.date32()), "ok": [True, False] * 5})
    )
    assert open_dataset(tmp_path, where="t >= '2026-01-08'").rows == 3
    assert open_dataset(tmp_path, where="day < '2026-01-03' and ok").rows == 1
    assert open_dataset(tmp_path, where="not ok").rows == 5
    assert open_dataset(tmp_path, where="ok == false").rows == 5
    assert open_dataset(tmp_path, where="ok == TRUE and day is not null").rows == 5


@pytest.mark.parametrize(
    ("where", "character"),
    [
        ("x = 1 AND AND city = 'Ulm'", 11),
        ("x = 1 AND", 10),
        ("x >= 1 AND cit = 'Ulm'", 12),
        ("`city` <> 'Ü' AND x = 'one'", 23),
        ("x BETWEEN 1 AND 2 AND city > 3", 30),
        ("city LIKE 'U%' AND x LIKE 'U%'", 20),
        ("x = 1 OR x = NULL", 14),
        ("x = 1 OR city BETWEEN 'a'", 15),
    ],
)
def test_the_place_of_a_mistake_in_a_filter(flights, where, character):
    with pytest.raises(DataError) as caught:
        open_dataset(flights, where=where)
    assert (f" at character {character}, `" if character <= len(where) else " at its end") in str(caught.value)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("x >= 3 and", "or as a list of conditions: where="),
        ("city RLIKE 'B%'", "or as a list of conditions"),
        ("city LIKE 3", "LIKE is for a column and a text"),
        ("x LIKE '3%'", "LIKE is for text, but `x` is int64"),
        ("x = NULL", "write `x IS NULL`"),
        ("x NOT IN (1, NULL)", "write `x IS NULL`"),
        ("x BETWEEN 3", "BETWEEN is for a column and two values"),
        ("`speed limit` > 3", "the column `speed limit` .*, which does not exist"),
        ("speed > 3", "the column `speed` .* `x`, `city`"),
        ("cit == 'Ulm'", "did you mean `city`?"),
        ("x > 'abc'", "`x` is int64, but 'abc' is not"),
        ("x in (1, 'abc')", "`x` is int64, but 'abc' is not"),
        ("city > 3", "`city` is string, but 3 is not"),
        ("x", "`x` is not a comparison"),
        ("x > y()", "`y\\(\\)` is neither a column nor a number"),
        ("3 > 2", "is not compared with a column"),
        ("__import__('os').system('x')", "is not a comparison"),
        ("x in city", "`in` takes a column and a list"),
        ("x is 3", "`is` is for null only"),
        ([("x", "~", 3)], "Write it as a string"),
        (pc.field("speed") > 3, "speed"),
    ],
)
def test_a_filter_that_cannot_be_read_is_told(flights, where, told):
    """The error is one line, and suggests a similar name if there is one."""
    with pytest.raises(DataError, match=told) as caught:
        open_dataset(flights, where=where)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there(flights, tmp_path, monkeypatch):
    """The error suggests a similar name if there is one."""
    with pytest.raises(DataError, match=r"did you mean .*/flights\?"):
        open_dataset(tmp_path / "flihgts")
    with pytest.raises(DataError, match=r"neither .*folder .*nowhere"):
        open_dataset(tmp_path / "nowhere" / "deep")
    with pytest.raises(DataError, match="no file matches"):
        open_dataset(f"{flights}/*.orc")
    with pytest.raises(PathError, match="Write dbfs:/x/y"):
        open_dataset("dbfs://x/y")
    monkeypatch.setenv("SPARKRING_DBFS_ROOT", str(tmp_path / "root"))
    with pytest.raises(DataError, match=r"dbfs:/x\b.* exist"):
        open_dataset("dbfs:/x")
    with pytest.raises(DataError, match=r"list .*paths .*empty"):
        open_dataset([])


def test_a_hudi_table_is_not_taken_for_its_files(flights):
    """It is refused, because its files still contain rows that were removed from the table."""
    (flights / ".hoodie").mkdir()
    (flights / ".hoodie" / "hoodie.properties").write_text("")
    for path in (flights, flights.parent):
        with pytest.raises(DataError, match=r"the Hudi table .* pass the DataFrame"):
            open_dataset(path)


def test_an_empty_data_set(tmp_path):
    """A data set without files or without rows is an error. A single file without rows is not."""
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no Parquet file"):
        open_dataset(tmp_path / "none")
    empty = pa.table({"x": pa.array([], pa.int64())})
    write(tmp_path / "some" / "a.parquet", empty)
    with pytest.raises(DataError, match="no rows"):
        open_dataset(tmp_path / "some")
    write(tmp_path / "some" / "b.parquet", pa.table({"x": [1]}))
    assert open_dataset(tmp_path / "some").rows == 1


def test_files_that_are_broken_are_named(flights):
    """The error names a file that is cut off, empty, or not Parquet."""
    good = (flights / "part-1.parquet").read_bytes()
    for broken in (good[:-20], b"", b"x", b"a,b\n1,2\n" * 100, good[:-8] + b"\xff\xff\xff\x7fPAR1"):
        (flights / "part-1.parquet").write_bytes(broken)
        with pytest.raises(DataError, match=r"part-1\.parquet cannot .*read: ") as caught:
            open_dataset(flights)
        assert "\n" not in str(caught.value)


def test_files_whose_columns_differ_are_named(flights):
    """The error names the files and the column. Columns that are not read may differ."""
    write(flights / "part-2.parquet", pa.table({"x": ["1"], "city": ["Ulm"]}))
    with pytest.raises(DataError, match=r"`x` .*int64 .*part-0\.parquet .*string .*part-2\.parquet"):
        open_dataset(flights)
    with pytest.raises(DataError, match="`x` is int64"):
        open_dataset(flights, ["city"], "x > 3")
    assert open_dataset(flights, ["city"]).rows == 31
    write(flights / "part-2.parquet", pa.table({"x": [1]}))
    with pytest.raises(DataError, match=r"part-0\.parquet .*`city`.*part-2\.parquet"):
        open_dataset(flights)


def test_a_column_that_is_not_there(flights):
    """The error suggests a similar name. A selection without columns is an error, too."""
    with pytest.raises(DataError, match=r"`citty`.*`city`"):
        open_dataset(flights, ["citty"])
    with pytest.raises(DataError, match="selects no column"):
        open_dataset(flights, [])


def test_columns_that_cannot_be_told_apart(tmp_path):
    """Several columns of one name are an error if they are read, and so is a file without columns."""
    path = write(tmp_path / "a.parquet", pa.table([[1], [2], [3]], names=["x", "x", "y"]))
    with pytest.raises(DataError, match="several columns called `x`"):
        open_dataset(path)
    assert open_dataset(path, ["y"]).rows == 1
    with pytest.raises(DataError, match=r"b\.parquet\b.*no columns"):
        open_dataset(write(tmp_path / "b.parquet", pa.table({"__index_level_0__": [1]})))


def test_a_folder_that_may_not_be_read(tmp_path):
    """The error gives the system's message. The test uses its own file system, because root can read everything."""

    class Refusing(fsspec.implementations.local.LocalFileSystem):
        protocol = "refusing"

        def isfile(self, path):
            raise PermissionError(13, "Permission denied")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(DataError, match="Permission denied"):
        open_dataset("refusing://x")


def test_credentials_that_are_missing(monkeypatch):
    """Each backend of fsspec has its own errors. The message says what to set for this kind of storage."""

    class Unknown(fsspec.implementations.memory.MemoryFileSystem):
        protocol = ("unknown", "s3")

        def exists(self, path, **given):
            raise RuntimeError("who are you?")

    fsspec.register_implementation("unknown", Unknown, clobber=True)
    with pytest.raises(DataError, match=r"who are you\?.* AWS_ACCESS_KEY_ID"):
        open_dataset("unknown://x")
