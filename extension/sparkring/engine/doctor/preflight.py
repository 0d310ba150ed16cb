"""Checks the GPUs of a launch before it begins. Only NVML is asked, which takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterable

from sparkring.engine.doctor import builds, gpus
from sparkring.history.findings import Finding
from sparkring.launchers.base import LaunchRequest
from sparkring.launchers.local import visible_gpus
from sparkring.worker.member import gpus as nvml

# The packages that can use GPUs on the ranks of a framework. Ranks of other frameworks may use any of them.
_PACKAGES = {
    "horovod": ("tensorflow", "torch"),
    "jax": ("jax",),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
}


def notices(launches: Iterable[LaunchRequest], framework: str) -> list[str]:
    """Return a sentence for each problem of the GPUs that the ranks of these launches will use on this machine."""
    asked = {
        (visible_gpus(launch.environment), launch.size * launch.gpus if launch.gpus else None)
        for launch in launches
        if launch.place.here and launch.gpus != 0
    }
    used = {gpu.address for visible, most in asked for gpu in nvml.found(visible)[:most]}
    state = gpus.read(sorted(used), health=False) if used else None
    if state is None:
        return []
    packages = _PACKAGES.get(framework, ())
    installed = [build for build in builds.builds() if not packages or build.package in packages]
    findings: list[Finding | None] = [finding for build in installed for finding in gpus.driver(state, build)]
    findings += [gpus.held_by_notebook(gpu, state.gpus) for gpu in state.gpus]
    return [
        f"{finding.what}. {finding.advice}"
        for finding in findings
        if finding is not None and finding.level == "problem"
    ]
