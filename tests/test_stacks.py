"""Tests of what a stack says about a rank: where it is, and whether it is waiting for the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from sparkring.history.stacks import GRAPH, cell_line, collective, innermost, waits_for_cell

PACKAGES = "/opt/env/lib/python3.11/site-packages"
OUTER = [("<cell>", 7, "<module>"), ("/opt/sparkring/worker/rank.py", 185, "_execute")]
GRAPH_CALL = [
    ("tensorflow/python/eager/execute.py", 53, "quick_execute"),
    ("tensorflow/python/eager/context.py", 1486, "call_function"),
    ("tensorflow/python/eager/polymorphic_function/atomic_function.py", 251, "call_flat"),
    ("tensorflow/python/util/traceback_utils.py", 150, "error_handler"),
]
C10D = "torch/distributed/distributed_c10d.py"
LOGGER = ("torch/distributed/c10d_logger.py", 83, "wrapper")
SYNCHRONIZE = ("horovod/torch/mpi_ops.py", 1285, "synchronize")


def stack(frames, outer=OUTER) -> str:
    """Return a stack as faulthandler prints it: another thread, then the main thread, innermost frame first."""
    lines = [
        "Thread 0x7f01 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait',
        "",
    ]
    lines += ["Current thread 0x7f02 (most recent call first):"]
    for file, line, function in [*frames, *outer]:
        path = file if file.startswith(("/", "<")) else f"{PACKAGES}/{file}"
        lines.append(f'  File "{path}", line {line} in {function}')
    return "\n".join(lines) + "\n"


# Frames of real ranks that were waiting for another rank, shortened in the middle.
SEEN = {
    "allreduce": [
        SYNCHRONIZE,
        ("horovod/torch/mpi_ops.py", 205, "forward"),
        ("torch/autograd/function.py", 625, "apply"),
        ("horovod/torch/mpi_ops.py", 254, "allreduce"),
    ],
    "allreduce of gradients": [
        SYNCHRONIZE,
        ("horovod/torch/optimizer.py", 284, "synchronize"),
        ("horovod/torch/optimizer.py", 333, "step"),
        ("torch/optim/optimizer.py", 530, "wrapper"),
    ],
    "broadcast_parameters": [SYNCHRONIZE, ("horovod/torch/functions.py", 59, "broadcast_parameters")],
    "barrier": [SYNCHRONIZE, ("horovod/torch/mpi_ops.py", 1333, "barrier")],
    "join": [SYNCHRONIZE, ("horovod/torch/mpi_ops.py", 1313, "join")],
    "init": [("horovod/common/basics.py", 105, "init"), ("horovod/torch/mpi_ops.py", 72, "init")],
    "allreduce in TensorFlow": [
        ("<string>", 59, "horovod_allreduce"),
        ("horovod/tensorflow/mpi_ops.py", 130, "_allreduce"),
        ("horovod/tensorflow/__init__.py", 138, "allreduce"),
    ],
    "broadcast_variables": [
        *GRAPH_CALL,
        ("horovod/tensorflow/functions.py", 94, "broadcast_variables"),
        ("horovod/_keras/callbacks.py", 51, "on_batch_end"),
        ("keras/src/engine/training.py", 1813, "fit"),
    ],
    "a TensorFlow graph": [
        *GRAPH_CALL,
        ("keras/src/engine/training.py", 1807, "fit"),
        ("keras/src/utils/traceback_utils.py", 65, "error_handler"),
    ],
    "broadcast of a mirrored variable": [
        ("tensorflow/python/eager/execute.py", 53, "quick_execute"),
        ("tensorflow/python/ops/gen_collective_ops.py", 509, "collective_bcast_send"),
        ("tensorflow/python/ops/collective_ops.py", 304, "broadcast_send"),
        ("tensorflow/python/distribute/collective_all_reduce_strategy.py", 628, "initial_value_fn"),
    ],
    "MultiWorkerMirroredStrategy": [
        ("tensorflow/python/eager/context.py", 617, "ensure_initialized"),
        ("tensorflow/python/distribute/collective_all_reduce_strategy.py", 530, "_initialize_multi_worker"),
        ("tensorflow/python/distribute/collective_all_reduce_strategy.py", 186, "__init__"),
    ],
    "all_reduce": [(C10D, 3252, "all_reduce"), LOGGER],
    "barrier of torch": [(C10D, 5356, "barrier"), LOGGER],
    "broadcast": [(C10D, 3151, "broadcast"), LOGGER, (C10D, 4026, "broadcast_object_list"), LOGGER],
    "init_process_group": [
        ("torch/distributed/rendezvous.py", 199, "_create_c10d_store"),
        ("torch/distributed/rendezvous.py", 280, "_env_rendezvous_handler"),
        (C10D, 1892, "init_process_group"),
        LOGGER,
    ],
    "barrier of Spark": [
        ("/usr/lib/python3.11/socket.py", 706, "readinto"),
        ("/spark/python/lib/pyspark.zip/pyspark/serializers.py", 572, "loads"),
        ("/spark/python/lib/pyspark.zip/pyspark/taskcontext.py", 287, "_load_from_socket"),
        ("/spark/python/lib/pyspark.zip/pyspark/taskcontext.py", 399, "barrier"),
    ],
    "allGather": [("pyspark/taskcontext.py", 287, "_load_from_socket"), ("pyspark/taskcontext.py", 430, "allGather")],
}


@pytest.mark.parametrize("name", SEEN)
def test_a_rank_that_waits_for_the_others(name):
    """The innermost collective has the name that users know."""
    assert collective(stack(SEEN[name])) == (GRAPH if name == GRAPH else name.partition(" ")[0])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [("torch/autograd/graph.py", 979, "_engine_run_backward"), ("torch/_tensor.py", 623, "backward")],
        [("horovod/torch/mpi_ops.py", 254, "allreduce_async_")],
        [(C10D, 2650, "isend")],
        [("/home/user/train.py", 3, "allreduce")],
        [
            ("tensorflow/python/eager/execute.py", 53, "quick_execute"),
            ("tensorflow/python/ops/math_ops.py", 9, "matmul"),
        ],
        [("<cell>", 3, "hook"), (C10D, 3252, "all_reduce")],
        [
            ("horovod/tensorflow/mpi_ops.py", 130, "_allreduce"),
            ("tensorflow/python/framework/func_graph.py", 1059, "func_graph_from_py_func"),
        ],
    ],
    ids=["the cell", "backward", "begun", "begun too", "a namesake", "an operation", "the cell's hook", "being traced"],
)
def test_a_rank_that_does_not_wait_or_not_visibly(frames):
    assert collective(stack(frames)) == ""


def test_only_the_main_thread_counts():
    """The main thread is the one that faulthandler prints last."""
    text = stack(SEEN["barrier"]) + stack([("numpy/linalg.py", 12, "solve")])
    assert collective(text) == ""
    assert innermost(text) == "numpy/linalg.py:12 solve"


def test_where_a_rank_stands():
    """Library files are shown with their path in the library, others with their name. An empty stack shows nothing."""
    assert innermost(stack(SEEN["barrier of Spark"])) == "socket.py:706 readinto"
    assert innermost(stack(SEEN["barrier of Spark"][1:])) == "pyspark/serializers.py:572 loads"
    assert innermost(stack([("/home/user/train.py", 3, "step")])) == "train.py:3 step"
    assert innermost(stack([])) == "<cell>:7 <module>"
    assert (innermost(""), collective(""), cell_line("")) == ("", "", 0)
    assert cell_line(stack(SEEN["all_reduce"])) == 7


@pytest.mark.parametrize("folder", ["/opt/env/", "/tmp/x/sparkring.zip/", ""])
def test_a_rank_that_waits_for_its_next_cell(folder):
    """The rank is recognized wherever sparkring is installed, but only if it is in sparkring's own function."""
    text = (
        f'Thread 0x7f02 (most recent call first):\n  File "{folder}sparkring/worker/rank/rank.py", line 117 in serve\n'
    )
    assert waits_for_cell(text)
    assert not waits_for_cell(text.replace("rank.py", "server.py"))
    assert not waits_for_cell(text.replace("in serve", "in run"))
    assert not waits_for_cell("")


def test_a_stack_may_be_taken_while_threads_run():
    """faulthandler reads frames without the GIL, so frames of other threads may be freed while it reads them."""
    code = """
        import os, sys, threading
        from sparkring.history import stacks

        def deep(n):
            return n and deep(n - 1)

        def other(n):
            return n and other(n - 1)

        # Python 3.10 counts references to the code objects on the stack, without the GIL: a crash needs a thread that
        # runs the same function at the same time.
        if sys.version_info >= (3, 11):
            other = deep

        def churn():
            while True:
                thread = threading.Thread(target=other, args=(50,))
                thread.start()
                other(100)
                thread.join()

        stacks.install(os.open(os.devnull, os.O_WRONLY))
        for _ in range(3):
            threading.Thread(target=churn, daemon=True).start()
        print("up", flush=True)
        while True:
            deep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        for _ in range(1_000):
            process.send_signal(signal.SIGUSR2)
            time.sleep(0.001)
        assert process.poll() is None
        process.kill()
