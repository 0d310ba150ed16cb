"""What a notebook has set up in its process, and a cell expects on its ranks: import path, environment, logging.

The driver gathers it for each run, and ranks apply what has changed since the run before, so what a cell sets on the
ranks of a warm gang stays as long as the notebook leaves it alone. It travels with the request, over the proven
connection: the environment may hold secrets.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

# Variables of a machine, a process or an installation, which would be wrong elsewhere.
_NOT_OURS = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HOME|HOSTNAME|LOGNAME|MAIL|NVIDIA_VISIBLE_DEVICES|OLDPWD|PATH|PWD|SHELL|SHLVL|TEMP|TMP|TMPDIR"
    r"|USER|VIRTUAL_ENV|_)$"
    r"|_?(CONDA_|DBUS_|DYLD_|HADOOP_|IPY|JAVA_|JPY_|JUPYTER|LD_|PYSPARK_|PYTHON|SPARK_|SPARKRING_|SSH_|XDG_|YARN_)"
)

_STANDARD_LIBRARY = os.path.dirname(os.__file__)

PathKind = Literal["", "stdlib", "site"]


class Handler(NamedTuple):
    """A handler that writes what is logged to `stream`, in a format as logging.Formatter takes it, if it has one."""

    stream: Literal["stdout", "stderr"]
    level: int
    format: tuple[str | None, str | None, Literal["%", "{", "$"]] | None


class Logger(NamedTuple):
    """How a logger is set up. `handlers` is None for one that its own module sets up wherever it is imported."""

    level: int
    propagate: bool
    handlers: Sequence[Handler] | None


class NotebookState(NamedTuple):
    """The notebook's sys.prefix, folder and sys.path (with what each entry is), and what it has set up.

    `environment` holds the variables that its process has changed since it started, None for those that are not there;
    `loggers` are by name, the root's is ''; up to the level `logging_disabled` nothing is logged.
    """

    prefix: str = ""
    folder: str = ""
    path: Sequence[tuple[str, PathKind]] = ()
    environment: Mapping[str, str | None] = {}
    loggers: Mapping[str, Logger] = {}
    logging_disabled: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> NotebookState:
        """What _asdict() gave, after its way through JSON."""
        loggers = {
            name: Logger(level, propagate, handlers and [Handler(*handler) for handler in handlers])
            for name, (level, propagate, handlers) in fields["loggers"].items()
        }
        return cls(**{**fields, "path": [(entry, kind) for entry, kind in fields["path"]], "loggers": loggers})


# ── On the driver ─────────────────────────────────────────────────────────────────────────────────────────────────────


def gather() -> NotebookState:
    """This process's, as it is now."""
    loggers, disabled = _logging()
    entries: list[Any] = sys.path  # also such as are no strings, which Python passes over
    path = [(entry, kind_of_entry(entry)) for entry in entries if isinstance(entry, str)]
    return NotebookState(sys.prefix, os.getcwd(), path, _environment(), loggers, disabled)


def kind_of_entry(entry: str) -> PathKind:
    """Whether an entry of sys.path is a part of the standard library, of an installation's packages, or neither."""
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
    # Elsewhere than on Linux, and where a process has written its title over it: as it is now.
    return found if "PATH" in found else dict(os.environ)


_AT_START = _environment_at_start()


_ever_changed: set[str] = set()  # what ranks may have been told of, and have to be told of again when it changes back


def _environment() -> dict[str, str | None]:
    """The variables that this process has changed, and that are the user's, not the machine's."""
    now: dict[str, str] = {**os.environ, **_mlflow_run()}
    if now.get("MPLBACKEND", "").startswith("module://"):
        del now["MPLBACKEND"]  # it draws into the notebook
    changed = {name for name in {**_AT_START, **now} if _AT_START.get(name) != now.get(name)}
    _ever_changed.update(name for name in changed if not _NOT_OURS.match(name))
    return {name: now.get(name) for name in sorted(_ever_changed)}


def _mlflow_run() -> dict[str, str]:
    """What makes MLflow go on with the notebook's active run in another process; nothing if there is none."""
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
    """The loggers that are not as Python makes them, by name, and below which level logging is disabled."""
    if "logging" not in sys.modules:
        return {}, 0
    import logging

    root = logging.getLogger()
    found: dict[str, Logger] = {}
    for name, logger in {"": root, **root.manager.loggerDict}.items():
        # One of another class is made by its module when that is imported, which does not expect it to be there.
        if not isinstance(logger, logging.Logger) or type(logger) not in (logging.Logger, logging.RootLogger):
            continue
        of_module = name.partition(".")[0] in sys.modules and name != "__main__"
        told = Logger(logger.level, logger.propagate, None if of_module else _handlers(logger))
        default = logging.WARNING if logger is root else logging.NOTSET
        if told.level != default or told.handlers or not (of_module or told.propagate):
            found[name] = told
    return found, root.manager.disable


def _handlers(logger: Any) -> list[Handler]:
    """Those that write to the notebook."""
    import logging

    streams: tuple[tuple[Literal["stdout", "stderr"], Any], ...] = (
        ("stdout", (sys.stdout, sys.__stdout__)),
        ("stderr", (sys.stderr, sys.__stderr__)),
    )
    return [
        Handler(name, handler.level, _format(handler.formatter))
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
    return formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%")


# ── On a rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class RankState:
    """What a rank has of the notebook's state."""

    def __init__(self) -> None:
        self._told = NotebookState()
        self._own_path = list(sys.path)
        self._path = list(sys.path)
        self._handlers: list[tuple[Any, Any]] = []  # the loggers and the handlers that they have got here

    def apply(self, now: NotebookState) -> None:
        """Take over what has changed in the notebook since the last time."""
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
        """At the end of a cell: leave the notebook's MLflow run as it is, if the cell has gone on with it.

        MLflow would end it when this process exits, while the notebook, which has begun it, still goes on with it.
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
            elif changed or name not in os.environ:  # MLflow deletes the run's variable when it has read it
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
    """A rank's sys.path: the notebook's, in its order, as far as it is there.

    Another Python keeps its standard library and its packages where the notebook has its own, which are left out. What
    was shipped to the rank comes first, and what else it has of its own last.
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
