"""The examination: all checks, in the order in which `%doctor` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sparkring.engine.doctor import builds, gpus, machine, spark, storage
from sparkring.engine.doctor.checks import Tell, TooSlow, answer
from sparkring.errors import SparkringError
from sparkring.history.findings import Finding, Section, problem
from sparkring.runtime.storage import Location

Answer = TypeVar("Answer")

LOCAL_LIMIT_S, STORAGE_LIMIT_S, GPU_LIMIT_S = 60.0, 30.0, 30.0


def examine(directory: Callable[[], Location] | None, view: Sequence[Finding], tell: Tell) -> Iterator[Section]:
    """Yield the findings about this machine, its GPUs, the directory for checkpoints (if any), and Spark.

    `directory` returns the Location of the directory, or raises SparkringError if its path is invalid. `view` holds the
    findings about the view of runs, which belong to the section about this machine. During a check, `tell` is called
    repeatedly with a description of the check. A check that fails becomes a finding. KeyboardInterrupt ends the
    examination.
    """

    def safely(topic: str, doing: str, check: Callable[[], Sequence[Finding]], limit_s: float) -> list[Finding]:
        result = attempt(topic, doing, lambda: list(check()), limit_s)
        return [result] if isinstance(result, Finding) else result

    def attempt(topic: str, doing: str, check: Callable[[], Answer], limit_s: float) -> Answer | Finding:
        try:
            return answer(doing, lambda cancelled: check(), tell, limit_s)
        except Exception as error:  # whatever a check raises must not hide what the others have found
            return failed(topic, error)

    local = safely("packages", "reading the installed packages", machine.packages, GPU_LIMIT_S)
    local += safely("capacity", "measuring this machine", machine.capacity, GPU_LIMIT_S)
    try:
        local += answer("starting a rank", machine.local_rank, tell, LOCAL_LIMIT_S)
    except Exception as error:  # as above
        local.append(failed("local rank", error))
    yield Section("This machine", (*local, *view))
    check_gpus = lambda: gpus.judge(gpus.read(), builds.builds(), builds.horovod())  # noqa: E731
    yield Section("GPUs", tuple(safely("GPUs", "reading the GPUs", check_gpus, GPU_LIMIT_S)))
    if directory is None:
        yield Section("Spark", spark.check(None, tell).findings)
        return
    trial = None
    try:
        location = directory()
        outcome = attempt(
            storage.DRIVER, f"writing to {location.written}", lambda: storage.begin(location), STORAGE_LIMIT_S
        )
    except SparkringError as error:
        outcome = problem(storage.DRIVER, str(error), "Write the path of a folder or a URL, such as dbfs:/ml/run1.")
    if isinstance(outcome, Finding):
        findings = [outcome]
    else:
        trial, findings = outcome, list(outcome.findings)
    checked = spark.Checked(())
    try:
        checked = spark.check(trial, tell)
    finally:
        if trial is not None:
            ended = trial
            findings += safely(storage.DRIVER, "removing a file", lambda: storage.end(ended), STORAGE_LIMIT_S)
    yield Section("Checkpoints", (*findings, *checked.directory))
    yield Section("Spark", checked.findings)


def failed(topic: str, error: Exception) -> Finding:
    """Return the finding that a check itself has failed."""
    if isinstance(error, TooSlow):
        return problem(topic, str(error), "Something hangs, such as a network drive or a driver.")
    return problem(topic, f"the check failed: {type(error).__name__}: {error}", "Please report this as a bug.")
