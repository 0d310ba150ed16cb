"""Describes an exception on a rank in strings and numbers, so that the driver does not need the exception's class."""

from __future__ import annotations

import linecache
import os
import re
import socket
import sys
import traceback
import types
from typing import Any

from sparkring.capture import submodules
from sparkring.capture.platform_names import INSTEAD_OF
from sparkring.capture.source_lines import FUTURE_LINE
from sparkring.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    NotFiniteError,
    OptionsError,
    PathError,
    SparkringError,
)
from sparkring.history.stacks import CELL_NAME, EARLIER_CELL, is_cell
from sparkring.runtime import packages
from sparkring.wire.messages import CodeFrame, Failure, FailureCause, GpuFault, SourceLine
from sparkring.worker.rank import gpu_faults, script

CONTEXT_LINES = 2
MOST_FRAMES = 50

# When a rank is gone, the other ranks raise exceptions with these messages. Such exceptions are called echoes, and are
# not the cause of the failure.
_ECHOES = (
    "HorovodInternalError",
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "ProcessGroupGloo",
    "ncclRemoteError",
    "Timed out waiting for clients",
    "Horovod has been shut down",
)

_NOT_DEFINED = re.compile(r"'(\w+)' is not defined")
_NOT_IN_MAIN = re.compile(r"Can't get attribute '(\w+)[.\w]*' on <module '__main__'")  # pickle's message
_SCOPES = {"globals", "locals", "vars"}
# Exceptions that the same code would raise again, on whichever machines the ranks run.
_CODE = (
    NameError,
    TypeError,
    AttributeError,
    ImportError,
    SyntaxError,
    OptionsError,
    PathError,
    CheckpointError,
    NotFiniteError,
)

# pybind11 puts this text into an exception if a KeyboardInterrupt arrives while the exception is being made. This can
# happen when a TensorFlow collective is ended.
_INTERRUPTED = "REPLACED BY KeyboardInterrupt"

DBFS_MOUNT = "/dbfs"  # the same as in runtime/storage.py, which needs packages that executors may lack

_HERE = os.path.dirname((lambda: None).__code__.co_filename)  # not __file__, which differs if this is in a zip
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "")


def as_failure(error: BaseException, cell: str = CELL_NAME) -> Failure:
    """Describe the exception that ended a request. `cell` is the file name of the cell that is being run."""
    if _INTERRUPTED in _text_of(error):
        error = KeyboardInterrupt().with_traceback(error.__traceback__)
    name = type(error).__qualname__
    text = _text_of(error)
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        summary = f"called sys.exit({code})"
    elif isinstance(error, KeyboardInterrupt):
        summary = "interrupted"
    else:
        summary = f"{name}: {text.strip()}" if text else name  # a table shows only the first line
    fault = None if isinstance(error, KeyboardInterrupt | SystemExit) else gpu_faults.find(_chain(error))
    return Failure(
        cause=_cause(error, fault),
        summary=summary,
        frames=_frames(error, cell),
        traceback=_traceback(error),
        advice=_advice(error),
        error=f"{type(error).__module__}.{name}",
        gpu=fault,
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception and the exceptions that Python's traceback shows with it: its causes and contexts."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not other for other in chain):
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _cause(error: BaseException, fault: GpuFault | None) -> FailureCause:
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    if isinstance(error, CheckpointDamagedError):
        return "damaged checkpoint"
    if fault is not None:
        return "out of memory" if fault.kind == "out of memory" else "exception"
    texts = [f"{type(link).__qualname__}: {_text_of(link)}" for link in _chain(error)]
    if any(mark in text for text in texts for mark in _ECHOES):
        return "echo"
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, MemoryError):
        return "out of memory"
    return "code" if isinstance(error, _CODE) and not isinstance(error, CheckpointStorageError) else "exception"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the user's own __str__
        return f"(its message cannot be read: {type(second).__name__})"


def _traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without sparkring's frames; for an interrupt, only frames of cells."""
    try:
        parts = traceback.TracebackException(type(error), error, _skip_ours(error), compact=True)
        _leave_out_ours(parts, error)
        if isinstance(error, KeyboardInterrupt):
            cells = [frame for frame in parts.stack if is_cell(frame.filename)]
            parts.stack = traceback.StackSummary.from_list(cells or parts.stack)
            parts.__context__ = None
        return "".join(parts.format())
    except Exception:  # formatting an unusual exception may fail
        return f"{type(error).__qualname__}\n"


def _skip_ours(error: BaseException) -> Any:
    """Return the error's traceback from the first frame that is not in sparkring.worker."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith("sparkring.worker"):
        tb = tb.tb_next
    return tb


def _leave_out_ours(parts: traceback.TracebackException | None, error: BaseException) -> None:
    """Remove the frames of sparkring from `parts`, the traceback of `error`, and from the tracebacks chained to it."""
    for link in _chain(error):
        if parts is None:
            return
        kept = [frame for frame in parts.stack if not _is_ours(frame.filename, link)]
        parts.stack = traceback.StackSummary.from_list(kept)
        parts = parts.__cause__ or parts.__context__


def _is_ours(filename: str, error: BaseException) -> bool:
    """Return whether to leave a frame out of the traceback, because it is not the user's code.

    Frames of this folder are always left out: when a cell runs a script, they lie between the cell's frames and the
    script's frames. If sparkring itself raised `error`, the frames of the whole package are left out.
    """
    if isinstance(error, SparkringError):
        return filename.startswith(_PACKAGE)
    return os.path.dirname(filename) == _HERE


def _frames(error: BaseException, cell: str) -> tuple[CodeFrame, ...]:
    """Return the frames of the traceback that the summary can name.

    Frames of sparkring at the end are left out. Most errors there are about a wrong argument, such as
    `log(loss="high")`. The traceback in the log has these frames.
    """
    frames = []
    for frame, number_or_none in traceback.walk_tb(_skip_ours(error)):
        line = number_or_none or 0  # generated code may have no line numbers
        filename = frame.f_code.co_filename
        if _is_ours(filename, error):
            continue
        in_cell = is_cell(filename) or "ipykernel_" in filename or filename.startswith("<ipython-input")
        source = []
        if in_cell or filename in script.files:
            for number in range(max(1, line - CONTEXT_LINES), line + CONTEXT_LINES + 1):
                text = linecache.getline(filename, number)
                is_ours = number == 1 and is_cell(filename) and text.strip() == FUTURE_LINE
                if text.strip() and not is_ours:
                    source.append(SourceLine(number, text.rstrip("\n")))
        # On a rank, the file names of cells contain numbers.
        name = CELL_NAME if filename == cell else EARLIER_CELL if is_cell(filename) else filename
        frames.append(CodeFrame(name, line, frame.f_code.co_name, in_cell, tuple(source)))
    while frames and frames[-1].filename.startswith(_PACKAGE):
        frames.pop()
    return tuple(frames[-MOST_FRAMES:])


def _advice(error: BaseException) -> str:
    """Return what the user can do next; '' if the error is not a common one."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package == "horovod":
            return "Horovod is not installed for this rank's Python: run `sparkring-build-horovod --install` there."
        modules = sys.modules.get("sparkring.worker.rank.sent_modules")  # only ranks on other machines import it
        if requirement := getattr(modules, "requirements", {}).get(package):
            return (
                f"This rank's Python, {sys.executable} on {socket.gethostname()}, has no `{package}`: run "
                f"`{sys.executable} -m pip install {requirement}` there."
            )
        if package in packages.KNOWN:
            return f"Install it for this rank's Python: {packages.command(package)}."
        return (
            f"`{package}` is not installed for this rank's Python. If it is a module of your own, put it in the "
            "notebook's folder or on sys.path: it is then sent to the ranks."
        )
    if type(error).__name__ == "DataLossError" and "corrupted record" in str(error):
        return (
            "A TFRecord file is damaged. To find out which one, read the files with `for batch in tfrecords(…): pass`."
        )
    if isinstance(error, TypeError | ValueError) and _takes_trial_for_value(error):
        return (
            "The item is a trial of a search, with all its parameters: use one of them, as in `trial.lr`, or name them "
            "in the for clause, as in `lr, width in trials`."
        )
    if isinstance(error, MemoryError):
        return "The rank ran out of memory: use fewer ranks per machine, smaller batches, or a shard of the data."
    if isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        name = f"{error.obj.__name__}.{error.name}"
        if name in submodules.missing:
            return f"The notebook has imported `{name}`, but this rank could not import it: {submodules.missing[name]}."
    if _fits_among_workers(error):
        return (
            "Keras 3's fit() does not work under MultiWorkerMirroredStrategy: use tf-keras (`pip install --no-deps "
            "tf-keras`, then %%tensorflow --env TF_USE_LEGACY_KERAS=1), a loop of your own with strategy.run(), or "
            "%%horovod."
        )
    if unknown := _unknown_name(error):
        return INSTEAD_OF.get(unknown) or (
            f"`{unknown}` is not known on the ranks: define it in the cell or in the notebook, or name it with --push."
        )
    is_ours = isinstance(error, SparkringError)
    if not is_ours and re.search(rf"(?<![\w/]){DBFS_MOUNT}\b", _text_of(error)) and not os.path.isdir(DBFS_MOUNT):
        return (
            f"There is no {DBFS_MOUNT} where this rank runs: write sparkring.local_path('{DBFS_MOUNT}/…') in place of "
            "the path."
        )
    if isinstance(error, ImportError) and "horovod" in str(error).lower():
        return "This Horovod was not built for that framework: run `sparkring-build-horovod --install --force`."
    return ""


def _takes_trial_for_value(error: BaseException) -> bool:
    """Return whether an error's message names the class of a search's trials, or has the repr() of a trial."""
    return "sparkring.runtime.parameters" in sys.modules and re.search(r"\bParameters\b", _text_of(error)) is not None


def _fits_among_workers(error: BaseException) -> bool:
    """Return whether Keras 3 itself failed in a method of a model that a MultiWorkerMirroredStrategy distributes.

    Under this strategy, Keras 3 passes a PerReplica value (a tensor for each replica) to TensorFlow, which refuses it.
    Only the error's message shows this, since Keras removes its frames from the traceback.
    """
    if not isinstance(error, ValueError) or "distribute.values.PerReplica" not in _text_of(error):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Keras removes all of its frames except those of this module, in which args[0] is the model.
        if frame.f_globals.get("__name__") == "keras.src.utils.traceback_utils":
            arguments = frame.f_locals.get("args") or (None,)
            strategy = getattr(arguments[0], "distribute_strategy", None)
            if getattr(strategy, "__module__", "").endswith("collective_all_reduce_strategy"):
                return True
    return False


def _unknown_name(error: BaseException) -> str:
    """Return the name that the code did not find in the rank's `__main__`; '' if the error has another reason."""
    if isinstance(error, NameError):
        unknown = _NOT_DEFINED.search(str(error))  # in a NameError from pandas, `name` is not set
        return error.name or (unknown[1] if unknown else "")
    if isinstance(error, AttributeError) and error.obj is sys.modules["__main__"]:
        return error.name or ""
    if isinstance(error, AttributeError) and (unknown := _NOT_IN_MAIN.search(str(error))):
        return unknown[1]
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        mine = [frame for frame in frames if frame.f_globals.get("__name__") == "__main__"]
        if mine and not _SCOPES.isdisjoint(mine[-1].f_code.co_names) and error.args[0].isidentifier():
            return error.args[0]
    return ""
