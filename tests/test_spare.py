"""Tests of the spare process: which launches it serves, and that forked ranks behave like new processes."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from typing import Any

import psutil
import pytest
import spares as spare_processes
from leaks import runs
from spares import ready
from texts import mentions
from waiting import until

import sparkring
from sparkring.errors import RunFailed
from sparkring.launchers import spare
from sparkring.launchers.spare import SpareProcess, Spares, setting_of
from sparkring.notebook import expected
from sparkring.runtime import limits, storage
from sparkring.worker.rank import preloads

# With this, launches of one rank and of two have the same settings. pandas stands for all frameworks: it is imported
# fast, and NumPy's and pyarrow's libraries start threads.
ENV = (("OMP_NUM_THREADS", "2"),)
STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
AHEAD = "from sparkring.worker.rank import preloads; "


def new(spares: Spares, *modules: str, **environment: str) -> SpareProcess:
    return spare_processes.new(spares, 1, *modules, **dict(ENV), **environment)


def test_forked_ranks_are_like_new_processes(local, spares, tmp_path, monkeypatch):
    """The second launch is served by a process that has imported the same modules as the first launch."""
    assert local.run("import pandas\n__import__('threading').active_count()", 1, env=ENV).value == 2
    found = ready(spares)
    assert found.wanted.modules == ("pandas",)
    assert psutil.Process(found.pid).num_threads() == 1
    monkeypatch.chdir(tmp_path)
    source = f"""
        import numpy, os, random, signal, sys, tempfile, threading
        {AHEAD}
        print("heard", file=sys.__stdout__)
        environment = vars(os)["env" + "iron"]  # this name in a cell would mean new processes
        same = [preloads.ahead, os.getcwd(), sorted(environment), sorted(os.listdir("/proc/self/fd"), key=int)[:-1]]
        same += threading.active_count(), os.getpriority(os.PRIO_PROCESS, 0), signal.getsignal(signal.SIGCHLD)
        same, random.random(), numpy.random.rand(), tempfile.mktemp(), os.getsid(0)
    """
    forked = local.run(source, 2, env=ENV).values
    assert [line.text for line in local.view.record.recent] == ["heard", "heard"]
    assert spares.spare is found
    monkeypatch.setenv("SPARKRING_SPARE", "0")
    cold = local.run(source, 1, env=ENV).value
    assert spares.spare is None
    assert [values[0][0] for values in (*forked, cold)] == [("pandas",), ("pandas",), ()]
    assert len({str(values[0][1:]) for values in (*forked, cold)}) == 1, "as a new process has it"
    assert all(len(set(drawn)) == 3 for drawn in zip(*(values[1:] for values in (*forked, cold)), strict=True))


def test_a_first_launch_imports_once(local, spares, tmp_path, monkeypatch):
    """If it is known which modules ranks import first, they are forked from a process that has imported these."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    (packages / "another.py").touch()
    (tmp_path / "mine.py").touch()
    env = (*ENV, ("PYTHONPATH", os.pathsep.join((str(tmp_path), str(packages), *sys.path))))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(spare, "FRAMEWORKS", spare.FRAMEWORKS | {"another", "starts_a_thread"})
    ahead = f"{AHEAD}preloads.ahead"
    assert local.run(f"import mine, pandas\n{ahead}", 1, env=env).value == (), "the user's module may change anything"
    spares.stop()
    assert local.run(f"import os\nos.environ['X'] = '1'\nimport pandas\n{ahead}", 1, env=env).value == ()
    spares.stop()
    assert local.run(f"import starts_a_thread\n{ahead}", 2, env=env).values == [(), ()], "it cannot be forked"
    spares.stop()
    assert local.run(f"import numpy as np, pandas as pd\n# not torch\n{ahead}", 2, env=env).values == [("pandas",)] * 2
    assert spares.spare is not None
    assert spares.spare.wanted.modules == ("pandas",), "it stays for the next launch"
    assert local.run(f"import another\n{ahead}", 1, env=env).value == ("another",)


def test_what_the_notebook_has_imported(local, spares, monkeypatch):
    """When the notebook has imported a package, a spare process imports it before the first launch."""
    monkeypatch.setattr(expected, "PACKAGES", ("pandas", "sklearn"))
    monkeypatch.setattr(expected, "_noted", frozenset())
    monkeypatch.setitem(sys.modules, "pandas", importlib.import_module("pandas"))
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    expected.note_imports(None)
    found = ready(spares)
    assert found.wanted.modules == ("pandas",)
    source = f"{AHEAD}preloads.ahead"
    assert local.run(source, limits.cores()).values == [("pandas",)] * limits.cores()
    expected.note_imports(None)
    assert spares.spare is found, "nothing new has been imported"


def test_what_ranks_of_torch_import_for_their_optimizers(monkeypatch):
    pytest.importorskip("torch")
    wanted = []
    fake = types.SimpleNamespace(expect=lambda setting, modules: wanted.append(modules))
    monkeypatch.setattr(sys.modules["sparkring.launchers.spare"], "spares", fake)
    monkeypatch.setattr(expected, "PACKAGES", ("torch",))
    monkeypatch.setattr(expected, "_noted", frozenset())
    expected.note_imports(None)
    assert wanted == [("torch", "torch._dynamo")]


def test_a_launch_waits_for_imports_that_are_under_way(local, spares, tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "slow.py").write_text("import time\ntime.sleep(0.5)\n")
    (packages / "other.py").touch()
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(spare, "FRAMEWORKS", spare.FRAMEWORKS | {"slow", "other"})
    env = (*ENV, ("PYTHONPATH", os.pathsep.join((str(packages), *sys.path))))

    def begun() -> SpareProcess:
        spares.stop()
        spares.expect(setting_of({**os.environ, **storage.root_for_ranks(), **dict(env)}, 1), ("slow", "other"))
        return until(lambda: spares.spare, "a spare process")

    found = begun()
    assert local.run(f"import other\n{AHEAD}preloads.ahead", 1, env=env).value == ("slow", "other")
    assert spares.spare is found
    found = begun()
    assert local.run(f"{AHEAD}preloads.ahead", 1, env=env).value == (), "these ranks might never import it"


def test_what_imports_bind_to_the_streams(local, spares, tmp_path, monkeypatch):
    spare_processes.check_streams(local, tmp_path, monkeypatch)


def test_horovod_and_pools_on_forked_ranks(local, spares, monkeypatch):
    new(spares, "torch", "horovod.torch")
    ready(spares)
    cell = f"""
        import horovod.torch as hvd, torch
        {AHEAD}
        hvd.init()
        preloads.ahead, float(hvd.allreduce(torch.ones(1000) * rank, op=hvd.Sum)[0]), torch.rand(1).item()
    """
    (one, two) = local.run(cell, 2, framework="horovod", env=ENV).values
    assert one[:2] == two[:2] == (("torch", "horovod.torch"), 1.0)
    assert one[2] != two[2]
    for name, value in ENV:
        monkeypatch.setenv(name, value)

    def item(number: int) -> Any:
        from sparkring.worker.rank import preloads

        return preloads.ahead, number

    found = sparkring.foreach(item, range(3), np=-2, fresh_process=True)
    assert found.values == [(("torch", "horovod.torch"), number) for number in range(3)]
    planned = sparkring.foreach(item, range(3), np=-2, plan=True)
    assert planned.memory_bytes < 60_000_000 < 120_000_000 < planned.shared_bytes, "all items share what was imported"


def test_the_ends_of_forked_ranks(local, spares):
    """Signals that end ranks and members are reported as for new processes. The spare process's end harms no rank."""
    found = new(spares, "pandas")
    ready(spares)
    with pytest.raises(RunFailed) as caught:
        local.run(
            f"{AHEAD}import os, signal\nif rank: os.kill(os.getpid(), signal.SIGSEGV)\n\n__import__('time').sleep(60)",
            2,
            env=ENV,
        )
    assert (caught.value.record.failed_rank, caught.value.record.failure.signal) == (1, "SIGSEGV")
    with pytest.raises(RunFailed, match=r"process 2 of 2 .*killed .*signal 9") as caught:
        local.run("import os, time\nif rank: os.kill(os.getppid(), 9)\ntime.sleep(60)", 2, env=ENV)
    assert caught.value.record.failed_rank == 1

    def kill_the_spare(record: Any) -> None:
        if record.recent_count and runs(found.pid):
            psutil.Process(found.pid).kill()
            found._process.wait()

    assert spares.spare is found
    local.view.on_refresh = kill_the_spare
    done = local.run(
        f"""
        {AHEAD}import os, time
        print("up")
        while os.path.exists("/proc/{found.pid}"): time.sleep(0.01)
        preloads.ahead
        """,
        2,
        env=ENV,
    )
    assert done.values == [("pandas",)] * 2


def test_when_new_processes_are_started(local, spares, tmp_path, monkeypatch):
    """A launch is served only if its processes would import the modules in the same way as the spare process."""
    found = new(spares, "pandas")
    ready(spares)
    ahead = f"{AHEAD}preloads.ahead"
    assert local.run(f"{ahead}", 1, env=ENV).value == ("pandas",)
    assert local.run(f"import os\nos.environ['X'] = '1'\n{ahead}", 1, env=ENV).value == ()
    assert local.run(f"torch = 1\n{ahead}", 1, env=ENV).value == ()
    assert spares.spare is found
    # A module of the user changes a variable that imports depend on. The rank says so, and the next launch has new
    # processes.
    (tmp_path / "changes.py").write_text("import os\nos.environ['KERAS_BACKEND'] = 'torch'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert local.run(f"import changes\n{ahead}", 1, env=ENV).value == ("pandas",)
    assert any(mentions(line.text, "KERAS_BACKEND", "pandas") for line in local.view.record.recent)
    assert spares.spare is None
    assert local.run(f"import pandas, changes\n{ahead}", 1, env=ENV).value == (), "the same cell has new processes now"
    found = new(spares, "pandas")
    ready(spares)
    assert local.run(ahead, 1, env=(*ENV, ("TF_NAME", "1"))).value == ()
    until(lambda: found.ended, "a spare process that has another environment is ended")


def test_variables_that_are_read_after_an_import_may_change(monkeypatch):
    """Lightning sets the first variable when it is imported, and PyTorch the second. Both are read only later."""
    monkeypatch.setattr(preloads.imports, "note_order", lambda names: None)
    watched = preloads.Preloads()
    watched.begin()
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "set by Lightning")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by PyTorch")
    assert watched.changed() == []
    monkeypatch.setenv("KERAS_BACKEND", "another one")
    assert watched.changed() == ["KERAS_BACKEND"]


def test_a_changed_installation_is_another_setting(tmp_path, monkeypatch, spares):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)
    before = setting_of(os.environ, 1)
    assert setting_of(os.environ, 1) == before
    (packages / "torch-9.dist-info").mkdir()
    assert setting_of(os.environ, 1) != before
    assert setting_of({**os.environ, "A": "1"}, 1) != setting_of(os.environ, 1)


def test_a_spare_process_that_gives_up(local, spares, tmp_path, monkeypatch):
    """A spare process ends if a module starts a thread or cannot be imported, or if no launch comes for a while."""
    (tmp_path / "starts_a_thread.py").write_text(STARTS_A_THREAD)
    for module in ("starts_a_thread", "no_such_module"):
        found = new(spares, module, PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path)))
        until(found.has_refused, "the spare process ends")
        assert local.run(f"{AHEAD}preloads.ahead", 1).value == ()
        assert spares.spare is None
    monkeypatch.setattr(spare, "IDLE_S", 0.0)
    found = new(spares, "json")
    ready(spares)
    until(lambda: found.ended, "it is idle for too long")
    assert not found.has_refused()


def test_machines_without_spare_processes(spares, monkeypatch):
    """There is no spare process if there is too little memory, or if there is a GPU."""
    setting = setting_of(os.environ, 1)
    assert setting is not None
    for module, name, value in ((spare, "LEAST_BYTES", 1 << 60), (spare.gpus, "found", lambda visible: ["a GPU"])):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            spares.note_imports(setting, ("json",))
            until(lambda: not any(thread.name == "sparkring-spare" for thread in threading.enumerate()), "the timer")
            assert spares.spare is None
    spares.note_imports(setting, ("json",))
    ready(spares)


def test_nothing_outlives_a_killed_driver(driver, monkeypatch):
    monkeypatch.setenv("SPARKRING_SPARE", "1")
    found = driver("""
        from sparkring.launchers import spare
        spare.REST_S = 0.0
        run("import pandas", -2)
        while not (spare.spares.spare and spare.spares.spare.is_ready()): time.sleep(0.01)
        run('''
            from sparkring.worker.rank import preloads
            import subprocess, time
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            print("up", *preloads.ahead, flush=True)
            time.sleep(1000)
        ''', -2)
    """)
    for rank in (0, 1):
        found.until_said(rf"^\[{rank}\] up pandas$")
    assert len(found.family()) == 7  # the spare process, two members, two ranks and their two children
    found.process.kill()
    until(lambda: not found.family(), "nothing is left")
