"""Implements input(), getpass() and breakpoint() on ranks. The user answers in the notebook.

The standard input of a rank is empty. Therefore, the rank sends the prompt to the driver and waits for an Answer. The
rank also prints the prompt and the answer, so that its log contains them, as the output of a terminal would.
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
    "nobody can answer input() here: the notebook is executed without a user, the front end cannot ask, or the run is "
    "in the background and has no live panel. Pass the value to the cell as a variable."
)
IN_ITEM = "an item of a run cannot call input(): pass the value to the item as a variable."

_answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
_asking = threading.Lock()  # two threads of a rank must not wait at the same time
_requests = 0


def connect(tell: Callable[[InputRequested | InputEnded], None], refused: Callable[[], str]) -> None:
    """Replace input(), getpass() and the hook of breakpoint() in this process.

    `tell` sends a message to the driver. If `refused()` returns a reason, an EOFError with this reason is raised.
    """
    rank, of_python = os.getpid(), builtins.input

    def ask(prompt: object = "", /, *, hidden: bool = False) -> str:
        if os.getpid() != rank:
            return of_python(prompt)  # this is a process that the user has forked; its standard input is empty
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
            pass  # this answer is for an earlier request, which was interrupted
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
