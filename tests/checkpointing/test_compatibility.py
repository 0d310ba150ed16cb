"""Messages about the changes since a checkpoint was saved."""

from __future__ import annotations

import time

from texts import mentions

from sparkring.checkpointing.compatibility import changes, saved_words
from sparkring.checkpointing.entries import Commit, Entry, stamp_after

CELL = "%%horovod -n -2 --checkpoint-dir /x\nlr = 0.1\n\ntrain(lr)  # as ever\n"


def entry(code: str = CELL, data: dict[str, str] | None = None, age_s: float = 0.0) -> Entry:
    commit = Commit(120, 1_000.0 - age_s, (), {}, "1", "run", 2, False, code, data or {})
    return Entry("00000120.1795294802123-0", "committed", commit)


def test_what_does_not_matter():
    """Options, comments and whitespace do not count as changes."""
    for same in (CELL, "%%horovod -n -4 --fresh\nlr = 0.1\ntrain( lr )", CELL.replace("# as ever", "")):
        assert changes(entry(), same, {}) == "", same
    assert changes(entry(code=""), CELL, {}) == "", "the checkpoint was saved outside a cell"


def test_a_changed_line_is_shown():
    """Both versions of the line are shown, as in a diff."""
    assert changes(entry(), CELL.replace("0.1", "0.5"), {}) == (
        "the cell has changed since then:\n    -lr = 0.1\n    +lr = 0.5"
    )


def test_a_changed_line_that_looks_like_part_of_a_diff():
    """A line that begins with dashes or plus signs is shown, too."""
    query = '%%x\nquery = """\n-- {}\n"""'
    told = changes(entry(code=query.format("old")), query.format("new"), {})
    assert told.splitlines()[1:] == ["    --- old", "    +-- new"]


def test_a_cell_that_is_not_python_alone():
    """A cell with lines for IPython is compared as text."""
    shell = CELL + "!ls\n"
    assert changes(entry(code=shell), shell, {}) == ""
    assert "+!ls -l" in changes(entry(code=shell), CELL + "!ls -l\n", {})


def test_a_long_difference_is_cut():
    """The message does not show a whole cell."""
    found = changes(entry(), "%%x\n" + "\n".join(f"a{n} = 1" for n in range(100)), {})
    assert len(found.splitlines()) < 20
    assert found.endswith("…")


def test_changed_data():
    """Only data sets that both the checkpoint and the run know are compared."""
    saved = entry(data={"flights": "a1", "gone": "x"})
    assert changes(saved, CELL, {"flights": "a1", "new": "y"}) == ""
    assert mentions(changes(saved, CELL, {"flights": "b2"}), "data of flights", "changed")


def test_age_in_words():
    """The age is given in one rounded unit."""
    ages = {
        0: "saved just now",
        5: "saved 5 s ago",
        200: "saved 3 min ago",
        8_000: "saved 2 h ago",
        400_000: "saved 4 days ago",
    }
    for age_s, words in ages.items():
        assert saved_words(entry(age_s=age_s), 1_000.0) == f"step 120, {words}"


def test_stamps_grow():
    """Stamps grow even if an earlier kernel's clock was ahead."""
    now = int(time.time() * 1000)
    assert now <= stamp_after([]) <= now + 60_000
    assert stamp_after([1, now + 10_000_000]) == now + 10_000_001
