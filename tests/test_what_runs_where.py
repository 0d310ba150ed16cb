"""The table in docs/cluster.md that says what runs where: each of its columns is tried, with everything in its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TITLE = "What runs where"
YES = "✓"
# Each function belongs to a row of the table, and returns whether the result is right. `SIGN` is -1 for local ranks.
TRIED = """
import json, os
import pyarrow as pa, pyarrow.parquet as pq
import sparkring
from sparkring.engine.run import warm_gang
from sparkring.engine.run.options import GangOptions
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.run import StreamSpec, start_stream
from sparkring.errors import SparkringError

os.environ["SPARKRING_CACHE"] = os.path.abspath("cache")
answers = {}

def row(title):
    def attempt(function):
        try:
            answers[title] = bool(function())
        except SparkringError as error:
            answers[title] = f"{type(error).__name__}: {error}"
    return attempt

def execute(source, framework="plain", namespace=None, gang=None, **options):
    code = chr(10) + source
    options = Options(**{"np": 2 * SIGN, **options})
    return run_spec(RunSpec(Cell(code, namespace or {}), options, framework, "test", code, gang), View()).values

frame = session.range(90)
os.makedirs("files")
pq.write_table(pa.table({"n": list(range(10))}), "files/0.parquet")

@row("rings: `%%torchrun -n 2`")
def _():
    source = "import torch, torch.distributed as dist\\ndist.init_process_group('gloo')\\n" \\
        "total = torch.ones(1)\\ndist.all_reduce(total)\\nfloat(total)"
    return execute(source, "torch") == [2.0, 2.0]

@row("`%%barrier -n 2`")
def _():
    return execute("context.allGather(str(rank))", "barrier") == [["0", "1"]] * 2

@row("`%%barrier --data df`")
def _():
    return sum(execute("sum(row.id for row in rows)", "barrier", {"df": frame}, data="df")) == 4005

@row("`%%foreach -n 2`, `foreach(f, items, np=2)`")
def _():
    return list(sparkring.foreach(lambda item: item * 2, [1, 2, 3], np=2 * SIGN, quiet=True).values) == [2, 4, 6]

@row("`search()`")
def _():
    def trial(q):
        sparkring.log(loss=q)
    trials = sparkring.search(q=[3, 1, 2], sampler="grid", minimize="loss")
    return sparkring.foreach(trial, trials, np=2 * SIGN, quiet=True).best().q == 1

@row("`shards(df)`")
def _():
    data = sparkring.shards(frame, 15)
    values = execute("sum(int(batch['id'].sum()) for batch in data.as_numpy())", "plain", {"data": data})
    return sum(values) == 4005

@row("`predict(df)`")
def _():
    if SIGN < 0:
        raise SparkringError("predict(df) runs in Spark's tasks")
    scored = sparkring.predict(frame, lambda batch: 2 * batch["id"], inputs=["id"])
    return sorted(list(row)[-1] for row in scored.collect())[:3] == [0, 2, 4]

@row("`predict(files, to=…, np=2)`")
def _():
    to = os.path.abspath("to")
    sparkring.predict("files", lambda batch: 2 * batch["n"], inputs=["n"], to=to, np=2 * SIGN, returns="long")
    return sorted(pq.read_table(to).columns[-1].to_pylist()) == list(range(0, 20, 2))

def stream(source, what, **options):
    code = chr(10) + "seen = seen + int(batch['n'].sum())"
    gang = warm_gang.start(GangOptions(2 * SIGN, "plain", 60.0, ()), print, print)
    try:
        execute("seen = 0", gang=gang)
        options = StreamOptions(np=2 * SIGN, quiet=True, **options)
        start_stream(StreamSpec(Cell(code, {}), source, what, gang, options, "test", code)).result()
        return execute("seen", gang=gang)
    finally:
        warm_gang.stop()

@row("`%%stream batches`")
def _():
    return sum(stream([{"n": [1, 2]}, {"n": [3, 4]}], "batches")) == 10

@row("`%%stream df`")
def _():
    source = session.readStream.schema("n bigint").parquet(os.path.abspath("files"))
    return sum(stream(source, "df", sharded=True, available_now=True)) == 45

print("ANSWERS", json.dumps(answers))
"""
UNREACHABLE = """
from sparkring.cluster.base import Address
from sparkring.cluster.classic import Classic
Classic.address = lambda self: Address("127.0.0.2", "127.0.0.1", 0)
"""
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.executor.cores": "2",
}


def table() -> dict[str, dict[str, str]]:
    """Return the columns of the table: by place, what is in each row."""
    section = (DOCS / "cluster.md").read_text().partition(f"## {TITLE}\n")[2].partition("\n## ")[0]
    lines = [re.split(r" *\| *", line.strip())[1:-1] for line in section.splitlines() if line.startswith("|")]
    (_, *places), _, *rows = lines
    return {place: {row[0]: row[number] for row in rows} for number, place in enumerate(places, 1)}


def check(place: str, text: str) -> None:
    """Compare a column of the table with what has run."""
    answered = re.search(r"^ANSWERS (\{.*\})$", text, re.MULTILINE)
    assert answered is not None, text
    answers: dict[str, Any] = json.loads(answered[1])
    written = {row: cell == YES for row, cell in table()[place].items()}
    assert {row: answer is True for row, answer in answers.items()} == written, answers
    assert all(answer is True or isinstance(answer, str) for answer in answers.values()), answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "session", "sign"),
    [
        pytest.param(
            "this machine (`-n -2`)",
            "spark('local[2]')",
            -1,
            marks=pytest.mark.extended("launcher", "what the suite shows on this machine"),
        ),
        pytest.param(
            "Spark, local mode",
            "spark('local[4]')",
            1,
            marks=pytest.mark.extended("launcher", "what the suite shows on local Spark"),
        ),
        pytest.param(
            "through Spark jobs",
            f"spark('local[4]'){UNREACHABLE}",
            1,
            marks=pytest.mark.extended("launcher", "test_rings_through_spark_jobs"),
        ),
    ],
)
def test_on_this_machine(driver: Callable[[str], Any], place: str, session: str, sign: int) -> None:
    check(place, driver(f"session = {session}\nSIGN = {sign}\n{TRIED}\nsession.stop()\n").wait())


@pytest.mark.slow
@pytest.mark.extended("launcher", "what the suite shows on local Spark and on a cluster")
@pytest.mark.parametrize(("place", "settings"), [("a standalone cluster", {}), ("dynamic allocation", DYNAMIC)])
def test_on_a_cluster(driver: Callable[[str], Any], brittle_cluster: Any, place: str, settings: Any) -> None:
    settings = {"spark.executor.memory": "600m", **settings}
    python = f"os.environ['PYSPARK_PYTHON'] = {brittle_cluster.python!r}\n"
    script = f"{python}session = spark({brittle_cluster.url!r}, **{settings})\nSIGN = 1\n{TRIED}\nsession.stop()\n"
    check(place, driver(script).wait())


@pytest.mark.slow
@pytest.mark.versions("of pyspark: other sets lack what its client of Spark Connect needs")
def test_on_spark_connect(connected: Callable[[str], Any]) -> None:
    check("Spark Connect", connected(f"SIGN = 1\n{TRIED}").wait())


@pytest.mark.slow
@pytest.mark.extended("launcher", "dynamic allocation and Spark jobs, each without the other")
@pytest.mark.versions("of pyspark: other sets lack what its client of Spark Connect needs")
def test_on_spark_connect_with_dynamic_allocation(connected_to: Any, brittle_cluster: Any) -> None:
    """Rings also start from no executor, and if executors cannot reach the notebook."""
    _, start = connected_to(brittle_cluster, **{"spark.executor.memory": "600m", **DYNAMIC})
    unreachable = 'session.conf.set("spark.sparkring.driver.host", "127.0.0.2")\n'
    check("Connect, dynamic allocation, through Spark jobs", start(f"{unreachable}SIGN = 1\n{TRIED}").wait())


def test_the_table_has_the_rows_that_are_tried() -> None:
    rows = re.findall(r'^@row\("(.*)"\)$', TRIED, re.MULTILINE)
    assert [list(column) for column in table().values()] == [rows] * len(table())
