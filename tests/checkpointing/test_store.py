"""Stores of checkpoints: a saved state can be restored, or an error says why not."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import mentions
from waiting import DEADLINE_S

import sparkring
from sparkring import checkpoints
from sparkring.checkpointing import background, folder, store, writing
from sparkring.checkpointing.entries import Name
from sparkring.errors import CheckpointDamagedError, CheckpointError, PathError
from sparkring.runtime.storage import locate
from sparkring.wire import messages


def state(step=0, scale=1.0):
    return {"w": np.arange(6.0).reshape(2, 3) * scale, "step": step, "deep": [{"b": np.float32(scale)}, (step, None)]}


def saved(found, step, scale=1.0, metrics=None):
    """Save once, and wait until the save has ended."""
    found.save(step, state(step, scale), metrics)
    found.wait()


def steps(found):
    return [entry.step for entry in found.list() if entry.state == "committed"]


def files(tmp_path, step):
    (found,) = [path for path in tmp_path.iterdir() if path.name.startswith(f"{step:08d}.")]
    return found


def damage(tmp_path, step):
    """Change one bit of a checkpoint's arrays. A listing does not detect this."""
    path = files(tmp_path, step) / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path):
    return str(tmp_path / "run1") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run1"


@pytest.fixture(autouse=True)
def not_complained():
    writing._complained.clear()


# ── Saving and restoring ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("background", [True, False])
def test_there_and_back(directory, background):
    """Another store restores a state in place and bit for bit, and restores the random states."""
    found = checkpoints(directory, background=background)
    random.seed(5)
    saved(found, 7, 2.5)
    expected = random.random()
    back = state()
    w = back["w"]
    assert checkpoints(directory).restore(back) == 7
    assert random.random() == expected
    assert back["w"].tobytes() == state(7, 2.5)["w"].tobytes()
    assert back["w"] is w
    assert (back["step"], back["deep"]) == (7, [{"b": np.float32(2.5)}, (7, None)])
    assert type(back["deep"][0]["b"]) is np.float32
    assert checkpoints(directory).load()["step"] == 7


def test_nothing_yet(directory):
    """Without a checkpoint, a state stays as it is, and the step is 0."""
    found, live = checkpoints(directory, best="loss"), state(3)
    assert found.restore(live) == found.restore(live, "best") == 0
    assert live["step"] == 3
    assert (found.latest(), found.best(), found.list()) == (None, None, [])
    with pytest.raises(CheckpointError, match=f"no checkpoint in {directory}"):
        found.load()


def test_which(directory):
    """restore() takes "latest", "best", a step, a name or an entry. Otherwise, the error lists the possible values."""
    found = checkpoints(directory, keep=None, best="acc", mode="max")
    for step, acc in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1), (2, 0.2)):
        saved(found, step, step + acc, {"acc": acc})
    assert [entry.step for entry in found.list()] == [2, 4, 3, 2, 1]
    assert (found.latest().step, found.best().step) == (2, 3)
    for which, scale in (("latest", 2.2), ("best", 3.9), (1, 1.5), (2, 2.2), (np.int64(4), 4.1),
                         (found.list()[3], 2.9), (found.list()[3].name, 2.9)):  # fmt: skip
        live = state()
        assert found.restore(live, which) == live["step"]
        assert live["w"][0, 1] == scale
    names = [entry.name for entry in found.list()]
    for which in (9, str(Name(9, 1_000_000_000_000, 0)), "nonsense"):
        with pytest.raises(CheckpointError, match=rf"no checkpoint .*{directory}. There are {', '.join(names)}"):
            found.restore(state(), which)
    for which in (True, 1.5, None, -1):
        with pytest.raises(CheckpointError, match="which="):
            found.restore(state(), which)
    with pytest.raises(CheckpointError, match=r"no metric .*set"):
        checkpoints(directory).best()


def test_what_a_commit_says(directory, run, told, seat):
    """A commit has the run, its code and lineage, the ranks and the metrics."""
    seat(0, 3)
    run(directory)
    found = checkpoints()
    saved(found, 5, metrics={"loss": np.float32(0.5), "n": 3})
    (entry,) = found.list()
    assert entry.name == "00000005.2000000000000-0"
    commit = entry.commit
    assert (commit.step, commit.metrics) == (5, {"loss": 0.5, "n": 3.0})
    assert (commit.lineage, commit.run_id, commit.code) == ("a lineage", "a run", "%%horovod\n…")
    assert (commit.size, commit.sharded, commit.data) == (3, False, {})
    (event,) = told.of(messages.CheckpointSaved)
    assert (event.folder, event.name, event.step) == (directory, entry.name, 5)
    assert event.size_bytes == commit.size_bytes
    assert 0 < event.blocked_s <= event.took_s


def test_history(directory):
    """A checkpoint restores the metrics of all saves up to its own."""
    found = checkpoints(directory, keep=None)
    assert found.history == []
    for step in (1, 2, 3):
        saved(found, step, metrics={"loss": step / 2} if step != 2 else None)
    saved(found, 4, metrics={"loss": float("nan"), "lr": 0.1})
    other = checkpoints(directory)
    other.restore(state(), 3)
    assert other.history == [(1, {"loss": 0.5}), (3, {"loss": 1.5})]
    saved(other, 5, metrics={"loss": 2})
    assert [step for step, _ in other.history] == [1, 3, 5]
    other.restore(state(), 4)
    assert str(other.history[-1]) == "(4, {'loss': nan, 'lr': 0.1})"


def test_bounded_history(directory, monkeypatch):
    """The history keeps a limited number of saves."""
    monkeypatch.setattr(store, "HISTORY", 3)
    found = checkpoints(directory)
    for step in range(5):
        found.save(step, state(), {"loss": step})
    found.wait()
    assert [step for step, _ in found.history] == [2, 3, 4]


def test_arrays_that_share_memory(tmp_path):
    """Arrays that share memory are refused, since one would overwrite the other. Equal saved values are no problem."""
    found = checkpoints(str(tmp_path))
    found.save(1, {"w": np.ones(4), "m": np.zeros(4), "same": np.ones(4)})
    found.wait()
    one = np.full(4, 5.0)
    alike = {"w": one, "m": np.full(4, 5.0), "same": one}
    assert found.restore(alike) == 1
    assert alike["same"] is one
    assert [alike[name].tolist() for name in "wm"] == [[1.0] * 4, [0.0] * 4]
    with pytest.raises(CheckpointError, match=r"state\['[mw]'\] shares .*memory .*another array"):
        found.restore({"w": one, "m": one, "same": np.ones(4)})
    halves = np.zeros(8)
    assert found.restore({"w": halves[::2], "m": halves[1::2], "same": np.ones(4)}) == 1  # side by side, not shared
    assert halves.tolist() == [1, 0] * 4


def test_a_copy_is_saved(directory):
    """Changes that training makes after save() are not in the checkpoint, nor in later ones."""
    found, live = checkpoints(directory), state()
    arena = None
    for step in (1, 2, 3):
        live["w"][...] = step
        live["deep"][0]["b"] = np.float32(step)
        found.save(step, live)
        live["w"][...] = -1
        live["deep"][0]["b"] = "gone"
        found.wait()
        assert (found.load()["w"] == step).all()
        assert found.load()["deep"][0]["b"] == step
        assert arena is None or arena is found._arena  # allocated once
        arena = found._arena


def test_two_stores(directory):
    """Two stores of one directory write separate checkpoints, even at the same moment."""
    one, other = checkpoints(directory), checkpoints(directory)
    other._stamp = one._stamp
    for found in (one, other):
        for step in (1, 1):
            found.save(step, state())
    one.wait()
    other.wait()
    assert len({entry.name for entry in one.list()}) == 4
    assert steps(one) == [1] * 4


def test_a_clock_that_is_set_back(directory, monkeypatch):
    """Even then, what is saved last is the newest checkpoint, so it is kept and restored."""
    one = checkpoints(directory, keep=2)
    for step in (1, 2):
        saved(one, step)
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_ago)
    other = checkpoints(directory, keep=2)
    assert other.restore(state()) == 2
    for step in (3, 4):
        saved(other, step)
    assert one.restore(state()) == 4
    saved(one, 5)  # this store is older than `other`
    assert steps(other) == [5, 4]


def test_travelling(directory):
    """The notebook's store can be sent to the ranks. Objects of the notebook's process are left out."""
    found = checkpoints(directory, keep=5, best="loss")
    saved(found, 1, metrics={"loss": 1})
    other = pickle.loads(pickle.dumps(found))
    assert repr(other) == repr(found) == f"<checkpoints in {directory}: keeps the newest 5 and the min of loss>"
    assert other.restore(live := state()) == live["step"] == 1
    assert len(pickle.dumps(found)) < 2_000


def test_where():
    """Without a directory and a run, or with a wrong path, the error says what to pass."""
    with pytest.raises(CheckpointError, match=r"needs a directory.*--checkpoint-dir"):
        checkpoints()
    with pytest.raises(PathError, match="Write dbfs:/x"):
        checkpoints("dbfs://x")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": "3"}, "keep='3'"),
        ({"mode": "least"}, "mode='least'"),
        ({"best": ""}, "best=''"),
    ],
)
def test_options(tmp_path, options, told):
    """A wrong option is an error in checkpoints() itself."""
    with pytest.raises(CheckpointError, match=told):
        checkpoints(tmp_path, **options)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((-1, {}), "step=-1: .* at least 0"),
        ((1.0, {}), "step=1.0"),
        ((True, {}), "step=True"),
        ((1, [1]), "a state is a dict"),
        ((1, {}, {"loss": "low"}), r"metrics\['loss'\] is a `str`, not a number"),
        ((1, {}, {"loss": np.zeros(2)}), r"metrics\['loss'\] is a `ndarray`"),
        ((1, {}, 0.5), "metrics must be a dict of numbers, .* not a `float`"),
        ((1, {"a": {"b": object()}}), r"state\['a'\]\['b'\] is a `object`"),
    ],
)
def test_arguments(tmp_path, arguments, told):
    """An argument that cannot be saved raises an error at once, and nothing is written."""
    with pytest.raises(CheckpointError, match=told):
        checkpoints(tmp_path).save(*arguments)
    assert not list(tmp_path.iterdir())


def test_the_metric_is_missing(tmp_path, seat):
    """A store that keeps the best checkpoint needs the metric in every save(), on each rank."""
    found = checkpoints(tmp_path, best="val_loss")
    with pytest.raises(CheckpointError, match=r"best='val_loss', .*no metrics"):
        found.save(1, {})
    seat(1, 2)
    with pytest.raises(CheckpointError, match="only 'loss', 'acc'"):
        found.save(1, {}, {"loss": 1, "acc": 2})


# ── In the background ─────────────────────────────────────────────────────────────────────────────────────────────────


class Moody(MemoryFileSystem):
    """A file system in memory that can wait or fail when a file is opened for writing, or is removed."""

    protocol = "moody"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    on_write = staticmethod(lambda path: None)
    on_remove = staticmethod(lambda path: None)

    def open(self, path, mode="rb", **options):
        if mode == "wb":
            type(self).on_write(path)
        return super().open(path, mode, **options)

    def rm_file(self, path):
        type(self).on_remove(path)
        super().rm_file(path)


@pytest.fixture
def moody(monkeypatch):
    """A directory whose file system calls the functions that are given to `moody.on()`."""
    fsspec.register_implementation("moody", Moody, clobber=True)
    monkeypatch.setattr(Moody, "store", {})

    class Set:
        directory = f"moody://{uuid.uuid4().hex}/run"

        def on(self, **what):
            for name, action in what.items():
                monkeypatch.setattr(Moody, f"on_{name}", staticmethod(action))

    return Set()


def fails(error):
    def fail(path):
        raise error

    return fail


@pytest.mark.parametrize("background", [True, False])
def test_the_commit_comes_last(moody, background):
    """A process that is killed during a save leaves no commit for incomplete files."""
    seen = []

    def look(path):
        folder_, _, name = path.rpartition("/")
        fs = fsspec.filesystem("moody")
        sizes = [fs.size(f"{folder_}/{each}") for each in ("rank-0.safetensors",) if fs.exists(f"{folder_}/{each}")]
        seen.append((name, sizes))

    moody.on(write=look)
    found = checkpoints(moody.directory, background=background)
    saved(found, 1)
    size = found.list()[0].commit.size_bytes
    assert seen == [("rank-0.safetensors", []), ("commit.json", [size])]


def test_training_goes_on(moody, wait_until):
    """save() returns while the file is being written. The next save() waits for the first, and both succeed."""
    go, writing_now, over = threading.Event(), threading.Event(), threading.Event()

    def wait(path):
        writing_now.set()
        assert go.wait(DEADLINE_S)

    moody.on(write=wait)
    found = checkpoints(moody.directory)
    found.save(1, state(1))
    assert writing_now.wait(DEADLINE_S)
    assert found.list() == [] or found.list()[0].state == "partial"

    def second():
        found.save(2, state(2))
        over.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not over.wait(0.2)  # the second save() cannot have ended, however slow this machine is
    go.set()
    thread.join(DEADLINE_S)
    background.finish()
    assert steps(found) == [2, 1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Free up some space"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system. Use a directory"),
        (PermissionError("Access denied."), "Access denied. Use a directory"),
        (FileNotFoundError(errno.ENOENT, "No such bucket"), "No such bucket. Check the name of the bucket"),
        (RuntimeError(), "RuntimeError. Check the storage"),
    ],
)
def test_failures(moody, error, words, capsys, told):
    """A failure in the background is reported at once, and the next call raises it, once. No partial files are left."""
    moody.on(write=fails(error))
    found = checkpoints(moody.directory)
    found.save(12_000, state())
    message = f"the checkpoint of step 12,000 could not be saved in {moody.directory}: {words}"
    with pytest.raises(CheckpointError, match=message):
        found.save(2, state())
    found.wait()
    assert found.list() == []
    (event,) = told.of(messages.CheckpointFailed)
    assert (event.step, event.folder) == (12_000, moody.directory)
    assert event.reason.startswith(words)
    assert "sparkring" not in capsys.readouterr().err  # the driver reports it
    moody.on(write=lambda path: None)
    saved(found, 3)
    assert steps(found) == [3]


def test_failures_without_a_driver(moody, capsys):
    """Without a driver, the failure is printed to stderr; with background=False, save() itself raises it."""
    moody.on(write=fails(OSError(errno.ENOSPC, "No space left on device")))
    found = checkpoints(moody.directory)
    found.save(1, state())
    with pytest.raises(CheckpointError, match="No space left"):
        found.wait()
    assert mentions(capsys.readouterr().err, "step 1", "not", "saved")
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints(moody.directory, background=False).save(1, state())


def test_at_the_end_of_a_cell(moody, directory):
    """finish() waits for all stores. It raises the first error that no other call has raised, and only once."""
    moody.on(write=fails(OSError(5, "Input/output error")))
    one, two, three = checkpoints(moody.directory), checkpoints(directory), checkpoints(moody.directory)
    for step, found in enumerate((one, two, three)):
        found.save(step, state())
    del one, three
    with pytest.raises(CheckpointError, match=r"step 0 .*Input/output error"):
        background.finish()
    assert steps(two) == [1]
    background.finish()


def test_a_commit_fails(moody):
    """If the commit cannot be written, the checkpoint's other files are removed again."""
    moody.on(write=lambda path: path.endswith("commit.json") and fails(OSError(5, "Input/output error"))(path))
    found = checkpoints(moody.directory)
    with pytest.raises(CheckpointError, match="Input/output"):
        saved(found, 1)
    assert folder.folders(locate(moody.directory)) == {}


def test_real_directories(tmp_path):
    """If there is a file instead of the directory, the error gives the path."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"could not be saved in {path}: "):
            saved(checkpoints(path), 1)


def test_after_an_interrupt(moody):
    """If the user interrupts save() while it waits for the save before, the next save() waits for that save again."""
    go = threading.Event()
    moody.on(write=lambda path: go.wait(DEADLINE_S))
    found = checkpoints(moody.directory)
    found.save(1, state(1, scale=1.0))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pyspark may have set another one
    try:
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            found.save(2, state(2, scale=2.0))
    finally:
        signal.signal(signal.SIGINT, before)
        threading.Timer(0.1, go.set).start()
    saved(found, 3, scale=3.0)
    assert [found.load(step)["w"][0, 1] for step in (1, 3)] == [1.0, 3.0]


def test_after_a_fork(moody, tmp_path):
    """A forked process does not wait for its parent's saves, and does not raise their errors."""
    (tmp_path / "file").touch()
    failed = checkpoints(tmp_path / "file")
    failed.save(1, state())
    with failed._pending._ended:
        pass
    go = threading.Event()
    moody.on(write=lambda path: go.wait(DEADLINE_S))
    found = checkpoints(moody.directory)
    found.save(1, state())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            found.wait()
            failed.wait()
            background.finish()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    go.set()
    found.wait()
    assert steps(found) == [1]
    with pytest.raises(CheckpointError):
        background.finish()


def test_at_exit(tmp_path):
    """A script that ends right after save() completes the checkpoint."""
    program = f"""
import sys
sys.path.insert(0, {str(os.path.dirname(os.path.dirname(sparkring.__file__)))!r})
import numpy as np
from sparkring import checkpoints
checkpoints({str(tmp_path)!r}).save(1, {{"w": np.zeros(5_000_000)}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
    assert steps(checkpoints(tmp_path)) == [1]


# ── Damage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_one_before(tmp_path, capsys, told):
    """Damaged checkpoints are skipped with a message; the newest good one is restored."""
    found = checkpoints(tmp_path, keep=None)
    for step in range(1, 6):
        saved(found, step)
    damage(tmp_path, 5)
    (files(tmp_path, 4) / "rank-0.safetensors").write_bytes(b"cut")
    (files(tmp_path, 3) / "commit.json").unlink()
    (files(tmp_path, 1) / "commit.json").write_bytes(b"")
    capsys.readouterr()
    assert checkpoints(tmp_path).restore(live := state()) == live["step"] == 2
    err = capsys.readouterr().err
    assert mentions(err, "skipped", "damaged", "step 5", f"{tmp_path}", "rank-0.safetensors")
    assert mentions(err, "skipped", "damaged", "step 4")
    assert err.count("\n") == 2
    assert [event.step for event in told.of(messages.CheckpointDamaged)] == [5, 4]
    assert [event.step for event in told.of(messages.CheckpointRestored)] == [2]
    with pytest.raises(CheckpointError, match=r"step 5 .*rank-0\.safetensors .*There"):
        found.restore(state(), 5)


def test_all_damaged(tmp_path):
    """If all checkpoints are damaged, training does not silently start from the beginning."""
    found = checkpoints(tmp_path)
    for step in (1, 2):
        saved(found, step)
        damage(tmp_path, step)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        found.restore(state())


def test_never_whole(tmp_path):
    """If the only save was cut off at its commit, training starts from the beginning."""
    found = checkpoints(tmp_path)
    saved(found, 1)
    commit = files(tmp_path, 1) / "commit.json"
    commit.write_bytes(commit.read_bytes()[:50])
    assert found.restore(state()) == 0


def test_the_next_best(tmp_path):
    """If the best checkpoint is damaged, the next best is restored."""
    found = checkpoints(tmp_path, keep=None, best="loss")
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        saved(found, step, metrics={"loss": loss})
    damage(tmp_path, 2)
    assert found.restore(state(), "best") == 1


def test_any_bit(tmp_path):
    """A checkpoint with one changed bit anywhere, even in its commit, is not used."""
    found = checkpoints(tmp_path)
    saved(found, 1, metrics={"loss": 1.0})
    (entry,) = found.list()
    dice = random.Random(3)
    paths = [files(tmp_path, 1) / name for name in ("commit.json", "rank-0.safetensors")]
    for _ in range(100):
        path = dice.choice(paths)
        data = path.read_bytes()
        bad = bytearray(data)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        live = state(77)
        with pytest.raises(CheckpointError):
            found.restore(live, entry)
        assert live["step"] == 77
        assert folder.check(locate(tmp_path), entry) != ""
        path.write_bytes(data)
    assert found.restore(live, entry) == 1


# ── In a run with --checkpoint-dir ────────────────────────────────────────────────────────────────────────────────────


def test_the_drivers_choice(tmp_path, run, told, monkeypatch):
    """All ranks restore the checkpoint that the driver has chosen, or none, without listing the directory."""
    outside = checkpoints(tmp_path, keep=None)
    for step in (1, 2):
        saved(outside, step)
    name = outside.list()[1].name
    run(tmp_path, resume=name)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "listing", None)
        assert checkpoints().restore(state()) == 1
    assert told.of(messages.CheckpointRestored)[0].name == name
    run(tmp_path, resume="")
    assert checkpoints().restore(state()) == 0
    assert checkpoints(f"{tmp_path}/../{tmp_path.name}").restore(state()) == 0  # the same directory
    assert checkpoints().load()["step"] == 2  # existing checkpoints can still be loaded


def test_all_ranks_get_one_answer(tmp_path, run, seat, monkeypatch):
    """A rank sees the checkpoints that the driver saw, and the checkpoints of this attempt.

    It does not see those of steps that it has not yet passed to save() itself.
    """
    outside = checkpoints(tmp_path, keep=None, best="loss")
    for step in (1, 2):
        saved(outside, step, metrics={"loss": step})
    chosen = outside.latest()
    run(tmp_path, resume=chosen.name, commit=folder.content_of(chosen.commit), lineage=chosen.commit.lineage)
    late = checkpoints(keep=None, best="loss")
    seat(0, 2)
    saved(checkpoints(keep=None, best="loss"), 3, metrics={"loss": 0.5})
    assert checkpoints().latest().step == 3
    seat(1, 2)
    assert (late.latest(), late.best().step) == (chosen, 1)
    assert [entry.step for entry in late.list()] == [2, 1]
    with monkeypatch.context() as patched:
        patched.setattr(folder, "folders", lambda directory: {})  # a stale listing
        assert (late.latest(), [entry.step for entry in late.list()]) == (chosen, [2, 1])
    saved(late, 3, metrics={"loss": 0.5})
    assert (late.latest().step, late.best().step) == (3, 3)
    assert [entry.step for entry in late.list()] == [3, 2, 1]
    run(tmp_path, stamp=2_000_000_000_001, resume="")
    assert checkpoints().latest() is None, "after --fresh, there is no checkpoint to restore"


def test_arrays_are_read_into_their_place(tmp_path):
    """A state's arrays are filled in place, and are not changed if a file is damaged."""
    found = checkpoints(tmp_path)
    saved(found, 1)
    there = state()
    there["w"][:] = 7
    array, before = there["w"], there["w"].copy()
    assert found.restore(there) == 1
    assert there["w"] is array
    assert array.tolist() == state()["w"].tolist()
    array[:] = before
    damage(tmp_path, 1)
    with pytest.raises(CheckpointError, match="damaged"):
        found.restore(there)
    assert array.tolist() == before.tolist()


def test_damage_in_a_run(tmp_path, run, told):
    """Damage is an error, so that the driver chooses another checkpoint. Ranks might choose different checkpoints."""
    outside = checkpoints(tmp_path)
    for step in (1, 2):
        saved(outside, step)
    damage(tmp_path, 2)
    run(tmp_path, resume=outside.list()[0].name)
    with pytest.raises(CheckpointDamagedError, match=r"is damaged.*the one before"):
        checkpoints().restore(state())
    assert [event.step for event in told.of(messages.CheckpointDamaged)] == [2]
    gone = str(Name(9, 1_000_000_000_000, 0))
    run(tmp_path, resume=gone)
    with pytest.raises(CheckpointDamagedError, match=r"no commit.json"):
        checkpoints().restore(state())


def test_other_directories(tmp_path, run):
    """In a directory other than the run's, the driver has chosen nothing: the newest checkpoint is restored."""
    other = checkpoints(tmp_path / "other")
    saved(other, 4)
    run(tmp_path / "own", resume="")
    assert checkpoints(tmp_path / "other").restore(state()) == 4


def test_only_rank_0_writes(tmp_path, run, seat, told):
    """Other ranks call save(), and restore what rank 0 wrote, each with random numbers of its own."""
    seat(0, 2)
    run(tmp_path)
    random.seed(1)
    saved(checkpoints(), 3)
    expected = random.random()
    (name,) = os.listdir(tmp_path)
    seat(1, 2)
    found = checkpoints()
    saved(found, 4, metrics={"loss": 1.0})
    assert len(os.listdir(tmp_path)) == 1
    assert found.history == [(4, {"loss": 1.0})]
    run(tmp_path, resume=name)
    drawn = {}
    for rank in (0, 1, 2, 1):
        seat(rank, 3)
        assert checkpoints().restore(state()) == 3
        number = random.random()
        assert drawn.setdefault(rank, number) == number  # the same every time
    assert drawn[0] == expected
    assert len(set(drawn.values())) == 3


def test_the_best_is_told(directory, run, told):
    """Each save reports whether it is the best of its training run. Better checkpoints of other runs do not count."""
    saved(checkpoints(directory, best="loss"), 9, metrics={"loss": -5})
    run(directory)
    found = checkpoints(best="loss")
    for step, loss in ((1, 0.5), (2, 0.7), (3, float("nan")), (4, 0.5), (5, 0.2)):
        saved(found, step, metrics={"loss": loss})
    assert [event.best for event in told.of(messages.CheckpointSaved)[1:]] == [True, False, False, True, True]
    assert found.best().step == 5
    assert checkpoints(directory, best="loss").best().step == 5


# ── Sharded ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def sharded(tmp_path, run, seat, size=3, step=6):
    """Save a sharded checkpoint as all ranks in turn. Rank 0 begins, and its save waits for the other ranks."""
    run(tmp_path)
    stores = []
    for rank in range(size):
        seat(rank, size)
        random.seed(rank)
        found = checkpoints(sharded=True)
        found.save(step, state(step, rank + 1.0))
        stores.append(found)
    for found in stores[::-1]:
        found.wait()
    return stores


def test_each_rank_its_own(tmp_path, run, seat, told):
    """Each rank restores its own state and random numbers. One commit names the files of all ranks."""
    (found, *_) = sharded(tmp_path, run, seat)
    (entry,) = found.list()
    assert [file.name for file in entry.commit.files] == [f"rank-{rank}.safetensors" for rank in range(3)]
    assert entry.commit.sharded
    assert len(told.of(messages.CheckpointSaved)) == 1
    run(tmp_path, resume=entry.name)
    for rank in (2, 1, 0):
        seat(rank, 3)
        live = state()
        assert checkpoints(sharded=True).restore(live) == 6
        assert live["w"][0, 1] == rank + 1.0
        random.seed(rank)
        expected = random.random()
        checkpoints().restore(live)
        assert random.random() == expected


def test_another_number_of_ranks(tmp_path, run, seat):
    """Two ranks cannot restore a checkpoint that three ranks have sharded."""
    sharded(tmp_path, run, seat)
    (name,) = os.listdir(tmp_path)
    run(tmp_path, resume=name)
    seat(0, 2)
    with pytest.raises(CheckpointError, match=r"3 ranks .*sharded=True, .* 2: .*-n 3.*sharded=Fal"):
        checkpoints().restore(state())


def test_ranks_that_do_not_save(tmp_path, run, seat, monkeypatch, told):
    """Rank 0 does not wait forever, and its error names the missing ranks."""
    monkeypatch.setattr(writing, "OTHERS_LIMIT_S", 0.3)
    run(tmp_path)
    for rank in (1, 0):
        seat(rank, 4)
        found = checkpoints(sharded=True, background=False)
        if rank:
            found.save(1, state())
    with pytest.raises(CheckpointError, match=r"from ranks 2, 3 within .* every rank .*call save"):
        found.save(1, state())
    assert steps(found) == []
    assert (files(tmp_path, 1) / "rank-1.safetensors").exists()  # other ranks may still be writing


def test_a_cell_goes_on_after_a_failed_save(moody, run, seat, monkeypatch, told):
    """If a save fails on one rank only, and the cell handles its error, the ranks still share later checkpoints."""
    monkeypatch.setattr(writing, "OTHERS_LIMIT_S", 0.3)
    run(moody.directory)
    stores = []
    for rank in (0, 1):
        seat(rank, 2)
        stores.append(checkpoints(sharded=True))
    for step in (1, 2, 3):
        for rank, found in enumerate(stores):
            seat(rank, 2)
            moody.on(write=fails(OSError(errno.ENOSPC, "no space")) if (rank, step) == (0, 1) else lambda path: None)
            with pytest.raises(CheckpointError) if (rank, step) == (0, 2) else contextlib.nullcontext():
                found.save(step, state(step))
            if step == 1:
                with found._pending._ended:
                    pass
    for rank, found in reversed(list(enumerate(stores))):
        seat(rank, 2)
        found.wait()
    assert steps(stores[0]) == [3]


def test_a_rank_s_file_is_damaged(tmp_path, run, seat, told):
    """A rank whose file is damaged raises an error."""
    (found, *_) = sharded(tmp_path, run, seat, size=2)
    path = files(tmp_path, 6) / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert [entry.state for entry in found.list()] == ["corrupt"]
    run(tmp_path, resume=files(tmp_path, 6).name)
    seat(1, 2)
    with pytest.raises(CheckpointDamagedError, match=r"rank-1.safetensors has"):
        checkpoints().restore(state())


def test_a_rank_does_not_choose_alone(tmp_path, run, seat, told):
    """If the driver has not chosen, and only one rank's file is damaged, that rank alone does not use an older one."""
    sharded(tmp_path / "one", run, seat, size=2, step=5)
    sharded(tmp_path / "one", run, seat, size=2, step=6)
    path = files(tmp_path / "one", 6) / "rank-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run(tmp_path / "two")
    seat(0, 2)
    assert checkpoints(tmp_path / "one").restore(state()) == 6
    seat(1, 2)
    with pytest.raises(CheckpointDamagedError, match=r"rank-1\.safetensors .*digest.*ranks.*0000"):
        checkpoints(tmp_path / "one").restore(state())
    assert checkpoints(tmp_path / "one").restore(state(), 5) == 5


def test_sharded_without_a_run(tmp_path, seat):
    """Sharded saves need a run, since without its stamp, each rank would write to a different folder."""
    seat(0, 2)
    with pytest.raises(CheckpointError, match=r"sharded=True needs .*run .* --checkpoint-dir"):
        checkpoints(tmp_path, sharded=True)


# ── What is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.1, 0.2, 0.3, float("nan")])), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_kept(told, saves, keep):
    """After any number of saves, the newest and the best are kept, and each removal is reported."""
    told.clear()
    found = checkpoints(f"memory://{uuid.uuid4().hex}", keep=keep, best="loss")
    for step, loss in saves:
        saved(found, step, metrics={"loss": loss})
    left = {entry.parsed.number: entry for entry in found.list()}
    good = [number for number, (_, loss) in enumerate(saves) if loss == loss]
    odd = [number for number, (_, loss) in enumerate(saves) if loss != loss]
    expected = set(good[-keep:] or odd[-1:])
    expected |= {number for number in odd[-1:] if number > min(expected)}
    numbers = [(saves[number][1], -number) for number in good]
    if numbers:
        # The best is never removed, so the best of the remaining checkpoints is the best of all.
        expected.add(-min(numbers)[1])
    assert set(left) == expected
    assert len(told.of(messages.CheckpointRemoved)) == len(saves) - len(expected)


def test_others_are_left_alone(tmp_path):
    """A new training run in the same directory removes no earlier run's checkpoints, unless it continues that run."""
    earlier = checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        saved(earlier, step)
    (tmp_path / "notes.txt").write_text("mine")
    fresh = checkpoints(tmp_path, keep=1)
    saved(fresh, 1)
    saved(fresh, 2)
    assert sorted(steps(fresh)) == [1, 2, 2]
    going_on = checkpoints(tmp_path, keep=1)
    assert going_on.restore(state(), earlier.list()[1]) == 2
    saved(going_on, 3)
    assert sorted(steps(fresh)) == [2, 3]
    assert (tmp_path / "notes.txt").exists()


def test_what_ranks_go_back_to(tmp_path, run, told):
    """The checkpoint from which this attempt continues is kept until there are two newer ones."""
    run(tmp_path)
    saved(checkpoints(keep=1), 1)
    (name,) = os.listdir(tmp_path)
    run(tmp_path, stamp=2_000_000_000_001, resume=name)
    found = checkpoints(keep=1)
    assert found.restore(state()) == 1
    saved(found, 2)
    assert steps(found) == [2, 1]
    saved(found, 3)
    assert steps(found) == [3]


def test_unfinished_ones(tmp_path, run):
    """An attempt's first save removes earlier attempts' unfinished checkpoints, but not those of later attempts."""
    earlier, later = (str(Name(1, 2_000_000_000_000 + shift, 0)) for shift in (-1, 1))
    for name in (earlier, later):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"half")
    saved(checkpoints(tmp_path), 2)  # without a run, other processes may still be writing to these new folders
    assert (tmp_path / earlier).exists()
    run(tmp_path)
    saved(checkpoints(), 3)
    assert not (tmp_path / earlier).exists()
    assert (tmp_path / later).exists()


def test_a_listing_that_lacks_a_commit(tmp_path, run, monkeypatch):
    """A checkpoint that only looks unfinished in a stale listing is not removed."""
    saved(checkpoints(tmp_path), 1)
    (name,) = os.listdir(tmp_path)
    listed = folder.folders
    monkeypatch.setattr(
        folder, "folders", lambda place: {key: replace(found, commit=None) for key, found in listed(place).items()}
    )
    run(tmp_path)
    saved(checkpoints(), 2)
    assert (tmp_path / name / "commit.json").exists()


def test_removing_fails(moody, capsys):
    """If old checkpoints cannot be removed, saves still succeed, and one message says so."""
    moody.on(remove=fails(PermissionError(13, "Permission denied")))
    found = checkpoints(moody.directory, keep=1)
    for step in range(4):
        saved(found, step)
    assert steps(found) == [3, 2, 1, 0]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert mentions(err, f"{moody.directory} cannot", "removed")


def test_the_memory_it_takes(tmp_path):
    """States that grow or shrink are saved correctly. A smaller state's file contains nothing of a larger one."""
    found = checkpoints(tmp_path, keep=None)
    for step, length in ((1, 10), (2, 100_000), (3, 5)):
        found.save(step, {"w": np.full(length, step)})
    found.wait()
    for step, length in ((1, 10), (2, 100_000), (3, 5)):
        assert (found.load(step)["w"] == np.full(length, step)).all()
    assert len(found._arena) >= 800_000
    assert (files(tmp_path, 3) / "rank-0.safetensors").stat().st_size < 100_000


def test_what_blocks_is_told(moody, told):
    """Waiting for the previous save counts as blocked time; the writing itself does not."""
    moody.on(write=lambda path: time.sleep(0.2))
    found = checkpoints(moody.directory)
    found.save(1, state())
    found.save(2, state())
    found.wait()
    first, second = told.of(messages.CheckpointSaved)
    assert first.took_s >= 0.4  # for the file and for the commit
    assert second.blocked_s >= 0.2  # at least for the first checkpoint's commit


@pytest.mark.parametrize("value", [object(), {1: {object()}}, np.array([None])])
def test_restore_refuses_what_save_refuses(tmp_path, value):
    """In the same words, even if there is no checkpoint yet."""
    found = checkpoints(tmp_path)
    with pytest.raises(CheckpointError) as at_start:
        found.restore({"model": state(), "more": value})
    with pytest.raises(CheckpointError) as later:
        found.save(1, {"model": state(), "more": value})
    assert str(at_start.value) == str(later.value)


def test_restore_accepts_what_can_be_saved_once_it_has_been_used(tmp_path):
    """A lazy module has no weights before its first call."""
    torch = pytest.importorskip("torch")
    assert checkpoints(tmp_path).restore({"model": torch.nn.LazyLinear(1)}) == 0


def test_an_entry_is_one_line(tmp_path):
    """It has the name, the state and the metrics."""
    found = checkpoints(tmp_path, best="loss")
    saved(found, 3, metrics={"loss": 0.25})
    assert repr(found.best()) == repr(found.list()[0]) == f"Entry('{files(tmp_path, 3).name}', committed, loss=0.25)"
