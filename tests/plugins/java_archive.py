"""An archive of the classes that Spark loads. It halves the CPU time of each JVM that the tests start.

`python java_archive.py FOLDER` makes the archive (class data sharing, JEP 350). From then on, Spark uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# The tests' JVMs live only for seconds, so compiling with C2 never pays off. It costs half of their CPU time.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ARCHIVE, SETTINGS, TRIED = "spark.jsa", "spark.properties", "tried"


def java_options(folder: Path) -> str:
    """Return the options of every JVM of the tests. Java prints nothing about an archive that does not fit."""
    archive = folder / ARCHIVE
    # If the option names an archive that does not exist, Java does not use its default archive, either.
    return f'{SHORT_LIVED} "-XX:SharedArchiveFile={archive}" -Xlog:disable' if archive.exists() else SHORT_LIVED


def write_settings(folder: Path) -> Path:
    """Write Spark's settings for all sessions of the tests to a file for --properties-file."""
    options = java_options(folder)
    values = {
        "spark.driver.extraJavaOptions": options,
        "spark.executor.extraJavaOptions": options,
        "spark.python.daemon.module": "spark_daemon",
        "spark.executorEnv.PYTHONPATH": Path(__file__).resolve().parent,
    }
    new, settings = folder / f"new-{SETTINGS}", folder / SETTINGS
    new.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
    return new.replace(settings)


def unchanged(batches: Iterator[object]) -> Iterator[object]:
    yield from batches


def make(folder: Path) -> None:
    """Do what tests do, and let Java archive the classes that it has loaded."""
    from pyspark.sql import SparkSession

    (folder / TRIED).touch()
    new = folder / f"new-{ARCHIVE}"
    settings = {
        "spark.driver.extraJavaOptions": f'{SHORT_LIVED} -Xlog:disable "-XX:ArchiveClassesAtExit={new}"',
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "FATAL",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    rows = str(folder / "rows")
    session.createDataFrame([(1, "a", [1.0])], "n int, s string, v array<double>").write.parquet(rows, "overwrite")
    frame = session.read.parquet(rows).filter("n > 0").selectExpr("n", "hash(s) AS h")
    frame.mapInArrow(unchanged, "n int, h int").collect()
    frame.groupBy("h").count().repartition(2).toPandas()
    session.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    if gateway.proc.wait() == 0 and new.exists():
        new.replace(folder / ARCHIVE)
        write_settings(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
