"""Everything that runs on Spark Connect, on a server of its own. The notebook is a process without a SparkContext."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import mentions
from waiting import until

from sparkring.cluster import connect
from sparkring.cluster.base import SERVER_LOST_S
from sparkring.cluster.jobs import interruptibly
from sparkring.errors import MemberLost
from sparkring.launchers.spark import SparkLauncher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.versions("of pyspark: other sets lack what its client of Spark Connect needs"),
]

# Each function returns a value for the test, or raises one of sparkring's errors, which the test gets as text.
TRIED = """
import json, os
import sparkring
from pyspark.sql import functions as F
from sparkring.errors import SparkringError

answers = {}
def attempt(function):
    try:
        answers[function.__name__] = function()
    except SparkringError as error:
        answers[function.__name__] = f"{type(error).__name__}: {error}"

def ring(source, np, framework="plain", namespace=None, **options):
    code = chr(10) + textwrap.dedent(source).strip()
    work = Cell(code, namespace or {})
    return run_spec(RunSpec(work, Options(np=np, **options), framework, "test", "%%" + framework + code), View()).values

os.environ["SPARKRING_CACHE"] = os.path.abspath("cache")
rows = session.range(90).select("id", (F.col("id") * 0.5).alias("x"), (F.col("id") % 3).alias("k"))
"""
END = """
print("ANSWERS", json.dumps(answers))
"""
WAIT_FOR_SLOTS = """
from sparkring.cluster.slots import current_slots
import time
while current_slots().total < 4:
    time.sleep(0.1)  # executors register a moment after the server has started
"""
RINGS = '''
@attempt
def torch():
    return ring("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total)
        float(total)
    """, 2, "torch")

@attempt
def barrier():
    return ring("(context.partitionId(), context.allGather(str(rank)), list(rows))", 2, "barrier")

@attempt
def partitions_of_a_frame():
    return ring("sum(row.id for row in rows)", 0, "barrier", {"rows_of": rows.repartition(3)}, data="rows_of")

@attempt
def other_partitions_of_a_frame():
    return sum(ring("sum(row.id for row in rows)", 2, "barrier", {"rows_of": rows}, data="rows_of"))

@attempt
def an_error():
    return ring("x = 1\\nif rank == 1:\\n    1 / 0", 2)

@attempt
def a_killed_rank():
    return ring("import os, time\\nif rank == 1:\\n    os.kill(os.getpid(), 9)\\ntime.sleep(1000)", 2)

@attempt
def a_time_limit():
    return ring("import time\\ntime.sleep(1000)", 2, timeout_s=3)

@attempt
def too_few_slots():
    return ring("rank", 9)

@attempt
def slots():
    from sparkring.launchers import slots_table
    return slots_table()[-1]

@attempt
def a_warm_gang():
    from sparkring.engine.run import warm_gang
    from sparkring.engine.run.options import GangOptions
    warm_gang.start(GangOptions(2, "plain", 60.0, ()), print, print)
    gang = warm_gang.find(2, print)
    values = []
    for source in ("kept = rank + 1", "kept * 10"):
        spec = RunSpec(Cell(chr(10) + source, {}), Options(np=2), "plain", "test", source, gang)
        values = run_spec(spec, View()).values
    warm_gang.stop()
    return values

@attempt
def the_environment():
    from sparkring.capture import environment
    site = os.path.abspath("site-packages")
    os.makedirs(f"{site}/made_there-1.0.dist-info")
    with open(f"{site}/made_there.py", "w") as file:
        file.write("x = 5")
    environment._site_folders = lambda: [site]
    source = "import made_there, sys\\n[made_there.x, sys.prefix.rpartition('/')[2]]"
    return [ring(source, 2, env_pack=True), environment.lock()]

@attempt
def jobs_afterwards():
    return rows.count()
'''
FRAMES = """
import numpy

@attempt
def items():
    return list(sparkring.foreach(lambda item: item * 2, [1, 2, 3], np=2).values)

@attempt
def groups():
    pairs = sparkring.foreach(lambda pair: (pair[0], len(pair[1]), float(pair[1]["x"].sum())), rows.groupBy("K"), np=2)
    return list(pairs.values)

@attempt
def groups_of_an_expression():
    grouped = rows.groupBy((F.col("id") % 2).alias("x"), "k", F.col("k") == 1)
    return list(sparkring.foreach(lambda pair: (pair[0], list(pair[1]), len(pair[1])), grouped, np=2).values)

@attempt
def groups_of_no_column():
    return list(sparkring.foreach(len, rows.groupBy("nothing"), np=2).values)

@attempt
def groups_of_rollup():
    return list(sparkring.foreach(len, rows.rollup("k"), np=2).values)

@attempt
def partitions():
    return [part.rows for part in sparkring.partitions(rows.repartition(5, F.lit(1)))]

@attempt
def shards():
    data = sparkring.shards(rows, 15)
    return ring("sum(float(batch['x'].sum()) for batch in data.as_numpy())", 2, namespace={"data": data})

@attempt
def a_view_by_its_name():
    rows.createOrReplaceTempView("by_name")
    groups = sparkring.foreach(lambda group: len(group[1]), sparkring.table("by_name").groupBy("k"), np=-2)
    return [sparkring.shards("by_name", 15).dataset.rows, groups.values]

@attempt
def a_name_of_nothing():
    return sparkring.shards("nothing", 15)

@attempt
def predict():
    scored = sparkring.predict(rows, lambda batch: 2 * batch["x"] + 1, inputs=["x"])
    return [list(row)[-1] for row in scored.orderBy("id").limit(3).collect()]

@attempt
def predict_udf():
    score = sparkring.predict_udf(lambda: lambda ids: ids * 3.0, return_type="float", batch_size=100)
    return sorted(row[0] for row in session.range(3).select(score("id")).collect())

@attempt
def an_estimator():
    import torch
    from sparkring.ml import TorchEstimator, TorchModel

    estimator = TorchEstimator(
        np=-2, model=lambda: torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, 0.01), epochs=1,
        loss="mse_loss", feature_cols=["x"], label_cols=["x"], batch_size=10, input_shapes=[[-1, 1]],
    )
    saved, fitted = map(os.path.abspath, ("estimator", "fitted"))
    estimator.save(saved)
    model = TorchEstimator.load(saved).fit(rows)
    before = [row.x__output for row in model.transform(rows).orderBy("id").limit(2).collect()]
    model.save(fitted)
    after = [row.x__output for row in TorchModel.load(fitted).transform(rows).orderBy("id").limit(2).collect()]
    return [len(before), before == after]

@attempt
def stream_in_a_folder_of_this_process():
    from types import SimpleNamespace
    from sparkring.engine.stream.spark_source import SparkSource
    os.environ["SPARKRING_CACHE"] = "memory://here"
    SparkSource(session.readStream.format("rate").load(), "clicks", SimpleNamespace(), None)

@attempt
def doctor():
    from sparkring.engine.doctor.spark import check
    return sorted({finding.level for finding in check(None, print).findings})
"""


@pytest.fixture
def attempts(connected: Any) -> Any:
    """Runs functions in a notebook on Spark Connect, and returns their answers by name."""

    def run(functions: str) -> dict[str, Any]:
        text = connected(TRIED + functions + END).wait()
        line = next((line for line in text.splitlines() if line.startswith("ANSWERS ")), None)
        assert line is not None, text
        return json.loads(line.removeprefix("ANSWERS "))  # type: ignore[no-any-return]

    return run


def test_rings(attempts):
    """Ranks run in tasks of a barrier stage, and end as they do elsewhere."""
    answers = attempts(RINGS)
    assert answers.pop("torch") == [3.0, 3.0]
    assert answers.pop("barrier") == [[0, ["0", "1"], []], [1, ["0", "1"], []]]
    thirds = answers.pop("partitions_of_a_frame")
    assert (len(thirds), sum(thirds)) == (3, 4005)
    assert answers.pop("other_partitions_of_a_frame") == 4005
    error = answers.pop("an_error")
    assert error.startswith("RunFailed: rank 1 on ")
    assert mentions(error, "ZeroDivisionError")
    assert "→ 4      1 / 0" in error
    assert "killed by SIGKILL" in answers.pop("a_killed_rank")
    assert mentions(answers.pop("a_time_limit"), "RunTimeout", "3 s")
    too_few = ("SlotsError", "9 task slots", "4 in all", "other sessions", "local[4]", "127.0.0.1", "-n 4")
    assert mentions(answers.pop("too_few_slots"), *too_few)
    kind, total, idle, where = answers.pop("slots")
    assert (kind, total, idle) == ("Spark (n > 0)", "4", "?")
    assert mentions(where, "local[4]", "Spark Connect", "127.0.0.1")
    assert answers.pop("a_warm_gang") == [10, 20]
    values, lock = answers.pop("the_environment")
    assert values == [[5, lock]] * 2
    assert answers == {"jobs_afterwards": 90}


def test_frames(attempts):
    """Items, shards and predictions work with DataFrames of Spark Connect. What does not work is refused."""
    answers = attempts(FRAMES)
    assert answers.pop("items") == [2, 4, 6]
    assert answers.pop("groups") == [[0, 30, 652.5], [1, 30, 667.5], [2, 30, 682.5]]
    names = ["id", "x", "k"]
    assert answers.pop("groups_of_an_expression") == [
        [[half, third, third == 1], names, 15] for half in (0, 1) for third in (0, 1, 2)
    ]
    assert "`nothing` cannot be resolved" in answers.pop("groups_of_no_column")
    assert mentions(answers.pop("groups_of_rollup"), "DataError", "rollup()")
    assert sorted(answers.pop("partitions")) == [0, 0, 0, 0, 90]
    assert sum(answers.pop("shards")) == 2002.5
    assert answers.pop("a_view_by_its_name") == [90, [30, 30, 30]]
    assert mentions(answers.pop("a_name_of_nothing"), "`nothing`", "Spark session")
    assert answers.pop("predict") == [1.0, 2.0, 3.0]
    assert answers.pop("predict_udf") == [0.0, 3.0, 6.0]
    assert answers.pop("an_estimator") == [2, True]
    refused = answers.pop("stream_in_a_folder_of_this_process")
    assert mentions(refused, "DataError", "Spark Connect", "memory://here/dataframes: ")
    assert answers == {"doctor": ["ok"]}


def test_an_interrupt(connected):
    """Stop ends the ranks, and the session is still usable."""
    driver = connected("""
try:
    run("import os, time\\nprint('up', os.getpid(), flush=True)\\ntime.sleep(1000)", 2)
except KeyboardInterrupt as error:
    print("KeyboardInterrupt:", error)
print("counted", session.range(7).count())
""")
    pids = [int(driver.until_said(rf"^\[{rank}\] up (\d+)$")[1]) for rank in (0, 1)]
    driver.process.send_signal(signal.SIGINT)
    text = driver.wait()
    assert "KeyboardInterrupt: sparkring: interrupted, 2 ranks ended" in text
    assert "counted 7" in text
    until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have ended")


def test_a_killed_notebook_leaves_no_ranks(connected):
    driver = connected('run("import os, time\\nprint(os.getpid(), flush=True)\\ntime.sleep(1000)", 2)')
    pids = [int(driver.until_said(rf"^\[{rank}\] (\d+)$")[1]) for rank in (0, 1)]
    driver.process.kill()
    until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have ended")


class GoneSession:
    """A session whose server does not answer."""

    is_stopped = False

    def __init__(self, channel: Any) -> None:
        self.client = SimpleNamespace(_channel=channel)
        self.conf = self
        self.ended = threading.Event()
        self.get = self.interruptTag = lambda *names: self.ended.wait()

    def addTag(self, tag: str) -> None:
        pass


def test_a_server_that_has_gone():
    """Questions and jobs end in seconds, although pyspark would try again for minutes."""
    grpc, threads = pytest.importorskip("grpc"), threading.active_count()
    with socket.socket() as unused, grpc.insecure_channel(f"127.0.0.1:{port_of(unused)}") as channel:
        session = GoneSession(channel)
        cluster = connect.Connect(session)
        assert cluster.is_reachable(), "the first connection takes a moment"
        with pytest.raises(TimeoutError, match="job took longer"):
            interruptibly(cluster, "job", session.ended.wait, limit_s=0.1)
        connect._connections[session]._lost_at -= SERVER_LOST_S
        assert cluster.is_stopped()
        with pytest.raises(TimeoutError, match=r"server .*Spark Connect .*not answer"):
            cluster.within(1000, session.ended.wait)
        with pytest.raises(ConnectionError, match=r"server .*Spark Connect .*not answer"):
            interruptibly(cluster, "job", session.ended.wait)
        launcher = SimpleNamespace(_cluster=cluster, _thread=None)
        assert isinstance(SparkLauncher.problem(launcher), MemberLost)
        session.ended.set()
        channel.unsubscribe(connect._connections[session]._note)
        until(lambda: threading.active_count() == threads, "grpc no longer uses the channel")


def port_of(unused: socket.socket) -> int:
    """Return a port at which nobody listens."""
    unused.bind(("127.0.0.1", 0))
    return int(unused.getsockname()[1])


STREAMS = '''
from sparkring.engine.run import warm_gang
from sparkring.engine.run.options import GangOptions
from sparkring.engine.stream.options import StreamOptions
from sparkring.engine.stream.run import StreamSpec, start_stream

gang = warm_gang.start(GangOptions(-2, "plain", 60.0, ()), print, print)
SETUP, TRAIN = "\\nids, seen = [], 0", """
import time
time.sleep(0.1)
ids, seen = [*ids, batch_id], seen + batch["n"].sum()
"""

def execute(source):
    return run_spec(RunSpec(Cell(source, {}), Options(np=-2), "plain", "test", source, gang), View()).values

def stream(**options):
    frame = session.readStream.schema("n bigint").option("maxFilesPerTrigger", 1).parquet("files")
    chosen = StreamOptions(np=-2, quiet=True, sharded=True, checkpoint_dir="saved", max_restarts=3, **options)
    return start_stream(StreamSpec(Cell(TRAIN, {}), frame, "frame", gang, chosen, "test", TRAIN))

def after(run, count):
    while run.record.stream is None or run.record.stream.batches < count:
        assert not run.done, run.result()
        time.sleep(0.01)

execute(SETUP)
'''


def test_a_stream(connected, tmp_path):
    """Each micro-batch counts once, although a rank and the notebook are killed, and nothing of the stream is left."""
    for name in ("files", "saved"):
        (tmp_path / name).mkdir()
    for number in range(8):
        pq.write_table(pa.table({"n": [number] * 9}), tmp_path / "files" / f"{number}.parquet")
        os.utime(tmp_path / "files" / f"{number}.parquet", (number, number))
    script = STREAMS.replace('"files"', repr(str(tmp_path / "files"))).replace('"saved"', repr(str(tmp_path / "saved")))
    killed = connected(f"""{script}
run = stream(save_every=2)
after(run, 1)
os.kill(run.record.ranks[1].pid, signal.SIGKILL)
after(run, 4)
print("attempts", len(run.record.attempts), flush=True)
time.sleep(1000)
""")
    assert killed.until_said(r"^attempts (\d)$")[1] == "2"
    killed.process.kill()
    killed.process.wait()
    again = connected(f"""{script}
run = stream(save_every=2)
after(run, 1)
run.stop()
run.result()
stream(available_now=True).result()
print("STATE", execute("\\nids, int(seen)"))
print(len(session.streams.active), "queries")
""")
    text = again.wait()
    ids = list(range(8))
    # Rank 0 has 4 of the 9 rows of a micro-batch.
    assert f"STATE [({ids}, {4 * sum(ids)}), ({ids}, {5 * sum(ids)})]" in text
    assert "0 queries" in text
    assert not list(tmp_path.glob("saved/_stream-*/batches/*"))


def test_rings_that_cannot_reach_the_notebook(attempts):
    """Messages go through Spark jobs, and the relay has ended afterwards."""
    some = ("barrier", "partitions_of_a_frame", "an_error", "a_warm_gang", "jobs_afterwards")
    rings = [part for part in RINGS.split("@attempt") if part.startswith(tuple(f"\ndef {name}(" for name in some))]
    unreachable = 'session.conf.set("spark.sparkring.driver.host", "127.0.0.2")\n'
    answers = attempts(unreachable + "".join(f"@attempt{part}" for part in rings))
    assert answers.pop("barrier") == [[0, ["0", "1"], []], [1, ["0", "1"], []]]
    thirds = answers.pop("partitions_of_a_frame")
    assert (len(thirds), sum(thirds)) == (3, 4005)
    assert "→ 4      1 / 0" in answers.pop("an_error")
    assert answers.pop("a_warm_gang") == [10, 20]
    assert answers == {"jobs_afterwards": 90}


def test_a_killed_notebook_that_cannot_be_reached_leaves_nothing(connected):
    """The relay exits when nobody has asked it for a while, which ends the ranks."""
    driver = connected("""
session.conf.set("spark.sparkring.driver.host", "127.0.0.2")
run("import os, time\\nprint(os.getpid(), flush=True)\\ntime.sleep(1000)", 2)
""")
    pids = [int(driver.until_said(rf"^\[{rank}\] (\d+)$")[1]) for rank in (0, 1)]
    relays = [
        one.pid for one in psutil.process_iter(["cmdline"]) if "sparkring.worker.relay" in (one.info["cmdline"] or ())
    ]
    assert relays
    driver.process.kill()
    until(lambda: not any(map(psutil.pid_exists, pids + relays)), "the ranks and the relay have ended")


GPUS = """
SEES = "import os\\nfrom pyspark import TaskContext\\nheld = TaskContext.get().resources().get('gpu')\\n" \
    "[len(held.addresses) if held else 0, os.environ.get('CUDA_VISIBLE_DEVICES', '').count(',') + 1]"

from sparkring.cluster.slots import current_slots
counted = lambda: [current_slots(gpus).total for gpus in (None, 1, 2, 4)]

@attempt
def slots():
    return counted()

@attempt
def without():
    return ring(SEES, 2)

@attempt
def one_each():
    return ring(SEES, 2, gpus=1)

@attempt
def four_each():
    return ring(SEES, 2, gpus=4)

@attempt
def with_rows():
    source = "[context.resources()['gpu'].addresses, len(list(rows))]"
    return ring(source, 1, "barrier", {"df": rows}, data="df", gpus=4)

@attempt
def too_many_slots():
    return ring(SEES, 3, gpus=4)

@attempt
def too_many():
    return ring(SEES, 1, gpus=5)

@attempt
def items():
    return list(sparkring.foreach(lambda item: len(sparkring.world().gpus), [1, 2, 3], np=2, gpus=4).values)

session.conf.set("spark.sql.leafNodeDefaultParallelism", "9")

@attempt
def unknown_slots():
    return counted()

@attempt
def a_ring_in_unknown_slots():
    return ring("rank, context.allGather(str(rank))", 3, "barrier")

@attempt
def every_unknown_slot():
    return ring("rank", 0)

@attempt
def a_table_of_unknown_slots():
    from sparkring.launchers import slots_table
    return slots_table()[-1][1]

@attempt
def items_in_unknown_slots():
    return list(sparkring.foreach(lambda item: item * 2, [1, 2, 3], np=2).values)

@attempt
def doctor():
    from sparkring.engine.doctor.spark import check
    return [finding.what for finding in check(None, print).findings][0]
"""


def test_gpus_and_unknown_slots(connected_to, workers_of_its_own):
    """Ranks get the GPUs that they ask for. If Spark does not say how many slots it has, rings start nevertheless."""
    settings = {"spark.executor.cores": "2", "spark.executor.resource.gpu.amount": "4", "spark.executor.memory": "600m"}
    with workers_of_its_own(gpus=4) as cluster:
        _, start = connected_to(cluster, **settings)
        text = start(TRIED + WAIT_FOR_SLOTS + GPUS + END).wait()
        assert "ANSWERS" in text, text
        answers = json.loads(text.rpartition("ANSWERS ")[2].splitlines()[0])
    assert answers.pop("slots") == [4, 4, 4, 2]
    assert [held for held, _ in answers.pop("without")] == [0, 0]
    assert [held for held, _ in answers.pop("one_each")] == [1, 1]
    assert answers.pop("four_each") == [[4, 4]] * 2
    assert answers.pop("with_rows") == [[["0", "1", "2", "3"], 90]]
    assert mentions(answers.pop("too_many_slots"), "SlotsError", "3 task slots", "4 GPUs", "2")
    assert mentions(answers.pop("too_many"), "LaunchError", "5 GPUs", "0")
    assert answers.pop("items") == [4, 4, 4]
    assert answers.pop("unknown_slots") == [connect.UNKNOWN_SLOTS] * 4
    assert answers.pop("a_ring_in_unknown_slots") == [[rank, ["0", "1", "2"]] for rank in range(3)]
    assert mentions(answers.pop("every_unknown_slot"), "SlotsError", "-n 0")
    assert answers.pop("a_table_of_unknown_slots") == "?"
    assert answers.pop("items_in_unknown_slots") == [2, 4, 6]
    assert mentions(answers.pop("doctor"), "unknown number", "task slots")
    assert not answers


@pytest.mark.extended("repetition", "a server that has gone, and the kills above")
@pytest.mark.parametrize("host", ["", "127.0.0.2"])
def test_a_killed_server_ends_a_ring(connected_to, host):
    """Directly and through Spark jobs, the run ends with an error, and no rank is left."""
    server, start = connected_to(SimpleNamespace(url="local[4]", python=sys.executable))
    driver = start(f"""
if {host!r}:
    session.conf.set("spark.sparkring.driver.host", {host!r})
try:
    run("import os, time\\nprint(os.getpid(), flush=True)\\ntime.sleep(1000)", 2)
except Exception as error:
    print("ENDED", type(error).__name__, flush=True)
os._exit(0)  # pyspark would call the server for minutes
""")
    pids = [int(driver.until_said(rf"^\[{rank}\] (\d+)$")[1]) for rank in (0, 1)]
    server.process.kill()
    assert driver.until_said(r"^ENDED (\w+)$")[1] in ("RunFailed", "MemberLost")
    until(lambda: not any(map(psutil.pid_exists, pids)), "the ranks have ended")
    driver.wait()
