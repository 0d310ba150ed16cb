"""How many requests ranks make to an object store before their first batch, counted by a server that speaks S3.

Alone, `python benchmarks/object_store.py --files 4000` prints a table for 1 to 256 ranks. The ranks are simulated, one
after another in this process: each has a copy of what the notebook sends, and knows nothing else of the store.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import logging
import os
import pickle
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from harness import US, Effort, Goal, Row, Series

ROWS = 100  # in a file
BATCH_SIZE = 32
FOLDER = "bucket/many"
PEER = "each rank lists"
COUNTS = "/requests-so-far"


class Asked(NamedTuple):
    """The requests of all ranks and of the one that made most, and the seconds to the first batch (median)."""

    all: int
    most: int
    first_batch_s: float


def opening(effort: Effort) -> list[Row]:
    files, ranks = (200, 32) if effort.quick else (1000, 64)
    with _server(files):
        data, opened = _opened(shuffle=True)
        ours = _ranks(data, ranks)
        alone = _alone()
    title = f"{ranks} ranks, {files:,} files in an object store"
    ours_in_all, peers_in_all = Series((opened + ours.all,)), Series((ranks * alone,))
    return [
        Row(f"{title}: requests to the first batch", "", ours_in_all, PEER, peers_in_all, Goal(0.1, ratio=True)),
        Row(f"{title}: a rank's requests to its first batch", "", Series((ours.most,)), goal=Goal(112)),
    ]


def _opened(*, shuffle: bool) -> tuple[Any, int]:
    """Return shards() as the notebook sends them to ranks, and the requests that this has taken."""
    from sparkring import shards

    _forget()
    data = shards(f"s3://{FOLDER}", BATCH_SIZE, shuffle=shuffle, rank=0, size=1)
    data.spec  # noqa: B018 - found before a launch
    return data, _counted()


def _ranks(data: Any, size: int) -> Asked:
    sent, asked, seconds = pickle.dumps(data), [], []
    for rank in range(size):
        _forget()
        mine = replace(pickle.loads(sent), seat=(rank, size))
        begun = time.perf_counter()
        batches = mine.as_numpy("x")
        next(batches)
        seconds.append(time.perf_counter() - begun)
        asked.append(_counted())
        batches.close()
    return Asked(sum(asked), max(asked), statistics.median(seconds))


def _alone() -> int:
    """Return the requests of a rank that opens the data set itself, up to its first batch."""
    from sparkring import shards

    _forget()
    batches = shards(f"s3://{FOLDER}", BATCH_SIZE, rank=0, size=1).as_numpy("x")
    next(batches)
    requests = _counted()
    batches.close()
    return requests


def _forget() -> None:
    """Forget what this process knows of the store, as a new process does, and begin to count."""
    import s3fs

    from sparkring.data import dataset

    dataset._remote_footer.cache_clear()
    for fs in list(s3fs.S3FileSystem._cache.values()):
        fs.invalidate_cache()
    _counted()


def _counted() -> int:
    """Return the number of requests since the last call."""
    with urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"] + COUNTS) as answer:
        return int(json.load(answer))


# ── The server ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _server(files: int) -> Iterator[None]:
    """Start a server with `files` small files, and let s3fs find it."""
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    settings = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    os.environ.update({f"AWS_{name}": value for name, value in settings.items()})
    try:
        _fill(files)
        yield
    finally:
        process.kill()
        process.wait()


def _fill(files: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.mkdir(FOLDER.partition("/")[0])
    contents = {}
    for number in range(files):
        sink = io.BytesIO()
        first = number * ROWS
        pq.write_table(
            pa.table({"x": np.arange(first, first + ROWS), "y": np.random.default_rng(number).random(ROWS)}), sink
        )
        contents[f"{FOLDER}/part-{number:05d}.parquet"] = sink.getvalue()
    fs.pipe(contents)


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store, counts = DomainDispatcherApplication(create_backend_app), collections.Counter[str]()

    def answer(environ: dict[str, Any], start: Any) -> Any:
        if environ["PATH_INFO"] != COUNTS:
            counts["requests"] += 1
            return store(environ, start)
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(counts.pop("requests", 0)).encode()]

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        _serve()
    with _server(given.files):
        alone = _alone()
        print(
            f"{given.files:,} files of {ROWS} rows. A rank that opens the data set itself: {alone:,} requests",
            flush=True,
        )
        for shuffle in (True, False):
            begun = time.perf_counter()
            data, opened = _opened(shuffle=shuffle)
            seconds = time.perf_counter() - begun
            print(f"shuffle={shuffle}: {US} opens it with {opened:,} requests in {seconds:.1f} s", flush=True)
            for size in given.ranks:
                asked = _ranks(data, size)
                print(
                    f"{size:6,} ranks: {asked.all:8,} requests of all ranks, {asked.most:5,} of the one with most, "
                    f"first batch after {asked.first_batch_s:.2f} s; {PEER}: {size * alone:,}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
