"""If the power fails during a save, or a byte changes, a saved state is restored, or the damage is reported."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from faulty import CUT, LOSSY, ONCE, Disk
from texts import mentions

from sparkring.checkpointing import folder, tensors
from sparkring.checkpointing.store import checkpoints
from sparkring.errors import CheckpointError
from sparkring.runtime.storage import locate

STEPS = (10, 20, 30, 40)


def state_of(step: int) -> dict[str, Any]:
    """Return the state at a step, which differs from the states at all other steps."""
    numbers = np.random.default_rng(step)
    return {
        "weights": numbers.standard_normal((40, 50)).astype(np.float32),
        "moments": [numbers.standard_normal(300), numbers.integers(0, 9, 7)],
        "told": f"at step {step}",
        "step": step,
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two states are identical, down to the last bit."""
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def restored(directory: Path) -> int:
    """Return the step that a new process would restore. Fail if the state is not the one saved at that step."""
    folder._remembered.clear()
    state = state_of(0)
    step = checkpoints(directory, keep=2).restore(state)
    assert same(state, state_of(step)), f"the restored state is not the state of step {step}"
    return step


class Course(NamedTuple):
    """How a training run went: the steps that it saved, and the steps whose save failed."""

    saved: list[int]
    failed: list[int]


def train(directory: Path, keep: int, background: bool) -> Course:
    """Save at each of STEPS, even if a save fails."""
    course = Course([], [])
    training = checkpoints(directory, keep=keep, background=background)
    for step in STEPS:
        try:
            training.save(step, state_of(step))
            training.wait()
            course.saved.append(step)
        except CheckpointError:
            course.failed.append(step)
    return course


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make saves write a file of a few kilobytes in several pieces."""
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 4096)


@pytest.mark.parametrize(
    ("how", "keep", "background"),
    [
        (CUT, 1, True),
        pytest.param(LOSSY, 1, True, marks=pytest.mark.extended("repetition", "the other combinations")),
        (LOSSY, 2, False),
        (ONCE, 2, True),
    ],
)
def test_nothing_is_lost_wherever_the_power_goes(tmp_path, capsys, how, keep, background):
    """Whichever operation of four saves fails, no saved step is lost, and only saved states are restored."""
    places, found_steps, lost, corrupt = 0, 0, [], []
    while True:
        root = tmp_path / "disk"
        root.mkdir()
        course, disk = one_cut(root, places, how, keep, background)
        if not disk.failed:
            break
        places += 1
        after = disk.after(tmp_path / "after") if how != ONCE else root
        directory = after / "runs" / "run1"
        try:
            step = restored(directory)
        except (CheckpointError, AssertionError) as error:
            corrupt.append((disk.done[-1], course, str(error)))
        else:
            found_steps += step > 0
            assert how != ONCE or (step == course.saved[-1] and len(course.failed) <= 1)
            if step < max(course.saved, default=0):
                lost.append((disk.done[disk.at], course, step))
            with Disk(after, None, how):  # so that nothing waits for the real disk
                goes_on(directory, step)
        for path in (root, tmp_path / "after"):
            shutil.rmtree(path, ignore_errors=True)
    capsys.readouterr()  # discards the messages about failures and damage
    assert course == Course(list(STEPS), [])
    with capsys.disabled():
        found = f"{found_steps} found a checkpoint, {len(corrupt)} corrupt, {len(lost)} lost"
        print(f"\n{how}, keep={keep}: {places} places, {found}")
    assert not corrupt
    assert not lost
    assert places > 60, "fewer operations than four saves must have"
    assert found_steps > places // 2


def one_cut(root: Path, at: int, how: str, keep: int, background: bool) -> tuple[Course, Disk]:
    """Train on a disk whose operation number `at` fails."""
    folder._remembered.clear()
    with Disk(root, at, how) as disk:
        course = train(root / "runs" / "run1", keep, background)
    return course, disk


def test_one_byte_anywhere_is_told(tmp_path, monkeypatch, capsys):
    """If one bit of a checkpoint changes, or its end is cut off, the one before is restored, and a message says so."""
    monkeypatch.setattr(tensors, "sync", lambda descriptor: None)  # the power does not fail in this test
    rng = random.Random(5)
    directory = tmp_path / "run1"
    training = checkpoints(directory, keep=2, background=False)
    training.save(1, state_of(1))
    where: Counter[str] = Counter()
    for step in range(2, 202):
        training.save(step, state_of(step))
        newest = training.list()[0]
        file = rng.choice(sorted((directory / newest.name).iterdir()))
        whole = file.read_bytes()
        how = damage(file, rng)
        where[f"{file.name} {how}"] += 1
        capsys.readouterr()
        assert restored(directory) == step - 1
        assert mentions(capsys.readouterr().err, "skipped", "damaged checkpoint", f"step {step}")
        (found,) = [entry for entry in folder.listing(locate(directory)) if entry.name == newest.name]
        assert file.name in folder.check(locate(directory), found)
        file.write_bytes(whole)
        assert folder.check(locate(directory), newest) == ""
    assert restored(directory) == 201
    assert min(where.values()) > 20
    assert len(where) == 4


def damage(file: Path, rng: random.Random) -> str:
    """Change one bit of a file, or cut off its end."""
    whole = bytearray(file.read_bytes())
    place = rng.randrange(len(whole))
    if rng.random() < 0.5:
        file.write_bytes(whole[:place])
        return "cut"
    whole[place] ^= 1 << rng.randrange(8)
    file.write_bytes(whole)
    return "flipped"


def goes_on(directory: Path, step: int) -> None:
    """Check that a later training run can save and restore despite the files that the failure has left."""
    training = checkpoints(directory, keep=2)
    state = state_of(0)
    assert training.restore(state) == step
    training.save(50, state_of(50))
    training.wait()
    assert restored(directory) == 50
