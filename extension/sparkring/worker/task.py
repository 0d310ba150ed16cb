"""What a Spark task does: unpack sparkring, start a member, wait until it ends.

Executors need not have sparkring: this file's text is compiled on the driver and its function
pickled by value, so it uses the standard library and pyspark only, and no name from outside.
Training runs in the member's child, never in Spark's Python worker, which is reused between tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def task_for(
    archive: bytes, boot: str, ticket: dict[str, Any], environment: dict[str, str], gpus: int | None
) -> Callable[[Iterable[Any]], Iterator[int]]:
    """The function for mapPartitions: yields the member's exit code.

    The rank gets the GPUs that Spark gave to the task, or the first `gpus` of them.
    """

    def run_member(rows: Iterable[Any]) -> Iterator[int]:
        import json
        import os
        import shutil
        import socket
        import subprocess
        import sys
        import tempfile

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        folder = tempfile.mkdtemp(prefix="sparkring-")
        path = os.path.join(folder, "sparkring.zip")
        with open(path, "wb") as file:
            file.write(archive)
        held = context.resources().get("gpu")
        found = {
            **ticket,
            "member": context.partitionId(),
            "first": [path],
            "cleanup": folder,
            "gpus": held.addresses[:gpus] if held else [],
        }
        member = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert member.stdin is not None
        try:
            member.stdin.write(json.dumps(found).encode() + b"\n")
            member.stdin.flush()
            # stdin stays open: when Spark kills this worker, it closes, and the member ends.
            code = member.wait()
            if code != 0:  # the others wait for it in vain: Spark then ends the whole stage
                raise RuntimeError(
                    f"sparkring: the process of task {context.partitionId()} on {socket.gethostname()} ended with "
                    f"code {code}; what it printed is in the executor's stderr. Does `{sys.executable}` start there?"
                )
            yield code
        finally:
            member.stdin.close()
            member.wait()
            shutil.rmtree(folder, ignore_errors=True)  # the member's own last act, unless it was killed

    return run_member
