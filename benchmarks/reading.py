"""How fast a rank reads its shard, compared with Petastorm, a hand-written TFRecord pipeline, and pyarrow alone."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import US, Effort, Goal, Measured, Row, Turns, cell, say, script

from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import Options
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.views import Quiet

PYARROW = "pyarrow's iter_batches, stacked"
PETASTORM, BY_HAND = "Petastorm", "hand-written tf.data"
FASTER, NEAR_PYARROW = Goal(5, at_least=True, ratio=True), Goal(0.6, at_least=True, ratio=True)
NO_SLOWER, SCALES = Goal(1, at_least=True, ratio=True), Goal(1.7, at_least=True, ratio=True)
NEAR_FILES = Goal(0.95, at_least=True, ratio=True)
SOON, FLAT = Goal(0.5), Goal(20)
FILES, ROW_GROUP = 8, 32_768


def parquet(effort: Effort) -> list[Row]:
    """Read 1,000,000 rows of ten numbers, and 20,000 images of 32 × 32 pixels from scikit-learn's photos."""
    rows, images = (100_000, 4_000) if effort.quick else (1_000_000, 20_000)
    found = []
    with data_sets(rows, images) as folder:
        for what, name in (("rows", f"{rows:,} rows × 10 float32"), ("images", f"{images:,} images of 3 kB")):
            read = functools.partial(_read, what=what, folder=folder / what)
            turns = Turns(
                effort.runs,
                {
                    US: lambda read=read: {  # type: ignore[misc]
                        f"{form}-{key}": value
                        for form in ("as_tf", "as_torch", "as_numpy")
                        for key, value in read(form).items()
                    },
                    PYARROW: lambda read=read: _for_all(read("pyarrow")),  # type: ignore[misc]
                    PETASTORM: lambda read=read: {  # type: ignore[misc]
                        "as_tf-rate": read("petastorm_tf")["rate"],
                        "as_torch-rate": read("petastorm_torch")["rate"],
                    },
                },
            )
            for form in ("as_tf", "as_torch"):
                told = f"{name}: .{form}()"
                found += [
                    turns.row(f"{told}, second epoch", "rows/s", f"{form}-rate", PETASTORM, goal=FASTER),
                    turns.row("… compared with pyarrow alone", "rows/s", f"{form}-rate", PYARROW, goal=NEAR_PYARROW),
                    turns.row(f"{told}, first batch", "s", f"{form}-first", goal=SOON),
                    turns.row(f"{told}, memory from epoch 2 to 10", "MB", f"{form}-grown", goal=FLAT),
                ]
            told = f"{name}: .as_numpy(), second epoch"
            found.append(turns.row(told, "rows/s", "as_numpy-rate", PYARROW, goal=NEAR_PYARROW))
    return found


def delta(effort: Effort) -> list[Row]:
    """Read the current files of a Delta table, with shards() and with pyarrow alone, in this process."""
    import deltalake
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sparkring import shards

    rows = 100_000 if effort.quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({f"c{number}": np.random.default_rng(number).random(rows, "f4") for number in range(10)})
        properties = deltalake.WriterProperties(max_row_group_size=ROW_GROUP)
        for begin in range(0, rows, rows // FILES):
            part = table.slice(begin, rows // FILES)
            deltalake.write_deltalake(folder, part, mode="append", writer_properties=properties)
        files = sorted(deltalake.DeltaTable(folder).file_uris())
        data = shards(folder, 1024, shuffle=False, remainder="join", rank=0, size=1)
        data.spec  # noqa: B018 - found before a launch

        def alone() -> Iterator[dict[str, Any]]:
            for file in files:
                for batch in pq.ParquetFile(file).iter_batches(1024):
                    yield {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}

        def rate(batches: Iterator[dict[str, Any]]) -> Measured:
            begun = time.perf_counter()
            assert sum(len(batch["c0"]) for batch in batches) == rows
            return {"rate": rows / (time.perf_counter() - begun)}

        turns = Turns(2 * effort.runs, {US: lambda: rate(data.as_numpy()), PYARROW: lambda: rate(alone())})
        what = f"a Delta table of {rows:,} rows × 10 float32: .as_numpy()"
        return [turns.row(what, "rows/s", "rate", PYARROW, goal=NEAR_FILES)]


def together(effort: Effort) -> list[Row]:
    """Compare two ranks that read at the same time with one of them that reads alone."""
    alone = "one of the two, alone"
    with data_sets(100_000 if effort.quick else 1_000_000, 0) as folder:
        measured: list[Measured] = []

        def both() -> Measured:
            measured.append(_together(folder / "rows"))
            return {"rate": measured[-1]["together"]}

        turns = Turns(effort.runs, {US: both, alone: lambda: {"rate": measured[-1]["alone"]}})
    return [turns.row("2 local ranks read at once, .as_numpy()", "rows/s", "rate", alone, goal=SCALES)]


def tfrecord(effort: Effort) -> list[Row]:
    """Read the same rows from TFRecord files."""
    rows = 100_000 if effort.quick else 1_000_000
    with data_sets(rows, 0, records=True) as folder:
        read = functools.partial(_read, what="rows", folder=folder / "rows")
        turns = Turns(
            effort.runs,
            {
                US: lambda: {"rate": read("tfrecords")["rate"], "foreign": read("tfrecords_by_hand")["rate"]},
                BY_HAND: lambda: dict.fromkeys(("rate", "foreign"), read("tfrecord_by_hand")["rate"]),
            },
        )
    told = f"{rows:,} rows × 10 float32: TFRecord, second epoch"
    return [
        turns.row(told, "rows/s", "rate", BY_HAND, goal=NO_SLOWER),
        turns.row("… an Example per row, as others write them", "rows/s", "foreign", BY_HAND, goal=NO_SLOWER),
    ]


def _for_all(figures: Measured) -> Measured:
    return {f"{form}-rate": figures["rate"] for form in ("as_tf", "as_torch", "as_numpy")}


def _read(contestant: str, *, what: str, folder: Path) -> Measured:
    """Run a contestant in a process of its own, so that it does not profit from what another has imported or made."""
    command = [sys.executable, str(script("reading")), contestant, what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{contestant}: {done.stderr[-2000:]}")
    figures: Measured = json.loads(done.stdout.splitlines()[-1])
    return figures


def _together(folder: Path) -> Measured:
    source = cell("reading_together")
    names = {"folder": str(folder)}
    result = run_spec(RunSpec(Cell(source, names), Options(np=-2), "torch", "benchmark", source), Quiet())
    (alone, first), (_, second) = result.values
    return {"alone": alone, "together": first + second}


@contextmanager
def data_sets(rows: int, images: int, *, records: bool = False) -> Iterator[Path]:
    """Write the data sets to a temporary folder."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    say("writing data …")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix=".reading-", dir=os.environ["SPARKRING_HOME"]) as made:
        folder = Path(made)
        (folder / "rows").mkdir()
        for number in range(FILES):
            table = pa.table({f"c{column}": rng.random(rows // FILES, np.float32) for column in range(10)})
            pq.write_table(table, folder / "rows" / f"part-{number}.parquet", row_group_size=ROW_GROUP)
            if records:
                _by_hand(
                    folder / "rows-by-hand" / f"part-{number}.tfrecord", np.stack(list(table.to_pydict().values()), 1)
                )
        if records:
            _batched(folder / "rows", folder / "rows-batched")
        if images:
            (folder / "images").mkdir()
            for number, part in enumerate(np.array_split(np.arange(images), FILES)):
                table = pa.table({"image": [_patch(index) for index in part]})
                path = folder / "images" / f"part-{number}.parquet"
                pq.write_table(table, path, row_group_size=512, compression="none")
        yield folder


@functools.cache
def _photos() -> Any:
    from sklearn.datasets import load_sample_images

    return load_sample_images().images


def _patch(index: int) -> bytes:
    """Return a piece of 32 × 32 pixels of one of the photos; the piece depends on the index."""
    photo = _photos()[index % len(_photos())]
    y, x = (index * 37) % (photo.shape[0] - 32), (index * 101) % (photo.shape[1] - 32)
    patch: bytes = photo[y : y + 32, x : x + 32].tobytes()
    return patch


def _by_hand(path: Path, values: Any) -> None:
    import tensorflow as tf

    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in values:
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=row))
            writer.write(tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString())


def _batched(source: Path, target: Path) -> None:
    from sparkring import shards
    from sparkring.data.tfrecord import write_tfrecord

    data = shards(source, 1024, columns={"x": [f"c{column}" for column in range(10)]}, shuffle=False, remainder="join")
    write_tfrecord(data.as_numpy(), target, batch_size=1024, files=FILES)
