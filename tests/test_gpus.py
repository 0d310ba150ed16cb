"""Tests of how GPUs are found and divided among ranks. NVML is a stub (tests/plugins/nvml.c): there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from texts import mentions

from sparkring.engine.run.idle_gpus import IdleGpus
from sparkring.history import describe
from sparkring.history.events import GpuUsed, RankFinished, RankStarted, RunStarted
from sparkring.history.record import apply, replay

CASES = """
import json, os, sys
from sparkring.errors import LaunchError
from sparkring.launchers import gpus_in_use, local
from sparkring.worker.member import gpus

def addresses(visible):
    return [gpu.address for gpu in gpus.find(visible)]

def tried(function, *arguments):
    try:
        return function(*arguments)
    except LaunchError as error:
        return str(error)

def shares(size, each=None, visible=None):
    try:
        own, pinned, environment = local._shares(size, each, visible)
    except LaunchError as error:
        return str(error)
    return [[[gpu.address for gpu in gpus] for gpus in own], pinned, environment.get("CUDA_VISIBLE_DEVICES")]
"""


@pytest.fixture
def python(nvml_folder, monkeypatch):
    """Run a script in a process that finds four GPUs, and return the value of its last line. Options: FAKE_MIG, …"""
    monkeypatch.setenv("LD_LIBRARY_PATH", nvml_folder)
    monkeypatch.setenv("FAKE_GPUS", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(script, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        *lines, last = script.strip().splitlines()
        source = "\n".join([CASES, *lines, f"print(json.dumps({last}))"])
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_whole_gpus(python):
    """Whatever CUDA accepts in CUDA_VISIBLE_DEVICES is understood, and what it ignores is ignored."""
    found = python(
        "{text: addresses(text) for text in ('3, 1', '1,1,GPU-1111,2', 'GPU-2222,GPU-0000-fake', '1,7,2', 'GPU-,0', "
        "'0,GPU-9', '', '-1', '0,-1,1', 'NoDevFiles', 'none', 'MIG-00,1')} | {'all': addresses(None)}"
    )
    assert found == {
        "all": ["0", "1", "2", "3"],
        "3, 1": ["3", "1"],
        "1,1,GPU-1111,2": ["1", "2"],
        "GPU-2222,GPU-0000-fake": ["GPU-2222", "GPU-0000-fake"],
        "1,7,2": ["1"],
        "GPU-,0": [],  # the beginning of several UUIDs
        "0,GPU-9": ["0"],
        "": [],
        "-1": [],
        "0,-1,1": ["0"],
        "NoDevFiles": [],
        "none": [],
        "MIG-00,1": [],
    }


def test_mig_instances(python):
    """The instances of a divided GPU take its place. Whole GPUs beside them have UUIDs as addresses."""
    found = python(
        "{text: addresses(text) for text in ('0', '0,1', 'GPU-2222', 'MIG-21', 'MIG-2', 'MIG-20-fake,MIG-00', '3')} "
        "| {'all': addresses(None), 'resolved': gpus.resolved(['0', '3', '9', 'MIG-20-fake'])}",
        FAKE_MIG="2-20",
    )
    assert found == {
        "all": ["GPU-1111-fake", "MIG-00-fake", "MIG-20-fake", "MIG-01-fake", "MIG-21-fake"],
        "0": ["MIG-00-fake", "MIG-01-fake"],
        "0,1": ["MIG-00-fake", "MIG-01-fake", "GPU-1111-fake"],
        "GPU-2222": ["MIG-20-fake", "MIG-21-fake"],
        "MIG-21": ["MIG-21"],
        "MIG-2": [],  # the beginning of two UUIDs
        "MIG-20-fake,MIG-00": ["MIG-20-fake", "MIG-00"],
        "3": [],  # divided, but without instances
        "resolved": ["MIG-00-fake", "MIG-01-fake", "3", "9", "MIG-20-fake"],
    }


def test_gpus_that_a_cgroup_hides(python, tmp_path):
    """NVML lists a GPU whose device file is missing or cannot be opened, but CUDA does not count it."""
    for name in ("nvidiactl", "nvidia1", "nvidia3"):
        (tmp_path / name).touch()
    script = f"gpus.DEVICES = {str(tmp_path)!r}\n[addresses(None), addresses('0'), addresses('2'), shares(2, 1)[0]]"
    second, fourth = "GPU-1111-fake", "GPU-3333-fake"
    assert python(script) == [[second, fourth], [second], [], [[second], [fourth]]]


def test_shares(python):
    """Ranks get whole GPUs first, and are told what they see only if they could not find their GPU otherwise."""
    found = python("[shares(2), shares(5), shares(2, 2), shares(1, 1, '3,1')]")
    assert found == [
        [[["0"], ["1"]], False, None],
        [[[]] * 5, False, None],
        [[["0", "1"], ["2", "3"]], True, None],
        [[["3"]], True, None],
    ]
    mixed = python(
        "[shares(1), shares(2), shares(5), shares(6), shares(1, 2), shares(3, 1, '0,2'), "
        "local.pool_shares(2, 1, 1, '0'), local.pool_shares(3, 1, 0.5, '0'), local.default_at_once(1, 1, {}), "
        "local.default_at_once(1, 2, {})]",
        FAKE_MIG="2-2-",
    )
    first, second = "GPU-1111-fake", "GPU-3333-fake"
    mig = ["MIG-00-fake", "MIG-20-fake", "MIG-01-fake", "MIG-21-fake"]
    assert mixed[0] == [[[first]], False, f"{first},{second}"], "CUDA would otherwise show it only an instance"
    assert mixed[1] == [[[first], [second]], False, f"{first},{second}"]
    assert mixed[2] == [[[each] for each in (first, second, *mig[:3])], True, None]
    assert mixed[3][0] == [[each] for each in (first, second, *mig)]
    assert mixed[4] == [[[first, second]], True, None]
    assert mixed[5] == [[["MIG-00-fake"], ["MIG-01-fake"], ["MIG-20-fake"]], True, None]
    assert mixed[6:8] == [["MIG-00-fake", "MIG-01-fake"], ["MIG-00-fake", "MIG-01-fake", "MIG-00-fake"]]
    assert mixed[8] >= 1
    assert mixed[9] == 1
    assert mentions(
        python("shares(1, 2, 'MIG-00,MIG-01')"),
        "needs 2 GPUs",
        "1",
        "rank",
        "2",
        "0",
        "CUDA_VISIBLE_DEVICES='MIG-00,MIG-01'",
        "2 MIG",
        "not",
        "GPUs",
        "--gpus 0",
    )


def test_gpus_that_other_ranks_use_come_last(python):
    """Ranks of this notebook prefer GPUs that no other rank of the notebook uses, and still see all GPUs."""
    found = python(
        """
gpus_in_use.hold("a gang", gpus.find("0"))
gpus_in_use.hold("another gang", gpus.find("GPU-0000,1"))
during = [shares(1), shares(1, 1), shares(4, 1), shares(1, None, "1,0"), local.pool_shares(2, 1, 1, None)]
gpus_in_use.release("a gang")
gpus_in_use.release("another gang")
[during, shares(1)]
"""
    )
    first, one, four, narrowed, pool = found[0]
    assert first == [[["2"]], False, "2,3,1,0"]
    assert one == [[["2"]], True, None]
    assert four[0] == [["2"], ["3"], ["1"], ["0"]]
    assert narrowed == [[["1"]], False, None]
    assert pool == ["2", "3"]
    assert found[1] == [[["0"]], False, None]


def test_idle_gpus():
    """A GPU that is hardly used for a minute while its rank is running is named once, for one rank."""
    started = RunStarted(1.0, "id", "title", "code", 4, "local", "plain", "all")

    def used(rank, address, percent):
        return GpuUsed(address, "A", 1, 9, percent, time=2.0, rank=rank)

    ranks = [RankStarted(1.0, rank, "host", rank) for rank in range(4)]
    busy = [used(0, "0", 4), used(1, "1", 5), used(2, "2", None), used(3, "0", 4)]
    record = replay([started, *ranks, *busy])
    watch = IdleGpus()
    assert watch.new(record, 100.0) == watch.new(record, 159.0) == []
    (idle,) = watch.new(record, 160.0)
    assert idle == ("0", 0)
    assert mentions(describe.idle_gpus([idle], 60.0), "GPU 0", "rank", "0", "idle", "60")
    record = apply(record, used(1, "1", 0))
    assert watch.new(record, 170.0) == []
    assert watch.new(apply(record, used(1, "1", 90)), 180.0) == [], "it has worked in between"
    assert watch.new(record, 190.0) == []
    assert watch.new(apply(record, RankFinished(3.0, 1, "")), 249.0) == [], "its rank has finished"
    assert watch.new(record, 251.0) == []
    assert watch.new(record, 311.0) == [("1", 1)]
