"""Launches that Spark cannot carry out are refused before anything waits, and the error says what to do."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rings import READY, ready
from texts import mentions
from waiting import until

import sparkring
from sparkring.cluster.base import Address
from sparkring.cluster.classic import Classic
from sparkring.cluster.session import cluster_of
from sparkring.cluster.slots import Slots, _promised, slots
from sparkring.engine.doctor import spark as doctor
from sparkring.engine.predictions import queries
from sparkring.engine.run import warm_gang
from sparkring.errors import RunFailed, SlotsError
from sparkring.executor.handshake import GREETING
from sparkring.launchers import PLACES, tunnel
from sparkring.worker import spark_task

UNREACHED = r"^the executor on \S+ cannot connect to the driver at 127\.0\.0\.2:\d+: Connection refused\. "

CASES = """
import json, socket, sys
from sparkring.errors import SparkringError

found = {{}}

def attempt(name, np=1, prepare=lambda: None):
    try:
        prepare()
        values = run("rank", np).values
        found[name] = ["", "", values]
    except SparkringError as error:
        found[name] = [type(error).__name__, str(error), None]
    found[name].append([notice.text for notice in view.record.notices])

{cases}
sys.stdout.write("FOUND " + json.dumps(found) + "\\n")  # in one piece, because py4j logs in other threads
"""
TRIED = """
import psutil, time
from pyspark import SparkFiles
from sparkring.history import run_store
from pyspark.sql import SparkSession

attempt("no session", 2)
attempt("a made session", 2)
found["own jobs"] = SparkSession.getActiveSession().range(10).count()
SparkSession.getActiveSession().stop()

from sparkring.engine.run import warm_gang
from sparkring.engine.run.options import GangOptions
session = spark("local[2]")
said = []
gang = warm_gang.start(GangOptions(2, "plain", 3600.0, ()), said.append, said.append)
session.stop()
while not gang.ended:
    time.sleep(0.05)
try:
    warm_gang.find(2, said.append)
except SparkringError as error:
    found["the gang's session was stopped"] = [type(error).__name__, str(error), said]
warm_gang.stop()

session = spark("local[2]")
session.sparkContext.addPyFile(SHIPPED)
root, path = SparkFiles.getRootDirectory(), list(sys.path)
sys.path.remove(root)
found["a shipped module"] = run("import shipped\\nshipped.value", 2).values
sys.path[:] = path
import sparkring
# Only this process finds the folder by this path, as if the ranks were on another machine.
sys.path.insert(0, f"/proc/self/fd/{os.open(OWN, os.O_RDONLY)}")
import own_module
net = own_module.Net(3)
names = {"net": net, "own_module": own_module}
work = Cell("net(2), own_module.double(2), __import__('own_package.part').part.x", names)
result = run_spec(RunSpec(work, Options(np=2), "plain", "test"), View())
found["own modules"] = result.values
captured = {name.name: [name.type_name, name.travels] for name in result.record.captured}
found["own modules sent"] = [captured[name] for name in ("own_module.py", "own_package/")]
found["items with own modules"] = sparkring.foreach(own_module.double, [1, 2], np=2, quiet=True).values
sys.path.pop(0)
session.stop()
attempt("stopped", 1)

session = spark("local[2]", **{"spark.dynamicAllocation.enabled": "true"})
attempt("dynamic allocation")
session.stop()

with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    session = spark("local[4]", **{"spark.sparkring.driver.port": str(port)})
    attempt("taken port")
def ports():
    connections = psutil.Process().net_connections("inet")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
before = ports()  # of Spark
gang = sparkring.gang(np=1)
attempt("free port", 2)
scored = sparkring.predict(session.range(0, 4, 1, 1), lambda batch: batch["id"], inputs=["id"], idle_s=0.1)
found["at one port"] = [
    gang.run(lambda: 1).value,
    sparkring.foreach(lambda x: x, [2, 3], np=2, quiet=True).values,
    [row.prediction for row in scored.collect()],
    ports() - before == {port},
]
deadline = time.monotonic() + 60
while not any("predict" in run_store.load(path).title for path in run_store.saved()):
    assert time.monotonic() < deadline
    time.sleep(0.02)
gang.stop()
attempt("free port again")
found["port"] = port
session.stop()

os.environ["PYSPARK_PYTHON"] = OTHER
session = spark("local[2]")
attempt("another Python")
df = session.range(0, 4, 1, 2)
source = "[row.id for row in rows], sys.executable"
work = Cell(source, {"df": df, "sys": sys})
found["its rows"] = run_spec(RunSpec(work, Options(np=0, data="df"), "barrier", "test"), View()).values
java = session.sparkContext._gateway.proc
java.kill()
java.wait()
attempt("Java has ended", 2)
"""
OWN_MODULE = """
import own_package.part

def double(x):
    return 2 * x

class Net:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return self.weight * x
"""
BARE = """
OFFERED = '''
from sparkring import HorovodRunner, MirroredStrategyRunner, RunResult, TorchDistributor, log, run, spark, world
import sparkdl, sparkdl.horovod
[HorovodRunner is sparkdl.HorovodRunner, log is not None, sparkdl.horovod.log_to_driver is not None]
'''
os.environ["PYSPARK_PYTHON"] = {python!r}
sys.path.insert(0, {site!r})
import numpy
import sparkring
from sparkring.engine.doctor import spark as doctor
from sparkring.engine.predictions import queries
from sparkring.engine.run import warm_gang
from sparkring.errors import LaunchError, RunFailed, SlotsError
from sparkring.launchers import PLACES, tunnel
session = spark({url!r}, **{{"spark.cores.max": "2"}})
try:
    run("rank", 0)
except SlotsError as error:
    print("FOUND", error, flush=True)

def refused(source, **options):
    try:
        work = Cell(source, {{"df": session.range(4), "x": numpy.ones(2)}})
        framework = "barrier" if options else "plain"
        return run_spec(RunSpec(work, Options(np=1, **options), framework, "test", source), View()).values
    except LaunchError as error:
        print("REFUSED", error)

refused("x.sum()")
refused("list(rows)", data="df")
import made_pure
view = View()
code = "import made_pure, made_changed; made_pure.twice(2), made_changed.x"
result = run_spec(RunSpec(Cell(code, {{}}), Options(np=1), "plain", "test", code), view)
print("SENT", result.value, *(notice.text for notice in result.record.notices), flush=True)
print("VALUES", run("made_pure.twice(x)", 1, {{"made_pure": made_pure, "x": 3}}).value, flush=True)
for source in ("print('begins'); import made_compiled", "def f():\\n    import made_compiled\\nf()"):
    try:
        run(source, 1)
    except RunFailed as error:
        print("LACKING", error.record.ranks[0].failure.advice, error.record.recent_count, flush=True)
source = "try:\\n    import made_compiled\\nexcept ImportError:\\n    made_compiled = None\\nmade_compiled"
print("GUARDED", run(source, 1).value)
source = "import sys; sys.modules['made_compiled'] = sys; import made_compiled; made_compiled is sys"
print("PROVIDED", run(source, 1).value)
print("ITEMS", sparkring.foreach(made_pure.twice, [1, 2, 3], np=2, quiet=True).values, flush=True)

from sparkring.capture import environment
environment._site_folders = lambda: [{site!r}]  # the notebook's own packages are large
def imports(item=0):
    import made_changed, made_compiled
    return made_changed.x, sys.prefix, item
code = "import made_changed, made_compiled; made_changed.x, sys.prefix, 0"
result = run_spec(RunSpec(Cell(code, {{"sys": sys}}), Options(np=2, env_pack=True), "plain", "test", code), View())
print("PACKED", result.values)
print("ROW", result.record.captured[-1], result.record.notices[0].text)
print("PACKED", sparkring.foreach(imports, [0, 0], np=2, env_pack=True, quiet=True).values)
with sparkring.gang(np=1, framework="plain", env_pack=True, quiet=True) as gang:
    print("PACKED", gang.run(imports).values, flush=True)
print("PATH", run("__import__('sys').prefix, __import__('sys').path", 1).value)
print("OFFERED", run(OFFERED, 1).value)
session.stop()
"""

LATE = """
from sparkring.errors import SlotsError
session = spark({url!r}, **{{"spark.cores.max": "4", "spark.executor.memory": "600m"}})
View.refresh = lambda self, record: print("NOTICES", [notice.text for notice in record.notices], flush=True)
for n in (5, 4):
    try:
        run("rank", n)
    except (SlotsError, KeyboardInterrupt) as error:
        print("ENDED", type(error).__name__, error, flush=True)
print("VALUES", run("rank", 4, max_restarts=1).values)
session.stop()
"""


def other_python(folder: Path) -> str:
    """Return the path of a Python of another minor version, or of a script that makes this Python claim to be one."""
    for minor in range(8, 15):
        path = shutil.which(f"python3.{minor}")
        if path and minor != sys.version_info[1]:
            done = subprocess.run(
                [path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, check=False
            )
            if done.stdout.strip() == str(minor).encode():
                return path
    (folder / "sitecustomize.py").write_text(
        "import sys\nreal = sys.version_info\n"
        "class Version(tuple):\n    major, minor, micro = 3, 99, 0\n"
        "sys.version_info = Version((3, 99, 0, 'final', 0))\n"
    )
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def cases() -> dict[str, list]:
    """The outcome of each case. The first test that needs the outcomes runs all cases in one driver."""
    return {}


@pytest.fixture
def attempts(cases, driver, tmp_path):
    """For each case, the error's type and text, the values, and the notices."""
    if not cases:
        shipped = tmp_path / "shipped.py"
        shipped.write_text("value = 42\n")
        own = tmp_path / "own"
        (own / "own_package").mkdir(parents=True)
        (own / "own_package/part.py").write_text("x = 1\n")
        (own / "own_module.py").write_text(OWN_MODULE)
        given = f"OTHER, SHIPPED, OWN = {other_python(tmp_path)!r}, {str(shipped)!r}, {str(own)!r}\n"
        text = driver(CASES.format(cases=given + TRIED)).wait()
        assert "FOUND" in text, text
        cases.update(json.loads(text.rpartition("FOUND ")[2].splitlines()[0]))  # py4j may log more lines after it
    return cases


@pytest.mark.standalone("the slots are counted on the cluster")
def test_too_few_slots(tasks):
    """The error gives both numbers, and says what to use instead."""
    with pytest.raises(SlotsError, match=r"needs 99 task slots, .* 4 in all.*-n -99") as caught:
        tasks.run("rank", n=99)
    assert "-n 4" in str(caught.value)


@pytest.mark.standalone("the cluster replaces its executors")
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"max_restarts": 1}, marks=pytest.mark.extended("repetition", "without restarts"))]
)
def test_an_executor_that_was_just_lost_is_waited_for(tasks, spark, capsys, options):
    (executor,) = tasks.run(
        "import psutil\n[one.pid for one in psutil.Process().parents() if 'java' in one.name()][0]", n=1
    ).values
    psutil.Process(executor).kill()
    until(lambda: slots(cluster_of(spark)).total == 2, "Spark knows that it has lost an executor")
    assert tasks.run("rank", n=4, **options).values == [0, 1, 2, 3]
    said = capsys.readouterr().err if options else tasks.view.record.notices[0].text
    assert mentions(said, "s for executors", "Spark lost one")


@pytest.fixture
def unreachable(monkeypatch):
    """Executors cannot connect to this process."""
    monkeypatch.setattr(Classic, "address", lambda cluster: Address("127.0.0.2", "127.0.0.1", 0))


@pytest.mark.parametrize("options", [{}, {"max_restarts": 2}])
def test_members_that_cannot_reach_the_driver(tasks, unreachable, options):
    """Without a slot for the jobs that carry messages, the launch is refused, and does not try again."""
    with pytest.raises(SlotsError, match=UNREACHED) as caught:
        tasks.run("rank", 4, **options)
    assert mentions(str(caught.value), "-n 3", "spark.driver.host")
    assert len(tasks.view.record.attempts) <= 1


def test_rings_through_spark_jobs(tasks, unreachable, capsys):
    """If executors cannot connect, messages go through Spark jobs. The user is told once."""
    tunnel._explained.clear()
    assert tasks.run("print('seen', rank)\nrank", 2).values == [0, 1]
    assert {line.text for line in tasks.view.record.recent} == {"seen 0", "seen 1"}
    told = capsys.readouterr().err
    assert re.search(UNREACHED, told.removeprefix("sparkring: "))
    assert told.count("messages go through") == 1
    with pytest.raises(RunFailed, match="→ 3  1 / rank"):
        tasks.run("x = 1\n1 / rank", 2)
    blob = os.urandom(20_000_000)
    assert tasks.run("blob", 1, namespace={"blob": blob}).values == [blob]
    assert tasks.run("context.allGather(str(rank))", 2, framework="barrier").values == [["0", "1"]] * 2
    kill = "import os, time\nos.kill(os.getpid(), 9) if rank else time.sleep(1000)"
    with pytest.raises(RunFailed, match="killed by SIGKILL"):
        tasks.run(kill, 2)
    assert "messages go" not in capsys.readouterr().err
    until(lambda: not tunnel._tunnels, "the tunnel has ended")


@pytest.mark.extended("launcher", "the restarts of test_restarts.py")
def test_a_restart_through_spark_jobs(tasks, unreachable, tmp_path):
    once = f"""
        import os, time
        marker = {str(tmp_path / "marker")!r}
        first = not os.path.exists(marker)
        context.allGather("looked")
        if first and rank:
            open(marker, "w").close()
            os.kill(os.getpid(), 9)
        time.sleep(1000 if first else 0)
        rank
    """
    assert tasks.run(once, 2, framework="barrier", max_restarts=1).values == [0, 1]


def test_other_launches_through_spark_jobs(spark, spark_gang, unreachable):
    """Warm gangs, Stop on them, and items. A pool leaves a slot for the jobs."""
    spark_gang.start(2)
    assert spark_gang.values("kept = rank") == [None, None]
    spark_gang.view.on_refresh = lambda record: signal.raise_signal(signal.SIGINT) if ready(2)(record) else None
    with pytest.raises(KeyboardInterrupt, match="stays up"):
        spark_gang.cell(f"{READY}\nimport time; time.sleep(1000)")
    spark_gang.view.on_refresh = lambda record: None
    assert spark_gang.values("kept") == [0, 1]
    warm_gang.stop("spark")
    assert list(sparkring.foreach(str, range(6), np=4).values) == [str(item) for item in range(6)]


def test_what_the_doctor_finds_about_the_way(spark, unreachable, capsys):
    """Later launches know it, -n 0 leaves a slot, and queries with predictions say that they are not shown."""
    cluster = cluster_of(spark)
    tunnel.note_reach(cluster, "")
    assert PLACES["spark"].every_slot() == 4
    (found,) = [one for one in doctor.check(None, str).findings if one.topic == "driver's port"]
    assert (found.level, found.advice) == ("note", cluster.reachable_by)
    assert mentions(tunnel.why_needed(cluster), "cannot connect", "127.0.0.2:", "Connection refused")
    assert PLACES["spark"].every_slot() == 3
    for _ in range(2):
        assert queries.watch(cluster, "title", "code") is None
    assert capsys.readouterr().err.count("no live view") == 1


@pytest.mark.forked("torch")
@pytest.mark.extended("library", "test_rings_through_spark_jobs, and test_copies_get_the_keys_of_other_ranks")
def test_horovod_through_spark_jobs(tasks, unreachable):
    """Horovod's rendezvous store is beside the relay."""
    cell = """
        import horovod.torch as hvd, torch
        hvd.init()
        float(hvd.allreduce(torch.ones(1) * (rank + 1), op=hvd.Sum))
    """
    assert tasks.run(cell, 2, framework="horovod").values == [3.0, 3.0]


def test_why_the_driver_cannot_be_reached(monkeypatch):
    """The reason is the system's, unless something else is wrong."""
    monkeypatch.setattr(spark_task, "_CONNECT_S", 0.2)
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())
        for words, (host, port) in {
            "Name or service not known|Temporary failure in name resolution": ("no-such-host.invalid", 1),
            "Connection refused": ("127.0.0.1", 1),
            "timed out": full.getsockname(),
        }.items():
            reason = spark_task._unreached(host, port)
            assert re.search(rf"{socket.gethostname()} .*driver .*{host}:{port}: ({words})\.$", reason)
        for answer, words in ((b"HTTP/1.1 400", "another program answered"), (GREETING, "took too long to answer")):
            with ThreadPoolExecutor(1) as other:
                asked = other.submit(spark_task._unreached, *taken.getsockname())
                accepted, _ = taken.accept()
                with accepted:
                    accepted.sendall(answer)
                    assert words in asked.result()


def test_executors_that_the_settings_promise(driver, lonely_master):
    """A launch waits for the second executor, says so, and can be interrupted. No launch waits for more than that."""
    lonely_master.add()
    found = driver(LATE.format(url=lonely_master.url))
    found.until_said("ENDED SlotsError needs 5 task slots")
    found.until_said(
        "waiting up to .* s for executors: spark.cores.max=4 promises 4 task slots, and Spark has 2 of the 4"
    )
    found.process.send_signal(signal.SIGINT)
    found.until_said("ENDED KeyboardInterrupt sparkring: interrupted, while 4 ranks were waiting for executors")
    found.until_said("sparkring: waiting up to")
    lonely_master.add()
    found.until_said(r"VALUES \[0, 1, 2, 3\]")
    found.wait()


@pytest.mark.parametrize(
    ("master", "settings", "total", "promised"),
    [
        ("k8s://x", {}, 0, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 0, 6),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "2"}, 2, 6),
        ("spark://x", {"spark.executor.instances": "4"}, 2, 8),
        ("spark://x", {"spark.cores.max": "6", "spark.executor.instances": "1"}, 2, 6),
        ("spark://x", {}, 2, 0),
    ],
)
def test_slots_that_the_settings_promise(master, settings, total, promised):
    context: Any = SimpleNamespace(master=master, getConf=lambda: SimpleNamespace(get=settings.get))
    hosts = ["driver", *(["one"] if total else [])]
    assert _promised(Classic(context), Slots(total, 0, master, hosts, [], 0.0, 0.0))[0] == promised


def test_without_a_session_one_is_made(attempts):
    """A notice says that a session is created, and the next cell uses it, too."""
    kind, text, values, notices = attempts["no session"]
    assert (kind, text, values) == ("", "", [0, 1])
    assert "no SparkSession yet" in notices[0]
    assert attempts["a made session"][2:] == [[0, 1], []]
    assert attempts["own jobs"] == 10


def test_a_gang_ends_with_its_session(attempts):
    """A message says so at once. A later cell's error gives the reason."""
    kind, text, said = attempts["the gang's session was stopped"]
    assert kind == "LaunchError"
    assert mentions(text, "SparkSession", "stopped")
    assert sum(mentions(line, "gang of 2 ranks", "ended") for line in said) == 1  # it may also have been slow to start


def test_a_stopped_session_is_told(attempts):
    """A session that was stopped is not silently replaced."""
    kind, text, *_ = attempts["stopped"]
    assert kind == "LaunchError"
    assert "has been stopped" in text


def test_a_java_that_has_ended_is_told(attempts):
    """The error is one sentence, although pyspark itself still believes that the session is running."""
    kind, text, *_ = attempts["Java has ended"]
    assert kind == "LaunchError"
    assert mentions(text, "Java process", "ended", "restart the kernel")


def test_dynamic_allocation_in_local_mode(attempts):
    """Spark ignores the setting there."""
    assert attempts["dynamic allocation"][2] == [0]


def test_a_fixed_port(attempts):
    """spark.sparkring.driver.port is used; if it is taken, the error says so."""
    kind, text, *_ = attempts["taken port"]
    assert kind == "LaunchError"
    assert f"127.0.0.1:{attempts['port']}" in text
    assert "spark.sparkring.driver.port" in text
    assert attempts["free port again"][2] == [0]


def test_all_gangs_and_predictions_share_the_fixed_port(attempts):
    """A warm gang, a run, the gangs of items and the reports of predictions use the same port at once."""
    assert attempts["free port"][2] == [0, 1]
    assert attempts["at one port"] == [1, [2, 3], [0, 1, 2, 3], True]


def test_under_a_local_master_members_run_this_python(attempts):
    """Members run this Python even if Spark is set to run a Python of another version, without this one's packages."""
    assert attempts["another Python"][2] == [0]
    assert attempts["its rows"] == [[[0, 1], sys.executable], [[2, 3], sys.executable]]


def test_executors_with_another_python(driver, lonely_master, tmp_path):
    """One sentence says which package the executors lack, with the paths of both Pythons and the setting to change.

    The notebook's packages are not on the executors' path. All names of sparkring and sparkdl can be imported, even if
    the libraries behind them are missing. Without an executor, np=0, which takes every slot, is an error. Other runs
    wait for the executors that the session's settings promise.
    """
    folder = tmp_path / "bare"
    venv.create(folder, symlinks=True, with_pip=False)
    python = str(folder / "bin" / "python")
    site = tmp_path / "site-packages"
    install(
        site, "made_pure", "import made_other\ntwice = made_other.twice\n", requires="made_other>=1; python_version>'3'"
    )
    install(site, "made_other", "def twice(x):\n    return 2 * x\n")
    install(site, "made_compiled", "", compiled=True)
    install(site, "made_changed", "x = 2\n", version="2.0")
    (theirs,) = folder.glob("lib/python*/site-packages")
    install(theirs, "made_changed", "x = 1\n")
    found = driver(BARE.format(python=python, url=lonely_master.url, site=str(site)))
    found.until_said("FOUND -n 0 uses every task slot, but there are none")
    lonely_master.add()
    text = found.wait()
    package, rows = (line for line in text.splitlines() if line.startswith("REFUSED"))
    for line, lacks in ((package, f"numpy {np.__version__}"), (rows, "no pyarrow")):
        assert all(part in line for part in (lacks, sys.executable, python, "PYSPARK_PYTHON")), line
    (path,) = (line for line in text.splitlines() if line.startswith("PATH"))
    prefix, entries = ast.literal_eval(path.removeprefix("PATH "))
    assert prefix == str(folder)
    theirs = [entry for entry in entries if "site-packages" in entry and "pyspark" not in entry]
    assert all(entry.startswith(prefix) for entry in theirs), entries
    assert "OFFERED [True, True, True]" in text, text
    sent = next(line for line in text.splitlines() if line.startswith("SENT"))
    assert sent.startswith("SENT (4, 1) "), sent
    for part in ("made_pure==1.0", "made_changed 1.0", f"{python} -m pip install made_changed==2.0"):
        assert part in sent
    early, late = (line for line in text.splitlines() if line.startswith("LACKING"))
    command = f"{python} -m pip install made_compiled==1.0"
    assert all(command in line for line in (early, late)), text
    assert early.endswith(" 1"), "the cell has not begun: the only line is the error"
    packed = [ast.literal_eval(line) for line in re.findall("^PACKED (.*)", text, re.MULTILINE)]
    ((x, prefix, number),) = {value for values in packed for value in values}
    assert (x, number) == (2, 0)
    assert Path(prefix).parent.name.startswith("sparkring-environments-")
    assert [entry.name for entry in Path(prefix).parent.iterdir() if entry.is_dir()] == [Path(prefix).name]
    assert "4 packages" in text.partition("ROW")[2]
    shutil.rmtree(Path(prefix).parent)
    assert re.findall(r"^(?:VALUES|GUARDED|PROVIDED|ITEMS) (.*)", text, re.MULTILINE) == [
        "6",
        "None",
        "True",
        "[2, 4, 6]",
    ]


def install(site, name, text, *, version="1.0", requires="", compiled=False):
    """Install a package of one module into a folder, as pip does."""
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (site / f"{name}.py").write_text(text)
    files = [f"{name}.py", f"{about.name}/METADATA", f"{about.name}/WHEEL"]
    if compiled:
        (site / f"{name}_parts.so").write_bytes(b"")
        files.append(f"{name}_parts.so")
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else "")
    )
    (about / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(not compiled).lower()}\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_module_that_spark_ships_is_there_on_the_ranks(attempts):
    """Ranks can import the module even if they cannot see the driver's copy."""
    assert attempts["a shipped module"] == [42, 42]


def test_own_modules_are_sent(attempts):
    """Ranks and items use the notebook's own modules, which they cannot see, and the record says what was sent."""
    assert attempts["own modules"] == [[6, 4, 1]] * 2
    assert attempts["own modules sent"] == [["your module", "by value"]] * 2
    assert attempts["items with own modules"] == [2, 4]
