"""How many cores this process may use, and which control groups, such as those of a container, limit it."""

from __future__ import annotations

import math
import os


def cores(root: str = "") -> int:
    """Return how many cores this process may use: those that its affinity allows, unless a quota allows fewer.

    A quota is rounded up: three processes keep 2.5 cores busy. `root` is the folder that contains `proc` and `sys`.
    """
    return max(1, math.ceil(min(_allowed(), quota(root))))


def quota(root: str = "") -> float:
    """Return how many cores the control groups of this process let it use on average; infinity if there is no quota."""
    lowest = math.inf
    for version, folder in control_groups("cpu", root):
        if version == 2:
            words = _words(f"{folder}/cpu.max")
        else:
            words = _words(f"{folder}/cpu.cfs_quota_us") + _words(f"{folder}/cpu.cfs_period_us")
        # Without a quota, the first word is "max" in version 2, and -1 in version 1.
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            lowest = min(lowest, int(words[0]) / int(words[1]))
    return lowest


def control_groups(controller: str, root: str = "") -> list[tuple[int, str]]:
    """Return the folders of the control groups to which this process belongs, with the version of their files.

    `controller` is "cpu" or "memory". After each group come the groups around it, since their limits apply, too. In a
    container, the path that the kernel reports may not exist; the container's group is then at the root of the
    hierarchy. Folders that do not exist are among those returned.
    """
    try:
        with open(f"{root}/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    mount = f"{root}/sys/fs/cgroup"
    folders: dict[tuple[int, str], None] = {}
    for _, names, path in lines:
        if names and controller not in names.split(","):
            continue
        version, hierarchies = (1, [controller, names]) if names else (2, [""])
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for hierarchy in hierarchies:
            for depth in range(len(parts), -1, -1):
                folders[version, "/".join(filter(None, (mount, hierarchy, *parts[:depth])))] = None
    return list(folders)


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _words(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:
        return []
