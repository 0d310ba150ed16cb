"""Measure sparkring and its peers in turn, and say which goals are met.

python benchmarks/run.py                        all benchmarks; writes benchmarks/RESULTS.md
python benchmarks/run.py --only trivial burst   only these benchmarks
python benchmarks/run.py --quick                smaller data and fewer turns, to check that everything works
python benchmarks/run.py --sets                 some benchmarks with the pinned and the newest versions; writes a
                                                section of RESULTS.md
python benchmarks/run.py --only gpu             training on this machine's NVIDIA GPUs
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
# These variables are set before the imports below, so that the imports and all processes that are started see them.
# The peers' ranks import their functions by name, so they need PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# Every launch starts new processes, as the first launch of a notebook does, except where a benchmark says otherwise.
os.environ["SPARKRING_SPARE"] = "0"
# Write bytecode files, as Python does by default. Otherwise, every rank would compile sparkring again, whereas the
# peers' packages are already compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import burst  # noqa: E402
import checkpoints  # noqa: E402
import connect  # noqa: E402
import death  # noqa: E402
import estimators  # noqa: E402
import gpu  # noqa: E402
import horde  # noqa: E402
import items  # noqa: E402
import latency  # noqa: E402
import loading  # noqa: E402
import object_store  # noqa: E402
import panel  # noqa: E402
import reading  # noqa: E402
import scoring  # noqa: E402
import search  # noqa: E402
import sets  # noqa: E402
import start  # noqa: E402
import streams  # noqa: E402
import training  # noqa: E402
import tunnel  # noqa: E402
import values  # noqa: E402
import warm  # noqa: E402
from harness import Effort, Row, say, table  # noqa: E402

BENCHMARKS: dict[str, Callable[[Effort], list[Row]]] = {
    "frameworks": start.frameworks,
    "trivial": start.trivial,
    "first": start.first,
    "again": start.again,
    "burst": burst.million,
    "training": training.keras,
    "many": horde.many,
    "death": death.killed,
    "latency": latency.lines,
    "loading": loading.extension,
    "value": values.large,
    "warm": warm.cells,
    "kernel": warm.kernel_cells,
    "arrays": warm.arrays,
    "lines": warm.lines,
    "torchrun": warm.torch,
    "tunnel": tunnel.ways,
    "connect": connect.sessions,
    "reading": reading.parquet,
    "delta": reading.delta,
    "together": reading.together,
    "tfrecord": reading.tfrecord,
    "object-store": object_store.opening,
    "checkpoints": checkpoints.files,
    "restarts": checkpoints.runs,
    "panel": panel.live,
    "charts": panel.charts,
    "scoring": scoring.small_net,
    "resnet": scoring.large_net,
    "estimators": estimators.keras,
    "items": items.trivial,
    "utilisation": items.utilisation,
    "planned": items.planned,
    "search": search.time_to_good,
    "small-batches": streams.small,
    "large-batches": streams.large,
    "long-stream": streams.long,
}
# These run only if --only names them.
ON_REQUEST: dict[str, Callable[[Effort], list[Row]]] = {"gpu": gpu.training}
PACKAGES = (
    "sparkring",
    "horovod",
    "tensorflow-cpu",
    "torch",
    "pyspark",
    "petastorm",
    "pyarrow",
    "ipython",
    "ipyparallel",
    "joblib",
    "joblibspark",
    "ray",
    "hyperopt",
    "numpy",
    "optuna",
)
RESULTS = HERE / "RESULTS.md"


def main() -> int:
    known = {**BENCHMARKS, **ON_REQUEST}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--runs", type=int, help="turns of each benchmark (default 5, with --quick 1)")
    parser.add_argument(
        "--quick", action="store_true", help="smaller data and fewer turns, to check that everything works"
    )
    parser.add_argument(
        "--sets", action="store_true", help=f"compare the pinned and the newest versions: {', '.join(sets.BENCHMARKS)}"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="also write the figures as JSON, as --sets needs them"
    )
    wanted = parser.parse_args()
    effort = Effort(max(1, wanted.runs or (1 if wanted.quick else 5)), wanted.quick)
    if wanted.sets:
        compared = sets.compare(effort)
        print(compared)
        if not wanted.quick:
            write(both=compared)
        return 0

    begun, rows, broken = time.monotonic(), [], []
    # The folder is in the user's home, as users' runs are: /tmp may be in memory, or contain too many files.
    with tempfile.TemporaryDirectory(prefix=".sparkring-benchmarks-", dir=Path.home()) as home:
        os.environ["SPARKRING_HOME"] = os.environ["SPARKRING_CACHE"] = os.environ["IPYTHONDIR"] = home
        for name in wanted.only or BENCHMARKS:
            started = time.monotonic()
            print(f"▸ {name}", flush=True)
            try:
                found = known[name](effort)
            except Exception:  # the other benchmarks are still measured
                traceback.print_exc()
                broken.append(name)
                continue
            rows += found
            say(f"{time.monotonic() - started:.0f} s", keep=True)
            print(table(found), flush=True)
    text = report(rows, effort, broken, time.monotonic() - begun)
    print(text)
    if wanted.save:
        sets.save(rows, f"Python {platform.python_version()}, {versions()}", wanted.save)
    if not (wanted.only or wanted.quick or broken):
        write(whole=text)
    return bool(broken)


def write(*, whole: str = "", both: str = "") -> None:
    """Write the results of all benchmarks, or the section that compares two sets. The other part is unchanged."""
    old, mark, section = RESULTS.read_text(encoding="utf-8").partition(sets.TITLE)
    both = both or mark + section
    RESULTS.write_text("\n".join(filter(None, (whole or old.rstrip("\n") + "\n", both))), encoding="utf-8")


def report(rows: list[Row], effort: Effort, broken: list[str], seconds: float) -> str:
    """Return the results as Markdown: the table, the machine and the versions."""
    short = [row for row in rows if "falls short" in row.cells()[-1]]
    met = [row for row in rows if row.cells()[-1] == "met"]
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. sparkring and its peers are measured in turn, in one run. Each figure is the "
        f"median of {effort.runs} turns, with the minimum and maximum. Some benchmarks have at most 3 turns "
        "(training, latency, many ranks, the panel, predictions, estimators, plans, searches, streams, and the "
        "share of the time that is used), and loading has twice as many turns. A ratio is sparkring's figure "
        "divided by the peer's. Drivers are warm, as in a notebook that is in use: the extension is loaded, and "
        "Spark's session is up. For predictions, the model is in memory on both sides; the time to start a model "
        "process is not in the figures.",
        "",
        f"{len(met)} goals were met, and {len(short)} were not. The run took {seconds / 60:.0f} minutes.",
        *(f"Did not run: {name}." for name in broken),
        "",
        table(rows),
        f"- {datetime.date.today().isoformat()}, {machine()}",
        f"- Python {platform.python_version()}, {versions()}",
        "",
    ]
    return "\n".join(lines)


def machine() -> str:
    """Return the processor's model, its cores, the memory and the system."""
    import psutil

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass  # not Linux: keep the name that Python knows
    memory_gb = psutil.virtual_memory().total / 1e9
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {platform.system()} {platform.release()}"


def versions() -> str:
    """Return the versions of the packages in PACKAGES that are installed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
