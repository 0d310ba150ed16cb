"""What a rank does if its host is shut down: after SIGTERM, it stays until a checkpoint is saved, but only for a while.

A process gets SIGTERM before its machine is taken away, for example by a spot market, a scheduler or Spark. If the code
of the rank saves checkpoints, the rank tells the driver, which tells all ranks, because a checkpoint may need all of
them. Each rank answers with the number of its next save point: a call of save(), or the end of a batch of Keras' fit().
All ranks then save at the largest of these numbers, so that no rank waits for one that has already gone on. When the
checkpoint is complete, the driver lets the rank end by SIGTERM. If that takes too long, the rank ends by itself.

Without checkpoints, and if the user's code has a handler of its own, nothing here applies.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable

from sparkring.wire.messages import HostGoing, SavePoint

MOST_GRACE_S = 600.0

_Tell = Callable[[HostGoing | SavePoint], None]


class _Going:
    """The state of this process. `save_at` is None until the driver has said at which save point to save."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tell: _Tell | None = None  # None in a process that is not a rank
        self.grace_s = 0.0
        self.points = 0  # how many save points the request's code has passed
        self.is_going = False  # whether this process has got SIGTERM
        self.heard = False  # whether a host is shutting down, this one or that of another rank
        self.save_at: int | None = None
        self.deadline: float | None = None
        self.callbacks: list[Callable[[], object]] = []
        self.wakes: tuple[int, int] | None = None  # the pipe into which Python writes the numbers of signals


_now = _Going()
_forking = threading.local()


def begin(tell: _Tell, grace_s: float) -> None:
    """Begin a request of a rank."""
    _now.tell, _now.grace_s = tell, grace_s
    _now.points, _now.callbacks = 0, []
    if not _now.is_going:
        _now.heard, _now.save_at, _now.deadline = False, None, None


def end() -> None:
    """End a request: from now on, SIGTERM ends this process at once again, unless it has already come."""
    if not _now.is_going and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def arm() -> None:
    """Note that the code of the rank saves checkpoints, so that it gets a grace after SIGTERM."""
    is_rank = _now.tell is not None and threading.current_thread() is threading.main_thread()
    if not is_rank or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if _now.wakes is None:
        # Python calls a handler only between two lines of Python, so not while the rank waits in a collective. It
        # writes to this pipe at once.
        read, written = _now.wakes = os.pipe()
        os.set_blocking(written, False)
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        threading.Thread(target=_watch, args=(read,), name="sparkring-sigterm", daemon=True).start()
    before = signal.set_wakeup_fd(_now.wakes[1], warn_on_full_buffer=False)
    if before not in (-1, _now.wakes[1]):  # the user's code needs its own, for example asyncio: the handler must do
        signal.set_wakeup_fd(before)
    signal.signal(signal.SIGTERM, _on_sigterm)


def on_notice(call: Callable[[], object]) -> None:
    """Have `call` called, in another thread, when a host is shutting down."""
    arm()
    _now.callbacks.append(call)


def point() -> bool:
    """Pass a save point. Return whether the rank must save now, because a host is shutting down."""
    with _now.changed:
        _now.points += 1
        if not _now.heard:
            return False
        while _now.save_at is None and _left_s() > 0:
            _now.changed.wait(_left_s())
        return _now.save_at is not None and _now.points >= _now.save_at


def saved(*, complete: bool) -> None:
    """Tell the driver that this rank has saved, and wait for the end of the attempt.

    `complete` says whether the checkpoint is complete, which only the rank that commits it knows.
    """
    if complete and _now.tell is not None:
        _now.tell(SavePoint(_now.points, saved=True))
    while _left_s() > 0:  # if the driver does not end the attempt, go on
        time.sleep(min(_left_s(), 0.1))


def hear(save_at: int) -> None:
    """Carry out SaveSoon, in the thread that receives messages."""
    with _now.changed:
        if not save_at:
            _now.heard = True
            _now.deadline = _now.deadline or time.monotonic() + _now.grace_s
        else:
            _now.save_at = save_at
        _now.changed.notify_all()
        following = _now.points + 1
    if not save_at and _now.tell is not None:
        _now.tell(SavePoint(following))
        for call in _now.callbacks:
            threading.Thread(target=call, name="sparkring-on-notice", daemon=True).start()


def go() -> None:
    """Carry out GoNow, which only a process obeys that has got SIGTERM."""
    if _now.is_going:
        die()


def die() -> None:
    """End this process as SIGTERM does without a handler. Any thread may call this, also while others are busy."""
    import ctypes

    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _left_s() -> float:
    return 0.0 if _now.deadline is None else _now.deadline - time.monotonic()


def _watch(wakes: int) -> None:
    while True:
        if signal.SIGTERM in os.read(wakes, 512) and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            _notice()


def _on_sigterm(number: int, frame: types.FrameType | None) -> None:
    """Handle SIGTERM, if _watch() has not. In a thread, since this one may be in the middle of sending a message."""
    threading.Thread(target=_notice, name="sparkring-notice", daemon=True).start()


def _notice() -> None:
    """Tell the driver that this host is shutting down, once, and end the process when its time is up."""
    with _now.changed:
        if _now.is_going or _now.tell is None:
            return
        _now.is_going = True
        _now.deadline = _now.deadline or time.monotonic() + _now.grace_s
    _now.tell(HostGoing(_now.grace_s))
    time.sleep(max(0.0, _left_s()))
    die()


def _before_fork() -> None:
    """Let SIGTERM to the child wait for _in_child(): before that, it would write into the pipe of this process."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """In a process that the rank has forked, let SIGTERM do what it does by default: multiprocessing relies on it."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wakes = signal.set_wakeup_fd(-1)
    if _now.wakes is None or wakes != _now.wakes[1]:  # the user's code has set it
        signal.set_wakeup_fd(wakes)
    _after_fork()
