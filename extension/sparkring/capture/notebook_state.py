"""Carries settings of the notebook's process to its ranks: import path, environment, logging, MLflow's settings.

The driver gathers these settings for each run, and ranks apply only the settings that have changed since the previous
run. So if a cell changes a setting on the ranks of a warm gang, the change stays until the notebook changes the same
setting. The settings are sent with the request, over the authenticated connection, because the environment may hold
secrets.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sparkring.capture import mlflow_settings
from sparkring.wire.messages import Handler, Logger, NotebookState, PathKind

# Environment variables that describe one machine, process or installation. They are not sent to the ranks, where their
# values would be wrong.
_NOT_OURS = re.compile(
    r"(CUDA_VISIBLE_DEVICES|HOME|HOSTNAME|LOGNAME|MAIL|NVIDIA_VISIBLE_DEVICES|OLDPWD|PATH|PWD|SHELL|SHLVL|TEMP|TMP|TMPDIR"
    r"|USER|VIRTUAL_ENV|_)$"
    r"|_?(CONDA_|DBUS_|DYLD_|HADOOP_|IPY|JAVA_|JPY_|JUPYTER|LD_|PYSPARK_|PYTHON|SPARK_|SPARKRING_|SSH_|XDG_|YARN_)"
)

_STANDARD_LIBRARY = os.path.dirname(os.__file__)

# ── On the driver ─────────────────────────────────────────────────────────────────────────────────────────────────────


def gather() -> NotebookState:
    """Return the current settings of this process."""
    loggers, disabled = _logging()
    entries: list[Any] = sys.path  # may hold entries that are not strings, which Python ignores
    path = [(entry, kind_of_entry(entry)) for entry in entries if isinstance(entry, str)]
    autologging = mlflow_settings.autologging()
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    raises = bool(getattr(shell, "system_raise_on_error", False))
    return NotebookState(sys.prefix, os.getcwd(), path, _environment(), loggers, disabled, autologging, raises)


def kind_of_entry(entry: str) -> PathKind:
    """Return the kind of an entry of sys.path: "stdlib", "site" (installed packages) or "" (anything else)."""
    parts = entry.rstrip(os.sep).split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return "site"
    standard = entry == _STANDARD_LIBRARY or parts[-1] == "lib-dynload" or re.fullmatch(r"python\d+\.zip", parts[-1])
    return "stdlib" if standard else ""


def _environment_at_start() -> dict[str, str]:
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (os.fsdecode(item).partition("=") for item in file.read().split(b"\0") if item)
            variables = {name: value for name, _, value in pairs}
    except OSError:
        variables = {}
    # Only Linux has this file, and a process that sets its own title may overwrite the contents. Without a usable file,
    # return the current environment.
    return variables if "PATH" in variables else dict(os.environ)


_AT_START = _environment_at_start()

# The names of all variables that have ever been sent. They are sent with every later run, so that the ranks learn when
# the notebook sets a variable back to its original value.
_ever_changed: set[str] = set()


def _environment() -> dict[str, str | None]:
    """Return the variables that have changed since this process started; the value of a deleted variable is None."""
    settings = {**os.environ, **mlflow_settings.environment()}
    now = {name: value for name, value in settings.items() if value is not None}
    if now.get("MPLBACKEND", "").startswith("module://"):
        del now["MPLBACKEND"]  # a Matplotlib backend that draws into the notebook is of no use on a rank
    changed = {name for name in {**_AT_START, **now} if _AT_START.get(name) != now.get(name)}
    _ever_changed.update(name for name in changed if not _NOT_OURS.match(name))
    return {name: now.get(name) for name in sorted(_ever_changed)}


def _logging() -> tuple[dict[str, Logger], int]:
    """Return the loggers that differ from Python's defaults, by name, and the level up to which logging is disabled."""
    if "logging" not in sys.modules:
        return {}, 0
    import logging

    root = logging.getLogger()
    loggers: dict[str, Logger] = {}
    for name, logger in {"": root, **root.manager.loggerDict}.items():
        # Loggers of other classes are left out. A module that needs such a logger makes the logger when the module is
        # imported. If the rank already had a logger of this name, the module would get a logger of the wrong class.
        if not isinstance(logger, logging.Logger) or type(logger) not in (logging.Logger, logging.RootLogger):
            continue
        # A module that is imported on a rank sets up its logger's handlers itself.
        of_module = name.partition(".")[0] in sys.modules and name != "__main__"
        # `level` and `propagate` are plain attributes, which users may set to anything: `propagate = 0` is common.
        settings = Logger(_level(logger.level), bool(logger.propagate), None if of_module else _handlers(logger))
        default = logging.WARNING if logger is root else logging.NOTSET
        if settings.level != default or settings.handlers or not (of_module or settings.propagate):
            loggers[name] = settings
    return loggers, root.manager.disable


def _handlers(logger: Any) -> list[Handler]:
    """Return the handlers of `logger` that write to the notebook's standard output or standard error."""
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
        if any(handler.stream is stream for stream in known)
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
        self._state = NotebookState()
        self._own_path = list(sys.path)
        self._path = list(sys.path)
        self._handlers: list[tuple[Any, Any]] = []  # each handler that was added, with its logger

    def apply(self, now: NotebookState) -> None:
        """Apply what has changed in the notebook since the previous call."""
        before, self._state = self._state, now
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
        """Detach MLflow on this rank from the notebook's active run, if this rank continued it in the last cell.

        Otherwise, MLflow would end the run when this process exits, while the notebook still uses the run.
        """
        run = mlflow_settings.active_run()
        if run is not None and run.info.run_id == self._state.environment.get("MLFLOW_RUN_ID"):
            sys.modules["mlflow"].end_run("RUNNING")

    def _apply_environment(self, before: Mapping[str, str | None], now: Mapping[str, str | None]) -> None:
        mlflow_settings.adopt({name: now[name] for name in now if name not in before or before[name] != now[name]})
        for name, value in now.items():
            changed = name not in before or before[name] != value
            if value is None:
                if changed:
                    os.environ.pop(name, None)
            # An unchanged variable may be missing: MLflow deletes MLFLOW_RUN_ID once it has read the variable.
            elif changed or name not in os.environ:
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
        for name, settings in now.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(settings.level)
            if settings.handlers is None:
                continue
            logger.propagate = settings.propagate
            for handler_settings in settings.handlers:
                handler = logging.StreamHandler(getattr(sys, handler_settings.stream))
                handler.setLevel(handler_settings.level)
                if handler_settings.format is not None:
                    written, dates, style = handler_settings.format
                    handler.setFormatter(logging.Formatter(written, dates, style, validate=False))
                logger.addHandler(handler)
                self._handlers.append((logger, handler))
        logging.disable(now.logging_disabled)


def import_path(own: Sequence[str], notebook: Sequence[Sequence[str]], *, same_python: bool) -> list[str]:
    """Return a rank's sys.path, made from the rank's own entries and the notebook's entries.

    The rank's entries before its standard library come first, because they hold the code that was shipped to the rank.
    Then come the notebook's entries that exist on the rank, in their order, and last the rank's remaining entries.

    If the rank's Python is not the notebook's, the rank keeps its own standard library and installed packages. The
    entries for these replace the notebook's entries of the same kind.
    """
    known = {entry for entry, _ in notebook}
    kinds = {entry: kind_of_entry(entry) for entry in own}
    shipped = itertools.takewhile(lambda entry: kinds[entry] != "stdlib", own)
    entries = [entry for entry in shipped if entry not in known]
    if "" not in known:
        entries.append("")
    placed: set[str] = set()
    for entry, kind in notebook:
        if same_python or not kind:
            entries += [entry] if entry in kinds or os.path.exists(entry or ".") else []
        elif kind not in placed:
            placed.add(kind)
            entries += [own_entry for own_entry in own if kinds[own_entry] == kind]
    return list(dict.fromkeys([*entries, *own]))
