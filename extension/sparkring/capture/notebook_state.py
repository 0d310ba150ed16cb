"""Carries settings of the notebook's process to its ranks: import path, environment, logging, MLflow's active run.

The driver gathers them for each run, and ranks apply what has changed since the previous run. So what a cell sets on
the ranks of a warm gang stays until the notebook changes the same setting. The state is sent with the request, over the
authenticated connection, because the environment may hold secrets.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sparkring.wire.messages import Handler, Logger, NotebookState, PathKind

# Variables of a machine, a process or an installation, which would be wrong on another.
_NOT_OURS = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HOME|HOSTNAME|LOGNAME|MAIL|NVIDIA_VISIBLE_DEVICES|OLDPWD|PATH|PWD|SHELL|SHLVL|TEMP|TMP|TMPDIR"
    r"|USER|VIRTUAL_ENV|_)$"
    r"|_?(CONDA_|DBUS_|DYLD_|HADOOP_|IPY|JAVA_|JPY_|JUPYTER|LD_|PYSPARK_|PYTHON|SPARK_|SPARKRING_|SSH_|XDG_|YARN_)"
)

_STANDARD_LIBRARY = os.path.dirname(os.__file__)

# ── On the driver ─────────────────────────────────────────────────────────────────────────────────────────────────────


def gather() -> NotebookState:
    """Return the current state of this process."""
    loggers, disabled = _logging()
    entries: list[Any] = sys.path  # may hold entries that are not strings, which Python ignores
    path = [(entry, kind_of_entry(entry)) for entry in entries if isinstance(entry, str)]
    return NotebookState(sys.prefix, os.getcwd(), path, _environment(), loggers, disabled)


def kind_of_entry(entry: str) -> PathKind:
    """Whether an entry of sys.path belongs to the standard library, to installed packages, or to neither."""
    parts = entry.rstrip(os.sep).split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return "site"
    standard = entry == _STANDARD_LIBRARY or parts[-1] == "lib-dynload" or re.fullmatch(r"python\d+\.zip", parts[-1])
    return "stdlib" if standard else ""


def _environment_at_start() -> dict[str, str]:
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (os.fsdecode(item).partition("=") for item in file.read().split(b"\0") if item)
            found = {name: value for name, _, value in pairs}
    except OSError:
        found = {}
    # On other systems, or if the process has overwritten the file with its title, return the current environment.
    return found if "PATH" in found else dict(os.environ)


_AT_START = _environment_at_start()


_ever_changed: set[str] = set()  # variables that were sent before; they are sent again if they change back


def _environment() -> dict[str, str | None]:
    """The variables that this process has changed since it started, without those of the machine; None if deleted."""
    now: dict[str, str] = {**os.environ, **_mlflow_run()}
    if now.get("MPLBACKEND", "").startswith("module://"):
        del now["MPLBACKEND"]  # the notebook's own backend
    changed = {name for name in {**_AT_START, **now} if _AT_START.get(name) != now.get(name)}
    _ever_changed.update(name for name in changed if not _NOT_OURS.match(name))
    return {name: now.get(name) for name in sorted(_ever_changed)}


def _mlflow_run() -> dict[str, str]:
    """The variables with which MLflow continues the notebook's active run elsewhere; empty if there is none."""
    mlflow = sys.modules.get("mlflow")
    active_run = getattr(mlflow, "active_run", None)
    run = active_run() if active_run is not None else None
    if mlflow is None or run is None:
        return {}
    return {
        "MLFLOW_RUN_ID": str(run.info.run_id),
        "MLFLOW_EXPERIMENT_ID": str(run.info.experiment_id),
        "MLFLOW_TRACKING_URI": str(mlflow.get_tracking_uri()),
    }


def _logging() -> tuple[dict[str, Logger], int]:
    """The loggers that differ from Python's defaults, by name, and the level up to which logging is disabled."""
    if "logging" not in sys.modules:
        return {}, 0
    import logging

    root = logging.getLogger()
    found: dict[str, Logger] = {}
    for name, logger in {"": root, **root.manager.loggerDict}.items():
        # A logger of another class is made by its module on import, and must not exist on the rank before that.
        if not isinstance(logger, logging.Logger) or type(logger) not in (logging.Logger, logging.RootLogger):
            continue
        of_module = name.partition(".")[0] in sys.modules and name != "__main__"
        # `level` and `propagate` are plain attributes, which users may set to anything: `propagate = 0` is common.
        told = Logger(_level(logger.level), bool(logger.propagate), None if of_module else _handlers(logger))
        default = logging.WARNING if logger is root else logging.NOTSET
        if told.level != default or told.handlers or not (of_module or told.propagate):
            found[name] = told
    return found, root.manager.disable


def _handlers(logger: Any) -> list[Handler]:
    """The handlers that write to the notebook."""
    import logging

    streams: tuple[tuple[Literal["stdout", "stderr"], Any], ...] = (
        ("stdout", (sys.stdout, sys.__stdout__)),
        ("stderr", (sys.stderr, sys.__stderr__)),
    )
    return [
        Handler(name, _level(handler.level), _format(handler.formatter))
        for handler in logger.handlers
        if type(handler) is logging.StreamHandler
        for name, known in streams
        if any(handler.stream is each for each in known)
    ]


def _format(formatter: Any) -> tuple[str | None, str | None, Literal["%", "{", "$"]] | None:
    import logging

    if formatter is None:
        return None
    styles: dict[type, Literal["{", "$"]] = {logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
    written, dates = (text if isinstance(text, str) else None for text in (formatter._fmt, formatter.datefmt))
    return written, dates, styles.get(type(formatter._style), "%")


def _level(level: object) -> int:
    return int(level) if isinstance(level, int) else 0


# ── On a rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class RankState:
    """The notebook's state as it was last applied on this rank."""

    def __init__(self) -> None:
        self._told = NotebookState()
        self._own_path = list(sys.path)
        self._path = list(sys.path)
        self._handlers: list[tuple[Any, Any]] = []  # pairs of a logger and a handler that was added here

    def apply(self, now: NotebookState) -> None:
        """Apply what has changed in the notebook since the previous call."""
        before, self._told = self._told, now
        if now.folder != before.folder and os.path.isdir(now.folder):
            os.chdir(now.folder)
        if now.path != before.path:
            added = [entry for entry in sys.path if entry not in self._path]
            self._path = import_path(self._own_path, now.path, same_python=now.prefix == sys.prefix)
            sys.path[:] = [*added, *(entry for entry in self._path if entry not in added)]
        self._apply_environment(before.environment, now.environment)
        if (now.loggers, now.logging_disabled) != (before.loggers, before.logging_disabled):
            self._apply_logging(before.loggers, now)

    def leave_run(self) -> None:
        """At the end of a cell, detach MLflow from the notebook's run, if the cell has continued it.

        MLflow would otherwise end the run when this process exits, while the notebook still uses it.
        """
        active_run = getattr(sys.modules.get("mlflow"), "active_run", None)
        run = active_run() if active_run is not None else None
        if run is not None and run.info.run_id == self._told.environment.get("MLFLOW_RUN_ID"):
            sys.modules["mlflow"].end_run("RUNNING")

    def _apply_environment(self, before: Mapping[str, str | None], now: Mapping[str, str | None]) -> None:
        for name, value in now.items():
            changed = name not in before or before[name] != value
            if value is None:
                if changed:
                    os.environ.pop(name, None)
            elif changed or name not in os.environ:  # MLflow deletes MLFLOW_RUN_ID once it has read it
                os.environ[name] = value

    def _apply_logging(self, before: Mapping[str, Logger], now: NotebookState) -> None:
        import logging

        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()
        for name in before.keys() - now.loggers.keys():
            logger = logging.getLogger(name)
            logger.setLevel(logging.NOTSET if name else logging.WARNING)
            logger.propagate = True
        for name, told in now.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(told.level)
            if told.handlers is None:
                continue
            logger.propagate = told.propagate
            for each in told.handlers:
                handler = logging.StreamHandler(getattr(sys, each.stream))
                handler.setLevel(each.level)
                if each.format is not None:
                    written, dates, style = each.format
                    handler.setFormatter(logging.Formatter(written, dates, style, validate=False))
                logger.addHandler(handler)
                self._handlers.append((logger, handler))
        logging.disable(now.logging_disabled)


def import_path(own: Sequence[str], notebook: Sequence[Sequence[str]], *, same_python: bool) -> list[str]:
    """A rank's sys.path: the notebook's entries in their order, if they exist on the rank.

    A rank that runs another Python has its own standard library and packages in the place of the notebook's. Entries
    that were shipped to the rank come first. The rank's other entries come last.
    """
    known = {entry for entry, _ in notebook}
    kinds = {entry: kind_of_entry(entry) for entry in own}
    found: list[str] = []
    for entry in own:
        if kinds[entry] == "stdlib":
            break
        if entry not in known:
            found.append(entry)
    if "" not in known:
        found.append("")
    placed: set[str] = set()
    for entry, kind in notebook:
        if same_python or not kind:
            found += [entry] if entry in kinds or os.path.exists(entry or ".") else []
        elif kind not in placed:
            placed.add(kind)
            found += [each for each in own if kinds[each] == kind]
    return list(dict.fromkeys([*found, *own]))
