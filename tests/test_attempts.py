"""When a run is restarted, and when it is given up."""

from __future__ import annotations

from types import SimpleNamespace

from texts import mentions

from sparkring.engine.run.restarts import cannot_heal, gives_up, pause_after
from sparkring.gangs.execution import cause_priority
from sparkring.gangs.reports import exit_failure
from sparkring.history.describe import NoRestart, no_restart
from sparkring.history.events import CheckpointSaved, CodeFrame, Failure
from sparkring.history.record import Attempt, Checkpoint
from sparkring.wire.messages import Exited, Run
from sparkring.worker.member import process
from sparkring.worker.member.member import Member, RankRequests

KILLED = Failure("signal", "killed by SIGKILL")
LINE_7 = (CodeFrame("<cell>", 7, "<module>", in_cell=True),)
WRONG = Failure("exception", "ValueError: no", LINE_7, error="builtins.ValueError")


def attempts(*failures: Failure) -> list[Attempt]:
    return [Attempt(number, 0.0, 2, failed_rank=0, failure=each) for number, each in enumerate(failures, 1)]


def saved(attempt: int) -> Checkpoint:
    return Checkpoint(CheckpointSaved("dir", "x", 1, 10, time=0.0, rank=0), attempt)


def test_as_often_as_is_allowed():
    """The message of the last attempt gives the number of attempts, and names the option."""
    assert gives_up(attempts(KILLED), (), 0) == NoRestart("not asked for")
    assert no_restart(NoRestart("not asked for")) == ""
    assert gives_up(attempts(KILLED, KILLED), (), 2) is None
    why = gives_up(attempts(KILLED, KILLED, KILLED), (), 2)
    assert why == NoRestart("used up", 3, 2)
    assert mentions(no_restart(why), "attempt 3", "--max-restarts", "2")


def test_the_same_mistake_is_not_repeated_for_ever():
    """The run is given up if the same exception is raised twice on the same line, with no checkpoint in between."""
    assert gives_up(attempts(WRONG), (), 9) is None
    why = gives_up(attempts(WRONG, WRONG), (), 9)
    assert why is not None
    assert why.why == "twice the same"
    assert gives_up(attempts(WRONG, WRONG), (saved(2),), 9) is None
    assert gives_up(attempts(WRONG, WRONG), (saved(1),), 9) is None, "the first attempt had saved a checkpoint"
    assert gives_up(attempts(WRONG, WRONG._replace(summary="RuntimeError: 7 left")), (), 9) is not None, "other text"
    elsewhere = WRONG._replace(frames=(CodeFrame("<cell>", 9, "<module>", in_cell=True),))
    assert gives_up(attempts(WRONG, elsewhere), (), 9) is None
    assert gives_up(attempts(KILLED, KILLED), (), 9) is None
    echo = Failure("echo", "HorovodInternalError: gone", error="horovod.HorovodInternalError")
    assert gives_up(attempts(echo, echo), (), 9) is None


def test_a_damaged_checkpoint_costs_no_restart():
    """A damaged checkpoint is skipped, and the checkpoint before it is used."""
    damaged = Failure("damaged checkpoint", "CheckpointDamagedError: dir/00000020.1-0: …")
    assert gives_up(attempts(KILLED, damaged), (), 1) is None
    assert gives_up(attempts(KILLED, damaged, KILLED), (), 1) is not None
    assert gives_up(attempts(KILLED, damaged, damaged), (), 1) is not None, "the cell asks for this checkpoint"


def test_what_cannot_heal():
    """The run is given up after a mistake in the code, or if all ranks fail in the same way before the first step.

    A mistake that only results from another rank's failure does not count.
    """
    wrong = WRONG
    mistake = Failure("code", "TypeError: no", error="builtins.TypeError")
    echo = Failure("echo", "RuntimeError: gloo", error="builtins.RuntimeError")
    damaged = Failure("damaged checkpoint", "no", error="sparkring.errors.CheckpointDamagedError")
    for failures in ([mistake], [mistake, wrong], [mistake, echo]):
        why = cannot_heal(mistake, failures, 2, stepped=True)
        assert why == NoRestart("code", error="builtins.TypeError")
        assert mentions(no_restart(why), "not restarted", "TypeError")
    assert cannot_heal(mistake, [mistake, KILLED], 2, stepped=False) is None
    assert cannot_heal(mistake._replace(cause="echo"), [mistake], 2, stepped=False) is None
    assert cannot_heal(wrong, [wrong, wrong], 2, stepped=False) == NoRestart("before the first step", size=2)
    assert cannot_heal(wrong, [wrong, wrong], 2, stepped=True) is None
    for others in ([], [KILLED], [echo], [wrong._replace(frames=())], [wrong._replace(error="builtins.OSError")]):
        assert cannot_heal(wrong, [wrong, *others], 2, stepped=False) is None
    assert cannot_heal(damaged, [damaged, damaged], 2, stepped=False) is None
    unready = Failure("echo", "HorovodInternalError: Horovod has not been initialized; use hvd.init().", error="h.H")
    assert cannot_heal(unready, [unready, unready], 2, stepped=False) == NoRestart("before the first step", size=2)
    assert cannot_heal(unready, [unready, echo], 2, stepped=False) is None
    assert cannot_heal(unready, [unready, unready], 2, stepped=True) is None


def test_the_cause_of_other_failures():
    """The end of a process comes before exceptions, and exceptions before secondary failures. Texts do not matter."""
    told = Exited(code=None, signal=9, out_of_memory=True, peak_memory_bytes=5_000_000_000)
    ended = [exit_failure(told), exit_failure(told._replace(out_of_memory=False))]
    assert [(each.cause, each.signal) for each in ended] == [("out of memory", "SIGKILL"), ("signal", "SIGKILL")]
    assert exit_failure(told._replace(code=3, signal=None)).exit_code == 3
    assert exit_failure(told._replace(signal=11)).cause == "signal", "memory also ran out, but the process crashed"
    about = Failure("exception", "RuntimeError: a child was killed by SIGKILL", error="builtins.RuntimeError")
    echo = Failure("echo", "RuntimeError: gloo")
    assert [cause_priority(each) for each in (*ended, Failure("lost", "lost"), about, echo)] == [0, 0, 0, 1, 2]


def test_memory_that_ran_out_before_the_request(monkeypatch):
    """Only kills since the rank was given its last request count."""
    member = Member.__new__(Member)
    member.requests, member.rank = RankRequests(), SimpleNamespace(channel=None)
    member.home = SimpleNamespace(receive_head=lambda: SimpleNamespace(kind=Run), pass_on=lambda head, rank: None)
    monkeypatch.setattr(process, "out_of_memory_kills", lambda: 3)
    member.from_home()
    assert member.requests.oom_kills == 3


def test_the_pause_grows_with_attempts_in_vain():
    """The pause grows from half a second to half a minute; an attempt that has saved a checkpoint resets it."""
    assert [pause_after(attempts(*[KILLED] * number), ()) for number in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]
    assert pause_after(attempts(*[KILLED] * 20), (saved(20),)) == 0.5
    assert pause_after(attempts(*[KILLED] * 20), (saved(18),)) == 1.0
