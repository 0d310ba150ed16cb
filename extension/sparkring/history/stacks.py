"""Takes the Python stack of a rank, even if the rank's code is stuck.

The signal handler of faulthandler is C code, so it works even while the rank waits in an allreduce, holds the GIL, or
is in a system call. It does not work while the process is frozen (SIGSTOP).
"""

from __future__ import annotations

import faulthandler
import re
import signal
from typing import NamedTuple

CELL_NAME = "<cell>"  # the file name of the cell that is being run
EARLIER_CELL = "<earlier cell>"  # when a rank reports a failure, it uses this file name for all earlier cells
_CELL = re.compile(r"<cell(?: (\d+))?>")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = re.compile(r".*(?:/(?:site|dist)-packages/|\.zip/|/lib/python3\.\d+/)")

# The functions in which a rank waits for the others: a pattern for the file, a pattern for the function, and the usual
# name of the collective. If the name is '', the group `name` of the function's pattern is used. Functions that only
# begin an operation (allreduce_async, isend) are not listed. synchronize() in Horovod's mpi_ops is not listed either,
# because its caller is listed. The patterns are compiled when they are first used: every rank imports this module.
_WAITS = (
    (
        r"/horovod/(?:common|torch|tensorflow|keras|_keras)/",
        r"_?(?P<name>(?:grouped_|sparse_)?(?:allreduce|allgather|reducescatter|alltoall|broadcast)"
        r"|broadcast_(?:parameters|optimizer_state|object|variables|global_variables)|allgather_object"
        r"|barrier|join|init)_?",
        "",
    ),
    (r"/horovod/torch/optimizer\.py$", r"synchronize", "allreduce"),
    (
        r"/torch/distributed/(?:distributed_c10d|collective_utils|_functional_collectives|nn/functional)\.py$",
        r"_?(?P<name>(?:all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|monitored_barrier)\w*"
        r"|(?:gather|scatter|send|recv)(?:_object(?:_list)?)?|reduce|barrier|init_process_group"
        r"|new_group|destroy_process_group)",
        "",
    ),
    (r"/torch/distributed/utils\.py$", r"_sync_module_states|_verify_param_shape_across_processes", "broadcast"),
    (r"/torch/nn/parallel/distributed\.py$", r"_sync_buffers", "broadcast"),
    (
        r"/tensorflow/python/ops/collective_ops\.py$",
        r"(?P<name>all_reduce|all_gather|all_to_all|broadcast|initialize_communicator)(?:_send|_recv)?(?:_v\d)?",
        "",
    ),
    (
        r"/tensorflow/python/distribute/collective_all_reduce_strategy\.py$",
        r"_initialize_multi_worker",
        "MultiWorkerMirroredStrategy",
    ),
    (r"/pyspark/taskcontext\.py$|sparkring/worker/rank/task_context\.py$", r"(?P<name>barrier|allGather)", ""),
)
# TensorFlow runs a whole graph in one call, for example in Keras' fit. The Python stack does not show whether the rank
# is computing in this call or waiting in one of the graph's collectives.
GRAPH = "a TensorFlow graph"
_RUNS_GRAPH = (
    ("/tensorflow/python/eager/context.py", "call_function"),
    ("/tensorflow/python/client/session.py", "_call_tf_sessionrun"),
)
TRACES_GRAPH = "func_graph_from_py_func"
# The path has no leading slash, because executors import sparkring from a zip, where paths begin with `sparkring/`.
_WAITS_FOR_CELL = ("sparkring/worker/rank/rank.py", "serve")


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


def install(fd: int) -> None:
    """Write the main thread's stack to `fd` on SIGUSR2, and all threads' stacks to stderr when the process crashes.

    The main thread handles the signal, so it reads its own stack. Reading the stacks of other threads while they are
    running would crash the process sooner or later. A library may replace the handler, as Lightning does when a fit
    ends; calling install() again restores the handler.
    """
    faulthandler.enable(all_threads=True)  # a crash may be in a thread of a library
    faulthandler.unregister(signal.SIGUSR2)  # otherwise, the next line would leave a replaced handler as it is
    faulthandler.register(signal.SIGUSR2, file=fd, all_threads=False)


def cell_name(number: int) -> str:
    """Return the file name under which a rank compiles its cell `number`, counted from 1.

    A later cell may call functions of this cell. The file name then says which cell a frame of the stack belongs to.
    """
    return CELL_NAME if number == 1 else f"<cell {number}>"


def is_cell(filename: str) -> bool:
    """Return whether this is the file name of a cell: of the cell that is being run, or of an earlier cell."""
    return _CELL.fullmatch(filename) is not None


def cell_line(text: str) -> int:
    """Return the innermost line of the cell on the main thread's stack `text`; 0 if the cell is not on the stack.

    `text` was written by faulthandler. If it has frames of several cells, return the line of the newest cell.
    """
    newest, line = 0, 0
    for frame in _main_thread(text):
        cell = _CELL.fullmatch(frame.file)
        if cell and int(cell[1] or 1) > newest:  # the cell may have called functions of earlier cells
            newest, line = int(cell[1] or 1), frame.line
    return line


def innermost(text: str) -> str:
    """Return the function that the main thread is in, as `numpy/linalg.py:12 solve`; '' if it is not known."""
    frames = _main_thread(text)
    if not frames:
        return ""
    return place(*frames[0])


def place(file: str, line: int, function: str) -> str:
    """Return a place in the code: `numpy/linalg.py:12 solve`."""
    short, in_library = _LIBRARIES.subn("", file)
    return f"{short if in_library else file.rpartition('/')[2]}:{line} {function}"


def waits_for_cell(text: str) -> bool:
    """Return whether the main thread is in the function in which a rank of a warm gang waits for its next cell."""
    file, function = _WAITS_FOR_CELL
    return any(frame.function == function and frame.file.endswith(file) for frame in _main_thread(text)[:1])


def collective(text: str) -> str:
    """Return the collective in which the main thread is waiting, such as `allreduce` or `init`; '' if none is known.

    This is the innermost function on the stack that is a collective of Horovod, torch.distributed, TensorFlow or Spark.
    If there is no such function, but TensorFlow is running a graph, GRAPH is returned.
    """
    frames = _main_thread(text)
    graph = ""
    for at, frame in enumerate(frames):
        if is_cell(frame.file):
            break  # the remaining frames, farther out, only wait for the cell to end
        if name := waits_in(frame.file, frame.function):
            # While TensorFlow traces a graph, it records the graph's collectives, but does not run them.
            return "" if any(outer.function == TRACES_GRAPH for outer in frames[at:]) else name
        if runs_graph(frame.file, frame.function):
            graph = GRAPH
    return graph


def waits_in(file: str, function: str) -> str:
    """Return the collective that a function is, such as `allreduce`; '' if it is none."""
    for file_pattern, function_pattern, name in _WAITS:
        match = re.fullmatch(function_pattern, function)
        if match and re.search(file_pattern, file):
            return name or match["name"]
    return ""


def runs_graph(file: str, function: str) -> bool:
    """Return whether TensorFlow runs a graph in this function."""
    return any(function == name and file.endswith(end) for end, name in _RUNS_GRAPH)


def _main_thread(text: str) -> list[Frame]:
    """Return the frames of the main thread, innermost first."""
    last_block = text.rpartition("(most recent call first):")[2]  # in version 0.1, other threads' frames came first
    return [Frame(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(last_block)]
