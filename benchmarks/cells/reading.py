"""Read a data set once to warm up and then again: `reading.py CONTESTANT rows|images FOLDER`. Print JSON.

rate: rows/s of the second epoch, in which every batch becomes an array or a tensor. first: seconds to the first batch
of the first epoch. grown: MB by which the process grows from epochs 3–5 to epochs 8–10.
"""

import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

BATCH = 1024
COLUMNS = [f"c{column}" for column in range(10)]
COLUMN = {"rows": "x", "images": "image"}
SHAPE = (32, 32, 3)
EPOCHS = 10
Epoch = Callable[[], Iterable[Any]]


def sparkring_data(what: str, folder: str) -> Any:
    from sparkring import shards

    if what == "rows":
        return shards(folder, BATCH, columns={"x": COLUMNS}, remainder="join")
    return shards(folder, BATCH, raw={"image": ("uint8", SHAPE)}, remainder="join")


def as_numpy(what: str, folder: str) -> Epoch:
    data = sparkring_data(what, folder)
    return lambda: data.as_numpy(COLUMN[what])


def as_tf(what: str, folder: str) -> Epoch:
    ready_tensorflow()
    dataset = sparkring_data(what, folder).as_tf(COLUMN[what])
    return lambda: dataset


def as_torch(what: str, folder: str) -> Epoch:
    loader = sparkring_data(what, folder).as_torch(COLUMN[what])
    return lambda: loader


def pyarrow(what: str, folder: str) -> Epoch:
    """Return a loop as written by hand: batches in the order of the files, each stacked to one array."""
    import pyarrow.parquet as pq

    def epoch() -> Iterable[Any]:
        for path in sorted(Path(folder).glob("*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(BATCH):
                if what == "rows":
                    yield np.stack([column.to_numpy() for column in batch.columns], 1)
                else:
                    yield stacked(batch.column(0).to_pylist())

    return epoch


def petastorm_tf(what: str, folder: str) -> Epoch:
    ready_tensorflow()
    import tensorflow as tf
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    def epoch() -> Iterable[Any]:
        with make_batch_reader(f"file://{folder}", num_epochs=1) as reader:
            dataset = make_petastorm_dataset(reader).unbatch().batch(BATCH)
            if what == "rows":
                yield from dataset.map(lambda row: tf.stack([getattr(row, name) for name in COLUMNS], 1))
            else:
                yield from dataset.map(lambda row: decoded(row.image))

    return epoch


def petastorm_torch(what: str, folder: str) -> Epoch:
    """Read with the DataLoader that Petastorm's Spark converter returns."""
    import torch
    from petastorm import TransformSpec, make_batch_reader
    from petastorm.pytorch import DataLoader

    def arrays(frame: Any) -> Any:
        frame["image"] = frame["image"].map(lambda image: np.frombuffer(image, np.uint8).reshape(SHAPE))
        return frame

    spec = None
    if what == "images":
        spec = TransformSpec(arrays, edit_fields=[("image", np.uint8, SHAPE, False)])

    def epoch() -> Iterable[Any]:
        with DataLoader(make_batch_reader(f"file://{folder}", num_epochs=1, transform_spec=spec), BATCH) as loader:
            for batch in loader:
                yield torch.stack([batch[name] for name in COLUMNS], 1) if what == "rows" else batch["image"]

    return epoch


def tfrecords(what: str, folder: str) -> Epoch:
    ready_tensorflow()
    from sparkring.data.tfrecord import tfrecords

    dataset = tfrecords(f"{folder}-batched", remainder="pad").as_tf("x")
    return lambda: dataset


def tfrecords_by_hand(what: str, folder: str) -> Epoch:
    """Read the files of the hand-written pipeline."""
    ready_tensorflow()
    from sparkring.data.tfrecord import tfrecords

    dataset = tfrecords(f"{folder}-by-hand", batch_size=BATCH, remainder="pad").as_tf("x")
    return lambda: dataset


def tfrecord_by_hand(what: str, folder: str) -> Epoch:
    """Return the usual pipeline over one Example per row: interleave, batch, parse the batch.

    Files are read in turn. With num_parallel_calls, which is often advised, each record would change threads, and on
    two cores reading would take twenty times as long.
    """
    ready_tensorflow()
    import tensorflow as tf

    names = sorted(str(path) for path in Path(f"{folder}-by-hand").glob("*.tfrecord"))
    features = {"x": tf.io.FixedLenFeature([len(COLUMNS)], tf.float32)}
    dataset = (
        tf.data.Dataset.from_tensor_slices(names)
        .shuffle(len(names))
        .interleave(tf.data.TFRecordDataset, cycle_length=4)
        .batch(BATCH)
        .map(lambda examples: tf.io.parse_example(examples, features)["x"], num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda: dataset


def ready_tensorflow() -> None:
    import tensorflow as tf

    list(tf.data.Dataset.range(2).map(lambda x: x + 1))


def stacked(images: Iterable[bytes]) -> Any:
    return np.stack([np.frombuffer(image, np.uint8).reshape(SHAPE) for image in images])


def decoded(images: Any) -> Any:
    import tensorflow as tf

    return tf.reshape(tf.io.decode_raw(images, tf.uint8), (-1, *SHAPE))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    contestant, what, folder = sys.argv[1:]
    epoch = globals()[contestant](what, folder)
    begun, first, rows = time.perf_counter(), None, 0
    for batch in epoch():
        first = first or time.perf_counter() - begun
        rows += len(batch)
    assert first is not None
    begun, seen = time.perf_counter(), 0
    for batch in epoch():
        seen += len(batch)
    took = time.perf_counter() - begun
    assert seen == rows > 0, (seen, rows)
    figures = {"rate": rows / took, "first": first, "rows": rows}
    if contestant.startswith("as_"):
        used = [psutil.Process().memory_info().rss]
        for _ in range(2, EPOCHS):
            for _ in epoch():
                pass
            used.append(psutil.Process().memory_info().rss)
        # Freed memory goes back to the system sooner or later, so the figure after a single epoch tells little.
        figures["grown"] = (statistics.median(used[-3:]) - statistics.median(used[:3])) / 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
