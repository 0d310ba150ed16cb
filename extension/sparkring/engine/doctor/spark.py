"""Checks the notebook's SparkSession: its slots, and what each executor has and can reach. It starts no session."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture.packages import CodeImports, lacking, requirement
from sparkring.capture.versions import MODULES, minor, package_names, version_of
from sparkring.cluster.formation import dynamic_allocation, most_slots
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.python import SET_PYTHON, executors_python, wrong_python
from sparkring.cluster.session import active_cluster, find_java, uses_connect
from sparkring.cluster.slots import Say, Slots, Stage, running, slots
from sparkring.cluster.survey import Directory, Questions, TaskReport, survey
from sparkring.engine.doctor import travel
from sparkring.engine.doctor.machine import LOW_SHARED_BYTES, MORE_SHARED, NEEDS_SHARED
from sparkring.engine.doctor.storage import Trial
from sparkring.errors import LaunchError
from sparkring.executor.orders import PORT_SETTING
from sparkring.history.describe import counted, duration, named, size, span
from sparkring.history.findings import Finding, note, ok, problem
from sparkring.launchers.tunnel import note_reach
from sparkring.wire.channel import Listener

if TYPE_CHECKING:
    from sparkring.cluster.base import Cluster

JOB_LIMIT_S = 30.0
CLOCKS_APART_S = 2.0
_NAMED = 3
_MOST_PEERS = 1_024  # how many tasks are answered at once


class DriverFacts(NamedTuple):
    """What the executors are compared with: the driver's Python, Java and packages.

    `imported` holds the modules that the notebook has imported.
    """

    python: str
    java: str
    packages: Mapping[str, str]
    imported: frozenset[str]


class Checked(NamedTuple):
    """The findings about Spark, and those about the executors' use of the directory for checkpoints."""

    findings: tuple[Finding, ...]
    directory: tuple[Finding, ...] = ()


def check(trial: Trial | None, say: Say) -> Checked:
    """Check the active SparkSession, if there is one. `trial` is the driver's file in the directory for checkpoints."""
    if importlib.util.find_spec("pyspark") is None:
        return Checked((ok("session", "pyspark is not installed; -n 2 needs it: `pip install 'sparkring[spark]'`"),))
    cluster = active_cluster()
    if cluster is None and uses_connect():
        return Checked((note("session", "no session of Spark Connect"),))
    if cluster is None:
        return Checked((ok("session", "no SparkSession; -n 2 starts a local one"), *_java()))
    if _has_ended(cluster):
        advice = "Make a new one with SparkSession.builder.getOrCreate(), or restart the kernel."
        return Checked(
            (problem("session", "the SparkSession has been stopped, or its Java process has ended", advice),)
        )
    return _active(cluster, trial, say)


def _has_ended(cluster: Cluster) -> bool:
    try:
        return cluster.is_stopped()
    except Exception:  # py4j raises various errors if the Java process has ended
        return True


def _java() -> list[Finding]:
    try:
        home = find_java()
    except LaunchError as error:
        return [problem("Java", "Spark has no Java that it can use", str(error))]
    return [ok("Java", f"a new session uses {home}" if home else "a new session uses this machine's Java")]


def _active(cluster: Cluster, trial: Trial | None, say: Say) -> Checked:
    capacity = with_gangs(slots(cluster), [stage for stage in list(running) if stage.cluster == cluster])
    is_dynamic = dynamic_allocation(cluster)
    findings = [session(capacity, growth=(most_slots(cluster)[1] or "no limit is set") if is_dynamic else "")]
    tasks = min(capacity.free, capacity.likely) or int(
        is_dynamic and not capacity.busy
    )  # an executor starts for the task
    if not tasks:
        holders = "; ".join(capacity.holders) or "there are no executors"
        advice = "Wait for the jobs, or stop the gang (%gang stop), and run %doctor again."
        return Checked((*findings, note("executors", f"not checked, because no task slot is free ({holders})", advice)))
    host, bind_host, port = cluster.address()
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(contextlib.closing(_listener(bind_host, port)))
            address, secret = (host, listener.port), listener.secret
        except OSError as error:
            address, secret = None, b""
            findings.append(cannot_listen(bind_host, port, error))
        # Those that frameworks need come first.
        modules = dict.fromkeys((*MODULES, *([] if cluster.runs_this_python else travel.imported_packages())))
        packages = {module: package_names(module) for module in modules}
        directory = None
        if trial is not None and trial.works:
            location = trial.location
            path = location.path if location.local else location.url
            directory = Directory(path, location.local, trial.file.path.rpartition("/")[2], trial.content)
        questions = Questions(address, secret, packages, directory)
        try:
            reports = survey(cluster, tasks, questions, say, JOB_LIMIT_S)
        except TimeoutError as error:
            advice = "Do the executors start? Spark's UI and log say what the job waits for."
            return Checked((*findings, problem("executors", str(error), advice)))
        except Exception as error:  # Spark and py4j raise various errors
            return Checked((*findings, job_failed(str(error), lambda: executors_python(cluster))))
    here = DriverFacts(
        platform.python_version(),
        cluster.java_version(),
        {module: version_of(module) for module in modules},
        frozenset(module for module in modules if module in sys.modules),
    )
    at = f"{host}:{address[1]}" if address else ""
    if at:  # later launches need not find it out again
        cut = [report for report in reports if report.reached_s is None]
        why = f"{_hosts(cut)} cannot connect to the driver at {at}: {cut[0].unreached}." if cut else ""
        note_reach(cluster, why)
    findings += judge(reports, here, capacity, at, cluster.reachable_by)
    findings += [] if cluster.runs_this_python else travel.check()  # local executors run this Python
    return Checked(tuple(findings), tuple(judge_directory(reports, capacity)))


def _listener(host: str, port: int) -> Listener:
    """Return a listener where members connect, which tells its peers this machine's time in seconds."""
    return Listener(
        host, port, secrets.token_bytes(32), lambda peer: peer.send_frame(repr(time.time()).encode()), most=_MOST_PEERS
    )


def with_gangs(capacity: Slots, stages: Sequence[Stage]) -> Slots:
    """Return the slots with those of these stages as busy: Spark counts the tasks of a new stage only after a while."""
    held = sum(stage.size for stage in stages)
    if held <= capacity.busy:
        return capacity
    return capacity._replace(
        busy=min(held, capacity.total), holders=[f"{stage.title}: {stage.size}" for stage in stages]
    )


# ── Judging ───────────────────────────────────────────────────────────────────


def session(capacity: Slots, *, growth: str) -> Finding:
    """Judge the session's slots. `growth` says how far dynamic allocation can grow them; '' if it is off."""
    held = f", {capacity.busy} of them busy ({'; '.join(capacity.holders)})" if capacity.busy else ""
    gpus = f", {capacity.gpus_per_task:g} GPUs per task" if capacity.gpus_per_task else ""
    what = f"{capacity.master}, {capacity.in_all}{held}{gpus}"
    if growth:
        return ok("session", f"{what}; dynamic allocation starts executors for rings ({growth})")
    if not capacity.total:
        return problem("session", what, "Add executors.")
    return ok("session", what)


def cannot_listen(host: str, port: int, error: OSError) -> Finding:
    """Return the finding that the driver cannot listen for members."""
    what = f"the driver cannot listen on {host}:{port}: {error.strerror or error}"
    if port:
        advice = f"Another program uses the port: set {PORT_SETTING} to a free one."
    else:
        advice = "Set spark.driver.host (or spark.driver.bindAddress) to an address of this machine."
    return problem("driver's port", what, advice)


def job_failed(text: str, python: Callable[[], str]) -> Finding:
    """Return the finding that the job on the executors failed with the error `text`."""
    wrong = wrong_python(text, "")
    if wrong is not None:
        return problem("executors", wrong_python(text, python()) or wrong, SET_PYTHON)
    return problem("executors", f"a job failed: {root_cause(text)}", "Launches on Spark would fail in the same way.")


def judge(
    reports: Sequence[TaskReport], here: DriverFacts, capacity: Slots, at: str, make_reachable: str = ""
) -> list[Finding]:
    """Compare the executors with the driver, which listened at the address `at` ('' if it could not listen).

    `make_reachable` is the advice for executors that cannot connect to it.
    """
    executors = _executors(reports)
    hosts = {report.host for report in executors}
    who = f"{counted(len(executors), 'executor')} on {counted(len(hosts), 'host')}"
    findings = []
    known = len(capacity.hosts[1:])  # the first is the driver; in local mode, it is the only one
    if known > len(executors):
        what = f"{who} of {known} have run a task; the others were busy or did not get one"
        findings.append(note("executors", what, "Run %doctor again when they are free."))
    else:
        findings.append(ok("executors", f"{who} answered, with {counted(len(reports), 'task')}"))
    findings += [
        _python(executors, here, who),
        *_packages(executors, here, who),
        _java_of(executors, here, who),
        *_shared_memory(executors),
    ]
    findings += [_reached(executors, at, capacity, make_reachable), *_clocks(executors)] if at else []
    return findings


def judge_directory(reports: Iterable[TaskReport], capacity: Slots) -> list[Finding]:
    """Judge whether the executors can use the directory for checkpoints."""
    executors = [report for report in _executors(reports) if report.directory is not None]
    if not executors:
        return []
    who = f"{counted(len(executors), 'executor')} can write, read, list and delete files there"
    wrong = _by(executors, lambda report: str(report.directory))
    problems = [
        problem(
            "executors",
            f"{_hosts(reports)}: the directory {why}",
            "Ranks on Spark need a directory that all machines share: DBFS, HDFS, an object store or a network drive.",
        )
        for why, reports in wrong.items()
        if why
    ]
    return problems or [ok("executors", who)]


def _executors(reports: Iterable[TaskReport]) -> list[TaskReport]:
    """Return one report for each executor: the one with the most problems."""
    tasks = _by(reports, lambda report: (report.host, report.executor))
    return [max(group, key=lambda report: bool(report.unreached) + bool(report.directory)) for group in tasks.values()]


def _by(reports: Iterable[TaskReport], key: Callable[[TaskReport], Any]) -> dict[Any, list[TaskReport]]:
    """Group the reports by key(report)."""
    groups: dict[Any, list[TaskReport]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report)
    return groups


def _hosts(reports: Iterable[TaskReport]) -> str:
    """Name the executors: `2 executors on node-1, node-2`."""
    counts = Counter(report.host for report in reports)
    return f"{counted(sum(counts.values()), 'executor')} on {named(sorted(counts), _NAMED)}"


def _python(executors: Sequence[TaskReport], here: DriverFacts, who: str) -> Finding:
    groups = _by(executors, lambda report: report.python)
    if set(groups) == {here.python}:
        paths = named(sorted({report.executable for report in executors}), _NAMED, 80)
        return ok("Python", f"{who}: Python {here.python}, as here ({paths})")
    odd = [f"{_hosts(reports)}: Python {python}" for python, reports in groups.items() if python != here.python]
    what = f"{'; '.join(odd)}; this notebook: {here.python}"
    if any(minor(python) != minor(here.python) for python in groups):
        return problem("Python", what, SET_PYTHON)
    return note("Python", what, SET_PYTHON)


def _packages(executors: Sequence[TaskReport], here: DriverFacts, who: str) -> list[Finding]:
    findings: list[Finding] = []
    same = []
    for module, mine in here.packages.items():
        groups: dict[str, list[TaskReport]] = {}
        for report in executors:
            groups.setdefault(report.packages.get(module, ""), []).append(report)
        if not mine or set(groups) == {mine}:
            same += [f"{module} {mine}"] if mine else []
            continue
        for version, reports in groups.items():
            if version != mine:
                findings.append(_package(module, mine, version, reports, used=module in here.imported))
    return ([ok("packages", f"{who}: {' · '.join(same)}, as here")] if same else []) + findings


def _package(module: str, mine: str, version: str, reports: Sequence[TaskReport], *, used: bool) -> Finding:
    """Return a finding about executors whose version of a package ('' if it is missing) differs from the driver's."""
    if not version:
        what = f"{_hosts(reports)}: no {module}; this notebook has {mine}"
        lacks = lacking(CodeImports(frozenset([module])), reports[0].packages)
        if lacks is not None and lacks.sent:
            return ok("packages", f"{what}, which is sent with each cell that imports it")
        advice = f"Run {_pip(module, mine, reports)} there, if cells on Spark need it, or use --env-pack."
        return problem("packages", what, advice) if used else note("packages", what, advice)
    what = f"{_hosts(reports)}: {module} {version}; this notebook has {mine}"
    advice = f"Run {_pip(module, mine, reports)} there, or install {version} here."
    return problem("packages", what, advice) if minor(version) != minor(mine) else note("packages", what, advice)


def _pip(module: str, version: str, reports: Sequence[TaskReport]) -> str:
    if module == "horovod":  # it has no wheels
        return "`sparkring-build-horovod --install`"
    package = requirement(module).partition("==")[0]
    return f"`{reports[0].executable} -m pip install {package}=={version}`"


def _java_of(executors: Sequence[TaskReport], here: DriverFacts, who: str) -> Finding:
    groups = _by(executors, lambda report: report.java or "unknown")
    if not here.java:  # the driver is not on this machine
        return ok("Java", "; ".join(f"{_hosts(reports)}: Java {java}" for java, reports in groups.items()))
    if set(groups) <= {here.java, "unknown"}:
        return ok("Java", f"{who}: Java {here.java}, as here" if here.java in groups else f"here: Java {here.java}")
    odd = [f"{_hosts(reports)}: Java {java}" for java, reports in groups.items() if java != here.java]
    return note("Java", f"{'; '.join(odd)}; here: {here.java}", "Use the same Java everywhere, if jobs fail in Java.")


def _shared_memory(executors: Sequence[TaskReport]) -> list[Finding]:
    low = [report for report in executors if (report.shared_bytes or LOW_SHARED_BYTES) < LOW_SHARED_BYTES]
    if not low:
        return []
    least = min(report.shared_bytes or 0.0 for report in low)
    return [note("/dev/shm", f"{_hosts(low)}: {size(least)}; {NEEDS_SHARED}", MORE_SHARED)]


def _reached(executors: Sequence[TaskReport], at: str, capacity: Slots, make_reachable: str) -> Finding:
    cut = _by([report for report in executors if report.reached_s is None], lambda report: report.unreached)
    if cut:
        what = "; ".join(
            f"{_hosts(reports)} cannot connect to the driver at {at}: {why}" for why, reports in cut.items()
        )
        if capacity.total > 1:
            instead = "so messages go through Spark jobs, which is slower and uses one task slot"
            return note("driver's port", f"{what}; {instead}", make_reachable)
        return problem("driver's port", what, make_reachable)
    took = span([report.reached_s or 0.0 for report in executors], duration)
    return ok("driver's port", f"{counted(len(executors), 'executor')} connected to the driver at {at} in {took}")


def _clocks(executors: Sequence[TaskReport]) -> list[Finding]:
    apart = [report for report in executors if abs(report.clock_s or 0.0) > CLOCKS_APART_S]
    if not apart:
        most = max((abs(report.clock_s) for report in executors if report.clock_s is not None), default=None)
        return [] if most is None else [ok("clocks", f"at most {duration(most)} apart from this machine's")]
    worst = max(apart, key=lambda report: abs(report.clock_s or 0.0))
    seconds = worst.clock_s or 0.0
    what = f"{_hosts(apart)}: up to {duration(abs(seconds))} {'behind' if seconds > 0 else 'ahead of'} this machine"
    return [note("clocks", what, "Synchronise the clocks (NTP): times in logs and in object stores would be wrong.")]
