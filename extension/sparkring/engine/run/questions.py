"""Asks the user for the input that ranks request with input().

A run in the foreground keeps the kernel busy. The kernel's own input() then asks the user, because every front end
supports it. Meanwhile, a thread continues to poll the gang, so that the end of the run also ends the wait for the user.
For a run in the background, the kernel cannot ask the user. The panel asks instead.

While a rank is in Python's debugger, its prompts come before those of other ranks. `rank 3` continues with rank 3.
"""

from __future__ import annotations

import builtins
import contextlib
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from sparkring.history.describe.text import rank_list
from sparkring.history.events import InputRequested
from sparkring.history.record import RunRecord
from sparkring.runtime.interrupts import Interrupts
from sparkring.wire.messages import Answer

STAY_S = 1.0  # so long after its last prompt, a debugger's next one comes before those of other ranks
_DEBUGGER = "(Pdb) "


class RankQuestions:
    """Gets the answers to the requests of a run's ranks.

    With `by_panel`, the answers come from a panel, which calls answer(). Otherwise, the kernel asks the user. If the
    kernel cannot ask, or if `nobody` says that there is no user, each answer is None.
    """

    def __init__(self, *, by_panel: bool = False, nobody: bool = False) -> None:
        self.by_panel = by_panel and not nobody
        self._nobody = nobody
        self._given: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._settled: set[InputRequested] = set()
        self._rank = -1  # whose prompts come first, until the time `_stays_until`
        self._stays_until = 0.0
        self._wanted: int | None = None  # the rank to which the user has just switched
        self._hint = ""  # shown before the next prompt

    def answer(self, rank: int, number: int, text: str) -> None:
        """Take the user's answer to request `number` of `rank`. Any thread may call this method."""
        self._given.put((rank, Answer(number, text)))

    def answers(
        self, record: RunRecord, interrupts: Interrupts, poll: Callable[[], object], over: Callable[[int], bool]
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the available answers to the requests of the ranks of `record`, as pairs of a rank and an Answer.

        If the kernel has to ask the user, this method waits until the user has answered, or until `over(rank)` says
        that the rank no longer waits. Meanwhile, another thread calls poll() repeatedly.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._given.get_nowait()
        new = [asked for asked in record.questions if asked not in self._settled]
        if self.by_panel or not new:
            return
        asked = self._next(new, record)
        if asked is None or over(asked.rank):
            return
        self._settled.add(asked)
        text = None
        if not self._nobody and threading.current_thread() is threading.main_thread():
            label = self._hint + (f"[rank {asked.rank}] " if record.size > 1 else "")
            self._hint = ""
            text = _ask(asked._replace(prompt=label + asked.prompt), interrupts, poll, lambda: over(asked.rank))
        if asked.prompt == _DEBUGGER:
            self._rank, self._stays_until = asked.rank, time.monotonic() + STAY_S
            if switch := re.fullmatch(r"\s*rank\s+(\d+)\s*", text or ""):
                self._wanted = int(switch[1])
                self._settled.discard(asked)
                return
        if not over(asked.rank):
            yield asked.rank, Answer(asked.number, text)

    def _next(self, new: list[InputRequested], record: RunRecord) -> InputRequested | None:
        """Return which of the requests to ask next. If it is None, the rank in the debugger may ask again soon."""
        by_rank = {asked.rank: asked for asked in new}
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            if wanted in by_rank:
                return by_rank[wanted]
            self._hint = f"rank {wanted} is not at a prompt; these are: {rank_list(sorted(by_rank))}\n"
        if self._rank in by_rank:
            return by_rank[self._rank]
        is_running = 0 <= self._rank < len(record.ranks) and record.ranks[self._rank].state == "running"
        if is_running and time.monotonic() < self._stays_until:
            return None
        if len(by_rank) > 1 and new[0].prompt == _DEBUGGER and not self._hint:
            self._hint = f"{rank_list(sorted(by_rank))} are at a prompt; to switch, type `rank {new[1].rank}`\n"
        return new[0]


def _ask(
    asked: InputRequested, interrupts: Interrupts, poll: Callable[[], object], over: Callable[[], bool]
) -> str | None:
    """Return what the user types. Return None if no user can be asked, or if the wait has ended for another reason."""
    ended, called_off, guard = threading.Event(), threading.Event(), threading.Lock()

    def keep_polling() -> None:
        while not ended.is_set():
            try:
                poll()
                finished = over()
            except Exception:  # the caller polls again, and gets the error
                finished = True
            with guard:
                if finished and not ended.is_set():
                    called_off.set()
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    return

    thread = threading.Thread(target=keep_polling, name="sparkring-asking", daemon=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            thread.start()
            return _read(asked)
        finally:
            with guard:
                ended.set()
            signal.signal(signal.SIGINT, before)
    except KeyboardInterrupt:
        if not called_off.is_set():
            interrupts.request()
        return None
    except (EOFError, OSError, _cannot_ask()):
        return None
    finally:
        signal.signal(signal.SIGINT, before)  # again: an interrupt may have prevented the same call above
        ended.set()
        thread.join()


def _read(asked: InputRequested) -> str:
    if asked.hidden:
        import getpass

        return getpass.getpass(asked.prompt)
    return builtins.input(asked.prompt)


def _cannot_ask() -> type[BaseException]:
    """Return the class of the error that a kernel raises if its front end cannot ask the user for input."""
    module = sys.modules.get("IPython.core.error")
    return EOFError if module is None else module.StdinNotImplementedError
