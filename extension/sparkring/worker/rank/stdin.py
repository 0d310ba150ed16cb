"""Implements input(), getpass() and breakpoint() on ranks: the user answers in the notebook.

The standard input of a rank is empty. So the prompt is sent to the driver, and the rank waits for an Answer. The prompt
and the answer are also printed, so that the rank's log contains them, as a terminal would.
"""

from __future__ import annotations

import builtins
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from sparkring.runtime.report import MESSAGE_CHARACTERS
from sparkring.wire.messages import Answer, InputEnded, InputRequested
from sparkring.worker.rank.imports import when_imported

NOBODY = (
    "nobody can answer input() here: the notebook is executed without a user, or the front end cannot ask. "
    "Pass the value to the cell as a variable."
)
IN_ITEM = "an item of a run cannot call input(): pass the value to the item as a variable."

_answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
_asking = threading.Lock()  # two threads of a rank must not wait at the same time
_requests = 0


def connect(tell: Callable[[InputRequested | InputEnded], None], refused: Callable[[], str]) -> None:
    """Replace input(), getpass() and the hook of breakpoint() in this process.

    `tell` sends a message to the driver. If `refused()` returns a reason, it becomes the message of an EOFError.
    """
    rank, of_python = os.getpid(), builtins.input

    def ask(prompt: object = "", /, *, hidden: bool = False) -> str:
        if os.getpid() != rank:
            return of_python(prompt)  # in a process that the user has forked: its standard input is empty
        if reason := refused():
            raise EOFError(reason)
        with _asking:
            return _wait(str(prompt), hidden=hidden, tell=tell)

    def ask_hidden(prompt: str = "Password: ", stream: object = None, **options: object) -> str:
        return ask(prompt, hidden=True)

    builtins.input = ask
    sys.breakpointhook = _break
    when_imported("getpass", lambda module: setattr(module, "getpass", ask_hidden))


def take(answer: Answer) -> None:
    """Take the driver's answer. Any thread may call this function."""
    _answers.put(answer)


def _wait(prompt: str, *, hidden: bool, tell: Callable[[InputRequested | InputEnded], None]) -> str:
    global _requests
    _requests += 1
    number = _requests
    sys.stdout.write(prompt)
    sys.stdout.flush()
    tell(InputRequested(number, prompt[-MESSAGE_CHARACTERS:], hidden))
    try:
        while (answer := _answers.get()).number != number:
            pass  # it answers a request that was interrupted
    finally:
        tell(InputEnded(number))
    sys.stdout.write("\n" if hidden or answer.text is None else f"{answer.text}\n")
    if answer.text is None:
        raise EOFError(NOBODY)
    return answer.text


def _break(*arguments: Any, **options: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT"):  # the user has chosen another debugger, or 0 for none
        return sys.__breakpointhook__(*arguments, **options)
    from sparkring.worker.rank.debugger import Debugger

    return Debugger().set_trace(sys._getframe(1))
