"""Tests of input(), getpass() and breakpoint() on ranks."""

from __future__ import annotations

import builtins
import getpass
import time

import pytest
from waiting import until

from sparkring.errors import RunFailed


@pytest.fixture
def user(monkeypatch):
    """Return the list of the answers that the user will give; `user.asked` are the prompts that the user has seen."""

    class Answers(list):
        def read(self, prompt=""):
            self.asked.append(prompt)
            return self.pop(0)

    answers = Answers()
    answers.asked = []
    monkeypatch.setattr(builtins, "input", answers.read)
    monkeypatch.setattr(getpass, "getpass", answers.read)
    return answers


def printed(record, rank):
    return [line.text for line in record.ranks[rank].tail]


@pytest.mark.any_launcher
def test_the_user_answers_each_rank(ring, user):
    """Each rank gets its own answer. The log has the prompt and the answer, but never what getpass() returned."""
    user += ["Ann", "hunter2"]
    result = ring.run("""
        import getpass
        if rank == 0:
            answer = input("name? ")
        else:
            answer = getpass.getpass("password: ")
        answer
    """)
    assert sorted(result.by_rank.values()) == ["Ann", "hunter2"]
    asked = ["[rank 0] name? ", "[rank 1] password: "]
    assert sorted(user.asked) == asked
    given = dict(zip(user.asked, ["Ann", "hunter2"], strict=True))
    assert printed(result.record, 0) == [f"name? {given[asked[0]]}"]
    assert printed(result.record, 1) == ["password: "]


def test_an_answer_can_follow_another(ring, user):
    """What is left over from a question never answers the next one. A single rank is not named."""
    user += ["1", "", "three"]
    assert ring.run("[input(), input('b\\n'), input('c ')]", n=1).value == ["1", "", "three"]
    assert user.asked == ["", "b\n", "c "]


def test_what_was_printed_before_the_question_is_shown_first(ring, monkeypatch):
    """When the user is asked, the record has all that the rank has printed, even the unfinished line of the prompt."""
    seen = []

    def read(prompt):
        rank = ring.view.record.ranks[0]
        seen.append((rank.line_count, rank.partial_stdout))
        return ""

    monkeypatch.setattr(builtins, "input", read)
    ring.run("for number in range(3):\n    print('x' * 99)\n    input('name? ')", n=1)
    assert seen == [(1, b"name? "), (3, b"name? "), (5, b"name? ")]


def test_an_answer_to_an_earlier_question_is_ignored(ring, user):
    """If a question was interrupted, its answer may still arrive. The rank waits for the answer to its own question."""
    user += ["late", "right"]
    result = ring.run(
        """
        from sparkring.wire.messages import Answer
        from sparkring.worker.rank import stdin
        stdin.take(Answer(0, "stale"))
        [input(), input()]
        """,
        n=1,
    )
    assert result.value == ["late", "right"]


def test_breakpoint_opens_pythons_debugger(ring, user):
    user += ["p x + 1", "up", "continue"]
    result = ring.run("""
        def f(x):
            breakpoint()
            return x
        f(41) if rank == 1 else None
    """)
    assert result.by_rank == {0: None, 1: 41}
    assert user.asked == ["[rank 1] (Pdb) "] * 3
    assert "42" in printed(result.record, 1)
    assert any("-> f(41) if rank == 1" in line for line in printed(result.record, 1)), "the line of the caller"


def test_breakpoint_can_be_switched_off(ring):
    assert ring.run("breakpoint()\n1", n=1, env=(("PYTHONBREAKPOINT", "0"),)).value == 1


def test_without_a_user(ring, monkeypatch):
    """If nobody can be asked, input() raises EOFError on the rank at once. The message says what to do."""

    def refuse(prompt):
        raise EOFError

    monkeypatch.setattr(builtins, "input", refuse)
    with pytest.raises(RunFailed, match=r"EOFError: nobody .*answer"):
        ring.run("input('name? ')")
    with pytest.raises(RunFailed, match=r"EOFError: nobody .*answer.*background .*no live panel"):
        ring.in_background("input('name? ')").result()


def test_the_user_interrupts_instead_of_answering(ring, monkeypatch):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ring.run("breakpoint()\n1")
    assert ring.view.record.outcome == "interrupted"


@pytest.mark.extended_on("spark", "test_the_user_interrupts_instead_of_answering asks on Spark")
def test_another_rank_fails_while_the_user_is_asked(ring, monkeypatch, tmp_path):
    """The failure ends the wait for the user, who would otherwise not learn of it."""

    def hesitate(prompt):
        (tmp_path / "asked").touch()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(builtins, "input", hesitate)
    with pytest.raises(RunFailed, match=r"rank 1 on .* failed: ValueError: bad") as caught:
        ring.run(
            """
            import os, time
            if rank == 0:
                input("name? ")
            while not os.path.exists(flag):
                time.sleep(0.01)
            raise ValueError("bad")
            """,
            namespace={"flag": str(tmp_path / "asked")},
        )
    assert "EOFError" not in str(caught.value)


def test_an_item_cannot_ask(monkeypatch):
    import sparkring
    from sparkring.errors import ItemsFailed

    with pytest.raises(ItemsFailed, match=r"EOFError: .*\bitem\b.* input\(\)"):
        sparkring.foreach(lambda item: input(), [1], np=-1, retries=0, quiet=True)


@pytest.mark.any_launcher
def test_post_mortem(ring, user):
    """The rank that has raised an exception asks, while the other rank waits. The error is the same as without --pm."""
    user += ["p x + 1", "up", "p rank", "quit"]
    with pytest.raises(RunFailed):
        ring.run(
            """
            import time
            def f(x):
                return 1 / x
            while rank == 0:
                time.sleep(0.01)
            f(0)
            """,
            pm=True,
        )
    assert user.asked == ["[rank 1] (Pdb) "] * 4
    record = ring.view.record
    assert (record.failed_rank, record.failure.error) == (1, "builtins.ZeroDivisionError")
    lines = printed(record, 1)
    assert lines[0].startswith("ZeroDivisionError: ")
    assert lines.count("1") == 2, "x + 1 in f(), and the rank"


@pytest.mark.any_launcher
def test_post_mortem_without_a_user(ring, monkeypatch):
    def refuse(prompt):
        raise EOFError

    monkeypatch.setattr(builtins, "input", refuse)
    with pytest.raises(RunFailed):
        ring.run("1 / 0", pm=True)
    assert ring.view.record.failure.error == "builtins.ZeroDivisionError"


@pytest.mark.any_launcher
def test_an_interrupt_ends_a_post_mortem(ring, monkeypatch):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ring.run("1 / 0", pm=True)
    assert ring.view.record.outcome == "interrupted"


@pytest.mark.any_launcher
def test_the_user_switches_to_another_rank(ring, user, monkeypatch):
    """After an answer, the same rank asks again, until it goes on. `rank N` continues with another rank's prompt."""
    user += ["p 10 + rank", "rank 7", "other", "p 10 + rank", "continue", "p 20 + rank", "continue"]
    answer, hints = user.read, []

    def read(prompt):
        until(lambda: user.asked or len(ring.view.record.questions) == 2, "both ranks are at a prompt")
        hint, _, last = prompt.rpartition("\n")
        hints.append(bool(hint))
        typed = answer(last)
        return f"rank {1 - int(last[6])}" if typed == "other" else typed

    monkeypatch.setattr(builtins, "input", read)
    result = ring.run("breakpoint()\nrank")
    assert result.by_rank == {0: 0, 1: 1}
    first = user.asked[0]
    second = f"[rank {1 - int(first[6])}] (Pdb) "
    assert user.asked == [first] * 3 + [second] * 2 + [first] * 2
    assert hints[2:] == [True, False, False, False, False], "the first hint says that rank 7 cannot be typed to"
