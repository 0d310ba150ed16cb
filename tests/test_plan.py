"""Tests of plans: how many items fit at once, what the limit is, and how long all items take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from texts import mentions

from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.plan import plan
from sparkring.engine.foreach.result import ForeachResult
from sparkring.history.events import ItemMeasured
from sparkring.history.record import RunRecord
from sparkring.launchers.base import ItemRoom
from sparkring.runtime import limits
from sparkring.worker.member import process

GB = 10**9
RESULT = ForeachResult(RunRecord(), {}, {}, (), {}, {})


def of(*ranks: dict[str, Any], np: int = -4, items: int | None = 100, **room: Any) -> Any:
    usual = {
        "seconds": 2.0,
        "import_s": 3.0,
        "cpu_s": 1.0,
        "read_bytes": 10,
        "own_bytes": GB,
        "shared_bytes": GB // 2,
        "free_bytes": 100 * GB,
        "cores": 8,
    }
    measured = [ItemMeasured(**{**usual, **rank}) for rank in ranks or ({},)]
    return plan(RESULT, measured, ItemRoom(**room), items=items, options=ForeachOptions(np), wall_s=5.5)


def test_cores_bind():
    """An item that keeps half a core busy fits twice on each core. Running more at once would not be faster."""
    found = of()
    assert (found.fits, found.binds, found.warning) == (16, "cores", "")
    assert found.start_s == 3.5
    assert found.seconds_at(4) == 3.5 + 2 * 25
    assert found.seconds_at(16) == 3.5 + 3.0 + 2 * 7, "each process imports for itself, and each core is for two"
    assert found.seconds_at(32) == 3.5 + 3 * 3.0 + 2 * 100 / 16
    assert found.seconds_at(200) == found.seconds_at(100), "there are only 100 items"
    assert found.memory_at(200) == found.memory_at(100)
    assert mentions(str(of(np=-32)), "With 32", "need 16")
    assert mentions(str(found), "1 at once", "4 at once", "16 at once", "available")
    assert of({"cpu_s": 2.2}).fits == 7
    assert of({"cpu_s": 2.05}).fits == 8, "a little more than a core each still fits"
    assert of({"cpu_s": 40.0}).fits == 1


def test_memory_binds():
    """Memory that the items share counts once, and a tenth of the free memory stays free."""
    found = of({"free_bytes": 8 * GB})
    assert (found.fits, found.binds, found.memory_at(6)) == (6, "memory", 6_500_000_000)
    assert found.warning == ""
    assert mentions(of({"free_bytes": 8 * GB}, np=-8).warning, "8", "8.50 GB", "8.00 GB", "-6")
    assert of({"free_bytes": 0}).binds == "cores", "the free memory is not known"
    ranks = of({"free_bytes": 8 * GB}, {"free_bytes": 8 * GB, "cpu_s": 0.5})
    assert (ranks.fits, ranks.memory_bytes, ranks.cpu_share) == (3, 2 * GB, 0.75)


def test_gpus_bind():
    assert of(gpus=2, gpu_free=[80 * GB]).fits == 2
    found = of({"gpu_bytes": 30 * GB}, gpus=8, gpu_free=[80 * GB, 40 * GB])
    assert (found.fits, found.binds) == (3, "GPU memory")
    assert mentions(found.warning, "4", "not", "2 GPUs", "-3")
    assert "GPU memory" in str(found)


@pytest.mark.parametrize(("batch_size", "expected"), [(0, 32), (8, 8)])
def test_rule_of_thumb(batch_size, expected):
    found = of({"parameters": 1000, "parameter_bytes": 4000, "batch_size": batch_size})
    assert found.rule_bytes == 1000 * 4 * 2 * expected
    assert mentions(str(found), "1,000", "4", "2", f"size {expected}")


def test_an_unknown_number_of_items():
    found = of(items=None)
    assert (found.seconds_at(4), found.seconds_at(4, 10)) == (None, 3.5 + 2 * 3)
    assert "time for 100 items" in str(found)
    assert "</table>" in found._repr_html_()


def test_on_spark():
    """The memory and the cores of each host count, and Spark runs no more tasks than there are slots."""
    found = of(np=6, hosts=3, tasks=4 / 3)
    assert (found.fits, found.binds, found.memory_at(6)) == (4, "task slots", 2_500_000_000)
    assert mentions(found.warning, "4 items", "4")
    assert mentions(str(found), "4", "3 hosts")
    full = of({"free_bytes": 2 * GB}, np=6, hosts=3, tasks=4)
    assert (full.fits, full.binds) == (3, "memory")
    assert mentions(full.warning, "6", "2.50 GB", "2.00 GB", "3")


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, version):
    """Files that the kernel caches in memory count as free, since the kernel drops them when memory is short."""
    real = limits.control_groups
    monkeypatch.setattr(limits, "control_groups", lambda controller: real(controller, str(tmp_path)))
    lines = {1: "3:cpu,cpuacct:/a\n2:memory:/pod/ours\n0::/\n", 2: "0::/../pod/ours\n"}[version]
    folder = {1: "sys/fs/cgroup/memory/pod", 2: "sys/fs/cgroup/pod"}[version]  # the limit is that of the group around
    machine = process.available_bytes()
    limit, used, cached = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("max", "current", "inactive_file"),
    }[version]
    statistics = f"anon 5\n{cached} 1000000\n"
    files = {"proc/self/cgroup": lines, f"{folder}/memory.{used}": "6000000\n", f"{folder}/memory.stat": statistics}
    written(tmp_path, {**files, f"{folder}/memory.{limit}": "9000000\n"})
    assert process.available_bytes() == 4_000_000 < machine
    assert process.total_bytes() == 9_000_000
    written(tmp_path, {f"{folder}/memory.{limit}": "max\n"})
    assert process.available_bytes() > 4_000_000


V1 = "11:memory:/docker/7c\n4:cpu,cpuacct:/docker/7c\n0::/docker/7c\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "400000 0\n"}, 64),
        ("0::/\n", {}, 64),
        ("0::/kubepods/pod/ours\n", {"cpu.max": "200000 100000"}, 2),  # the container's group is at the root
        ("0::/../pod/ours\n", {"pod/cpu.max": "300000 100000", "pod/ours/cpu.max": "max 100000"}, 3),
        ("0::/pod/ours\n", {"pod/cpu.max": "300000 100000", "pod/ours/cpu.max": "50000 50000"}, 1),
        ("0::/user.slice\n", {"other/cpu.max": "100000 100000"}, 64),
        (V1, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "150000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu/docker/cpu.cfs_quota_us": "200000", "cpu/docker/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        (None, {"cpu.max": "400000 100000"}, 64),  # another system, without /proc
    ],
)
def test_cores_of_a_container(tmp_path, monkeypatch, groups, files, expected):
    """The quotas of all control groups around a process count as cores, rounded up."""
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    written(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    if groups is not None:
        written(tmp_path, {"proc/self/cgroup": groups})
    assert limits.cores(str(tmp_path)) == expected
