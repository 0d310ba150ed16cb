"""Tests of the rules for removing old checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkring.checkpointing.entries import Commit, Entry, Name
from sparkring.checkpointing.retention import ABANDONED_AFTER_S, Policy, abandoned, expired

STAMP = 1_700_000_000_000


def policy(**changes):
    return Policy(2, "loss", "min", "ours", "", STAMP, True)._replace(**changes)


def entry(number, loss=None, lineage="ours", state="committed", stamp=STAMP):
    metrics = {} if loss is None else {"loss": loss}
    commit = Commit(number, 0.0, (), metrics, lineage, "", 1, False, "", {})
    return Entry(str(Name(number, stamp, number)), state, commit)


entries = st.lists(
    st.tuples(
        st.none() | st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf")]),
        st.sampled_from(["ours", "ours", "theirs"]),
        st.sampled_from(["committed", "committed", "corrupt"]),
    ),
    max_size=12,
).map(lambda found: [entry(number, *each) for number, each in enumerate(found)])


@given(entries, st.integers(1, 4), st.sampled_from(["min", "max"]), st.integers(0, 14), st.randoms())
def test_what_stays(found, keep, mode, resumed, shuffled):
    """Other trainings' checkpoints stay, and so do the newest, the best, and the resume point until two are newer."""
    ours = [each for each in found if each.commit.lineage == "ours"]
    whole = [each for each in ours if each.state == "committed"]
    resume = str(Name(resumed, STAMP, resumed)) if resumed < 12 else ""
    listed = list(found)
    shuffled.shuffle(listed)
    rules = policy(keep=keep, mode=mode, resume=resume)
    gone = expired(listed, rules)
    left = [each for each in found if each not in gone]
    assert all(each in ours for each in gone)
    assert all(each in left for each in whole[-keep:])
    assert whole or not gone
    scored = [each.commit.metrics["loss"] for each in whole if each.commit.metrics.get("loss") is not None]
    scored = [loss for loss in scored if loss == loss]
    if scored:
        best = (min if mode == "min" else max)(scored)
        assert any(each.commit.metrics.get("loss") == best for each in whole if each in left)
    if resume and sum(each.parsed.number > resumed for each in whole) < 2:
        assert resume not in {each.name for each in gone}
    # no other checkpoints stay
    assert sum(each in left for each in whole) <= keep + 1 + bool(resume)
    assert not expired(left, rules)


def test_all_of_them():
    """keep=None removes no checkpoint."""
    assert expired([entry(number) for number in range(9)], policy(keep=None)) == []


def test_damaged_ones():
    """Damaged checkpoints are removed if enough good ones are newer, unless a torn commit hides whose they are."""
    found = [entry(1, state="corrupt"), entry(2), entry(3, state="corrupt"), entry(4), entry(5, state="corrupt")]
    assert expired(found, policy()) == [found[0]]
    torn = Entry(str(Name(0, STAMP, 0)), "corrupt", None, "torn")
    assert expired([torn, entry(1), entry(2), entry(3)], policy()) == [entry(1)]
    assert expired(found[:1], policy()) == []  # there is no good checkpoint


def test_unfinished():
    """An earlier attempt's unfinished checkpoint is removed: at once if no other process writes, else after an hour."""
    now = 1e9

    def left(changed):
        names = [
            str(Name(1, stamp, 0)) for stamp in (STAMP - 1, STAMP, STAMP + 1)
        ]  # an earlier, this and a later attempt
        return [*(Entry(name, "partial", changed=changed) for name in names), entry(0, stamp=STAMP - 1)]

    assert abandoned(left(now), policy(), now) == left(now)[:1]
    for changed, gone in ((now, 0), (now - ABANDONED_AFTER_S - 1, 1), (0.0, 0)):
        assert abandoned(left(changed), policy(alone=False), now) == left(changed)[:gone]
