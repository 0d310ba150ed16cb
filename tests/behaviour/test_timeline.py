"""--timeline: Horovod's timeline of a real ring is saved with the run, however its rank ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rings import ready

from sparkring.errors import RunFailed
from sparkring.history import run_store

STEPS = """
import os, time
import torch
import horovod.torch as hvd
hvd.init()
for step in range(10):
    if rank == 1:
        time.sleep(0.1)
    handles = [hvd.allreduce_async(torch.ones(10), name=f'"<i>{name}') for name in ("w", "b")]
    for handle in handles:
        hvd.synchronize(handle)
"""


def kept(record, name: str = "timeline.json") -> list[dict]:
    """Return the events in the run's timeline file."""
    return json.loads((Path(record.log_folder) / name).read_text())


@pytest.mark.slow
@pytest.mark.standalone("the timeline's files are the executors'")
@pytest.mark.extended_on("local", "the tests below save timelines on this machine")
def test_the_rank_that_sleeps_comes_out_as_the_slowest(ring, spares):
    """The file is valid. The live and saved records have its summary, which says which rank the others waited for."""
    record = ring.run(STEPS, n=3, framework="horovod", timeline=True).record
    (saved,) = record.timelines
    assert saved.late[0].rank == 1
    assert saved.late[0].waited_s > 0.3
    assert saved.late[0].waited_s > sum(each.waited_s for each in saved.late[1:])
    assert saved.problem == ""
    assert {each.name for each in saved.slowest} == {'allreduce."<i>w', 'allreduce."<i>b'}
    assert all(each.count >= 8 for each in saved.slowest)
    assert saved.negotiating_s > saved.reducing_s / 10 > 0
    assert sum(each["ph"] == "B" and each["name"] == "GLOO_ALLREDUCE" for each in kept(record)) >= 16
    assert run_store.load(Path(record.log_folder)).timelines == record.timelines


@pytest.mark.slow
def test_each_attempt_has_one_although_its_rank_was_killed(local, spares):
    """After SIGKILL, the unfinished file is made valid and saved. Each attempt has a file of its own."""
    with pytest.raises(RunFailed) as failed:
        local.run(
            f"{STEPS}\ntime.sleep(0.3)\nif rank == 0: os.kill(os.getpid(), 9)\nhvd.allreduce(torch.ones(1))",
            framework="horovod",
            timeline=True,
            max_restarts=1,
        )
    record = failed.value.record
    assert [(each.name, each.attempt) for each in record.timelines] == [("timeline.json", 1), ("timeline-2.json", 2)]
    for each in record.timelines:
        assert len(kept(record, each.name)) > 100
        assert each.operations > 10


@pytest.mark.slow
@pytest.mark.extended("repetition", "test_each_attempt_has_one_although_its_rank_was_killed")
def test_a_time_limit_keeps_it(local, spares, limit):
    """The timeline is saved even if ranks do not respond and are killed."""
    with pytest.raises(RunFailed) as failed:
        local.run(
            f"{STEPS}\nimport signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(1000)",
            framework="horovod",
            timeline=True,
            timeout_s=limit(local, ready(2)),
        )
    (saved,) = failed.value.record.timelines
    assert saved.operations > 10


def test_a_cell_without_horovod_is_told_that_there_is_none(local):
    """No file is saved, and a notice says what a timeline needs."""
    record = local.run("rank", framework="horovod", timeline=True).record
    assert record.timelines == ()
    assert not (Path(record.log_folder) / "timeline.json").exists()
    assert any("hvd.init()" in notice.text for notice in record.notices)


def test_without_the_option_nothing_is_recorded(local):
    """Horovod's response cache stays on, and no timeline file is set."""
    found = local.run(
        "import os\n[name for name in os.environ if name in ('HOROVOD_TIMELINE', 'HOROVOD_CACHE_CAPACITY')]",
        framework="horovod",
    )
    assert found.values == [[], []]
    assert found.record.timelines == ()


def test_a_member_that_is_killed_leaves_no_file(local, wait_until):
    """If a member was killed, the launcher removes the rank's file instead of the member."""
    with pytest.raises(RunFailed, match="lost"):
        local.run("import os, time\nif rank == 0: os.kill(os.getppid(), 9)\ntime.sleep(1000)",
                  framework="horovod", timeline=True)  # fmt: skip
