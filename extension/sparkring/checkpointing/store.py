"""`checkpoints(…)`: saves the state of a training run, and restores it."""

from __future__ import annotations

import builtins
import contextlib
import math
import numbers
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sparkring.checkpointing import finite, folder, keyed, parts, tensors, tree, writing
from sparkring.checkpointing.background import PendingSave
from sparkring.checkpointing.entries import Commit, Entry, Name, best, newest, passed_over, stamp_after
from sparkring.checkpointing.finite import Watched
from sparkring.checkpointing.keyed import ALL, StatesByKey
from sparkring.checkpointing.retention import Mode, Policy, of_lineage
from sparkring.checkpointing.tree import Leaf
from sparkring.checkpointing.writing import CheckpointDraft
from sparkring.errors import CheckpointDamagedError, CheckpointError
from sparkring.runtime import going, report, world
from sparkring.runtime.kernel import tell
from sparkring.runtime.resume_point import here
from sparkring.runtime.storage import Location, locate
from sparkring.wire import messages

HISTORY = 10_000  # the most entries of `history`; the newest are kept
LAYOUT = 1
_NAMED = 20  # the most checkpoints that an error names

Which = Literal["latest", "best"] | int | str | Entry
Entries = list[Entry]
Steps = list[int]
History = list[tuple[int, dict[str, float]]]
# The arrays of an existing state into which a file can be read directly, by their names in a checkpoint.
Room = dict[str, npt.NDArray[Any]]

# The steps that this process has passed to save(). The key is the directory and the stamp of the attempt, so all stores
# of one directory share a list. The number of a save, which is part of the checkpoint's name, is the index of its step
# in this list.
_steps: dict[tuple[str, int], list[int]] = {}

# The stamp of this process's last save in each directory. Saves whose stamps the driver has chosen are not counted.
_stamps: dict[str, int] = {}


def checkpoints(
    directory: str | os.PathLike[str] | None = None,
    keep: int | None = 3,
    best: str | None = None,
    mode: Mode = "min",
    sharded: bool = False,
    background: bool = True,
) -> Store:
    """Return a store for checkpoints of models, optimizers, data positions, numbers and arrays in a directory.

        store = checkpoints(best="val_loss")
        state = {"model": model, "optimizer": optimizer, "data": data, "step": 0}
        store.restore(state)                            # in place; no change if there is no checkpoint
        …
        store.save(step, state, {"val_loss": loss})     # on every rank; rank 0 writes

    Random states are saved, too. A checkpoint is valid only when its commit file has been written. That file contains
    the digests of all the bytes of the checkpoint.

    directory: a path (dbfs:, file:, any URL that fsspec supports) that all ranks can reach. On a rank, the default is
        the run's --checkpoint-dir. All ranks then restore the same checkpoint, which the driver has chosen.
    keep: how many of the newest checkpoints of this training run to keep; None keeps all. Checkpoints of any
        other training run are never removed.
    best, mode: a metric, and "min" or "max". The checkpoint with the metric's minimum or maximum is kept, too.
    sharded: whether every rank saves and restores its own state. If so, the number of ranks must stay the same. A
        model sharded with fully_shard() (FSDP) and its optimizer need this, because each rank must save its own part
        of them, unless their whole state is gathered first.
    background: whether save() copies the state and returns at once. The copy is then written while the training
        continues. If writing fails, the error is raised by the next save(), by wait(), or at the end of the cell. The
        copy takes as much memory as the state.

    Raises CheckpointError and PathError.
    """
    written = here().directory if directory is None else os.fspath(directory)
    if not written:
        raise CheckpointError(
            'checkpoints() needs a directory: pass one, as in checkpoints("dbfs:/ml/run1"), or start the run '
            "with --checkpoint-dir."
        )
    if keep is not None and _whole(keep, 1) is None:
        raise CheckpointError(f"keep={keep!r}: expected a number of checkpoints, at least 1, or None to keep all.")
    if best == "":
        raise CheckpointError(f"best={best!r}: expected the name of a metric that is passed to save().")
    if mode not in ("min", "max"):
        raise CheckpointError(f'mode={mode!r}: expected "min" or "max".')
    if sharded and world.world().size > 1 and not here().stamp:
        raise CheckpointError(
            "sharded=True needs a run with --checkpoint-dir: without it, the ranks have no common name for the "
            "checkpoint."
        )
    return Store(written, None if keep is None else int(keep), best or "", mode, bool(sharded), bool(background))


@dataclass(eq=False)
class Store:
    """Checkpoints in a directory; made by checkpoints(). `history` holds the metrics of the saves so far."""

    directory: str
    keep: int | None
    metric: str
    mode: Mode
    sharded: bool
    background: bool
    history: History = field(default_factory=list)
    _lineage: str = ""

    def __post_init__(self) -> None:
        """Set the attributes that are not pickled with the store, because they are valid only in this process."""
        self._location = locate(self.directory)
        self._stamp = stamp_after([])
        self._newest = False  # whether `_stamp` has been chosen since the last restore()
        self._arena = np.empty(0, np.uint8)
        self._pending: PendingSave | None = None

    # ── writing ───────────────────────────────────────────────────────────────

    def save(
        self, step: int, state: dict[str, Any], metrics: Mapping[str, Any] | None = None, *, every: int = 1
    ) -> None:
        """Save the current `state` as the checkpoint of `step`. Call save() on every rank.

        state: a dict of models, optimizers, data, arrays, numbers, text, and dicts, lists and tuples of these.
        metrics: the metrics of this step, for best=… and for `history`.
        every: save only if `step` is a multiple of this number, or if the host of a rank is shutting down (SIGTERM). So
            call save() after each step, with every=100 for example, so that at most one step is lost.

        This method first waits until the previous save is complete. Raises CheckpointError if a value cannot be saved,
        or if this save or the previous one could not be written. With --stop-on nan, a metric that is NaN or infinite
        ends the run instead.
        """
        _check_state(state)
        number = _whole(step, 0)
        if number is None:
            raise CheckpointError(f"step={step!r}: expected a whole number of at least 0.")
        if _whole(every, 1) is None:
            raise CheckpointError(f"every={every!r}: expected a number of steps, at least 1.")
        values = self._values({} if metrics is None else metrics)
        report.check_finite(messages.Metrics(values, number))
        going.arm()
        goes = going.point()
        if goes or not number % every:
            self._save(number, state, values, checks=True)
        if goes:
            self.wait()
            going.saved(complete=not world.world().rank)

    def on_notice(self, call: Callable[[], object]) -> None:
        """Call `call()`, in another thread, when the host of a rank is shutting down (SIGTERM).

            going = threading.Event()
            store.on_notice(going.set)
            for step, batch in enumerate(data, 1):
                …
                if going.is_set() or step % 100 == 0:
                    store.save(step, state)

        The next save() on each rank then saves, and the ranks restart. They have --grace seconds for it. Ranks may see
        the flag at different steps: with sharded=True, agree on a step first, for example with an allreduce.
        """
        going.on_notice(call)

    def _save(self, number: int, state: dict[str, Any], values: dict[str, float], *, checks: bool) -> None:
        """Save a state. `checks` says whether the checkpoint is marked if it has NaN or infinity."""
        began = time.monotonic()
        rank = world.world().rank
        if not here().stamp and not rank:
            self._choose_stamp()
        # First count this call, so that all ranks give their next checkpoint the same name even if one of them fails.
        steps = self._steps()
        steps.append(number)
        self.wait()
        if values:
            self.history = [*self.history, (number, values)][-HISTORY:]
        if rank and not self.sharded:
            return
        leaves, metadata, watch = self._apart(state)
        layout = tensors.lay_out(leaves)
        commit = self._commit(number, values, parts.versions(state))
        if checks and self.metric and not math.isfinite(values[self.metric]):
            what = "NaN" if math.isnan(values[self.metric]) else "infinite"
            commit = commit._replace(not_finite=f"{self.metric} is {what}")
        name = Name(number, self._stamp_now(), len(steps) - 1)
        save = CheckpointDraft(
            self._location, str(name), rank, layout, metadata, commit, self._policy(commit.lineage), began, None,
            watch if checks else {},
        )  # fmt: skip
        if not self.background:
            writing.carry_out(save, tensors.in_order(layout, leaves))
            return
        if len(self._arena) < layout.size_bytes:
            self._arena = np.empty(0, np.uint8)  # free the old arena before the new one is allocated
            self._arena = np.empty(layout.size_bytes, np.uint8)
        pending = PendingSave()
        try:
            copy = tensors.copy_into(self._arena, layout, leaves)
            save = save._replace(blocked_s=time.monotonic() - began)
            self._pending = pending
            pending.start(lambda: writing.carry_out(save, (copy,)))
        except BaseException:  # an interrupt, too: otherwise, the thread of the save would wait forever
            pending.cancel()
            self._arena = np.empty(0, np.uint8)  # other threads may still write to it
            raise

    def wait(self) -> None:
        """Wait until the current save is complete. Raises CheckpointError if the save failed."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    # ── restoring ─────────────────────────────────────────────────────────────

    def restore(self, state: dict[str, Any], which: Which = "latest") -> int:
        """Restore `state`, in place, and the random states from a checkpoint. Return the step, or 0 if there is none.

        which: "latest", "best", a step, or a name or entry from list(). For "latest" and "best", a damaged checkpoint
        is skipped with a message, and so is one whose weights, or whose metric for best=…, are NaN or infinite. Call
        restore() on every rank. In a run with --checkpoint-dir, the latest checkpoint is the one that the driver found
        when the ranks started; after --fresh, there is none.

        Raises CheckpointError if the checkpoint does not exist or does not fit `state`, and also, even if there is no
        checkpoint, if save() could not save `state`. Raises CheckpointDamagedError if the checkpoint that the run
        continues from is damaged.
        """
        began = time.monotonic()
        _check_state(state)
        self.wait()
        going.arm()
        room = self._room(state)
        checkpoint = self._read_resume_point(room) if which == "latest" and self._is_here() else self._read(which, room)
        if checkpoint is None:
            return 0
        entry, contents = checkpoint
        saved = contents.tree("state")
        parts.put_back(state, saved, "state")
        parts.check_shared(state, saved)
        rank = world.world().rank
        if contents.commit.sharded or rank == 0:
            parts.set_random_states(contents.tree("random"))
        else:
            parts.seed_from(entry.name, rank)  # with rank 0's states, all ranks would draw the same numbers
        self._restored(entry, contents, began)
        return entry.step

    def load(self, which: Which = "latest", *, key: Any = ALL) -> Any:
        """Return the contents of a checkpoint as new objects: arrays, tensors, models with a saved configuration.

            checkpoints("dbfs:/ml/stores").load(key="Ulm")["model"]

        After %%stream with --by, the contents are a dict from keys to the variables of their states, whatever the
        number of ranks. `key` asks for the variables of one key: a value of the column, or a tuple if there are several
        columns. No existing model or optimizer is needed. `which` has the same meaning as in restore(), except that
        "latest" always means the newest checkpoint of list(): after --fresh, restore() ignores earlier checkpoints, but
        load() does not. Raises CheckpointError if there is no checkpoint, or if it has no state for the key.
        """
        entry, saved = self._loaded(which)
        if isinstance(saved, StatesByKey):
            return saved.whole() if key is ALL else parts.plain(saved.tree(key))
        if key is not ALL:
            raise self._not_by_key(entry)
        return parts.plain(saved)

    def keys(self, which: Which = "latest") -> builtins.list[Any]:
        """Return the keys that have a state in a checkpoint of %%stream with --by, in order.

        `which` has the same meaning as in load(). Raises CheckpointError if there is no checkpoint, or if it does not
        have a state for each key.
        """
        entry, saved = self._loaded(which)
        if not isinstance(saved, StatesByKey):
            raise self._not_by_key(entry)
        return keyed.in_order(saved.trees)

    def key_columns(self, entry: Entry) -> tuple[str, ...]:
        """Return the columns of --by if a checkpoint has a state for each of their values; otherwise ()."""
        counts = keyed_counts(self._location, entry)
        return counts[0] if counts else ()

    def load_model(self, model: Any, which: Which = "latest", key: Any = None) -> None:
        """Restore only a model, in place, from the value `key` of a saved state.

        By default, this is the `model` of the state, its only value, or the only one that was saved from a model of the
        same kind. In a checkpoint of %%stream, the values are the variables of the stream's state. After %%stream with
        --by, `key` is the key whose model is restored. You need no objects for the other values, such as the optimizer.
        Random states are left as they are. `which` has the same meaning as in load(). Raises CheckpointError if there
        is no checkpoint, or if it does not fit the model.
        """
        entry, saved = self._loaded(which)
        if isinstance(saved, StatesByKey):
            saved, key = saved.tree(key), None
        self.put_model(model, entry, saved, key)

    def put_model(self, model: Any, entry: Entry, saved: dict[str, Any], key: str | None = None) -> None:
        """Put the value `key` of the tree of a state into a model, as load_model() does."""
        values = variables_of(saved)
        if key is None:
            key = _model_among(values, model)
        if key not in values:
            named = f"no value {key!r}" if key else f"no `model`, and not exactly one `{type(model).__name__}`"
            raise CheckpointError(
                f"the checkpoint {entry.name} in {self.directory} has {named}. Its values are "
                f"{', '.join(map(repr, values)) or 'none'}: name the one with the model, as in key='model'."
            )
        parts.put_back({key: model}, {key: values[key]}, "state")

    # ── what is there ─────────────────────────────────────────────────────────

    def list(self) -> Entries:
        """Return all checkpoints in the directory, newest first: complete, incomplete, or damaged.

        Only the sizes of files are checked for damage. In a run's --checkpoint-dir, the result contains the checkpoints
        that existed when the ranks started, and the checkpoints of this attempt whose steps this rank has passed to
        save(). Checkpoints that have been removed since are left out. In any other directory, these are the checkpoints
        that exist now, so ranks that call list() at different times may get different results: call it on one rank and
        broadcast the result.
        """
        entries = folder.listing(self._location)
        if not self._is_here():
            return entries
        there, stamp, steps = set(here().there), here().stamp, self._steps()
        entries = [
            entry for entry in entries if entry.name in there or (entry.parsed.stamp == stamp and entry.step in steps)
        ]
        # The listing may be stale. Checkpoints that the driver has seen but the listing lacks are looked up by name.
        missing = there.difference(entry.name for entry in entries)
        entries += filter(None, (folder.look(self._location, name) for name in missing))
        return sorted(entries, key=lambda entry: entry.parsed.age, reverse=True)

    def latest(self) -> Entry | None:
        """Return the newest complete checkpoint, or None.

        In a run with --checkpoint-dir, all ranks of an attempt get the same result: the checkpoint that restore() would
        restore, or None after --fresh. Once this rank has called save(), the result is the newest complete checkpoint
        of this attempt, if there is one. Rank 0 completes each checkpoint, and save() on other ranks does not wait for
        rank 0. So after a save(), ranks get the same result only if all of them call wait() and then a collective.
        """
        if not self._is_here():
            return newest(self.list())
        now = here()
        if self._steps():
            saved = newest([entry for entry in self.list() if entry.parsed.stamp == now.stamp])
            if saved is not None:
                return saved
        if not now.resume:
            return None
        if now.commit is None:  # the driver knows the checkpoint's name, but could not read its commit
            return folder.look(self._location, now.resume)
        return Entry(now.resume, "committed", folder.commit_of(now.commit))

    def best(self) -> Entry | None:
        """Return the checkpoint with the best metric.

        Once this store has saved or restored, only checkpoints of the same training run are compared; before that,
        all checkpoints are. best() chooses among the checkpoints that list() returns, so if ranks get different
        lists, they may get different results. Raises CheckpointError if the store has no metric.
        """
        return self._best(self.list())

    def find(self, which: Which = "latest") -> Entry:
        """Return the checkpoint that `which` currently selects. Raises CheckpointError if there is none.

        `which` has the same meaning as in load().
        """
        if which in ("latest", "best"):
            entry, words = self.choose("latest" if which == "latest" else "best", self.list()), "checkpoint"
        else:
            entry, words = self._named(which)
        if entry is None:
            raise self._missing(words)
        return entry

    def choose(self, which: Literal["latest", "best"], entries: Entries) -> Entry | None:
        """Return the newest or the best of some complete checkpoints of list(), or None. `best` is as in best()."""
        return newest(entries) if which == "latest" else self._best(entries)

    def keras(self, model: Any, data: Any = None, every: str | int = "epoch") -> Any:
        """Restore the latest checkpoint, and return a Keras callback that saves. See checkpointing.keras.resume().

        resume = store.keras(model, data=data, every=100)
        model.fit(data.as_tf("x", "y"), epochs=5, initial_epoch=resume.initial_epoch, callbacks=[resume])
        """
        from sparkring.checkpointing.keras import resume

        return resume(self, model, data=data, every=every)

    def __repr__(self) -> str:
        kept = "all" if self.keep is None else f"the newest {self.keep}"
        top = f" and the {self.mode} of {self.metric}" if self.metric else ""
        return f"<checkpoints in {self.directory}: keeps {kept}{top}>"

    def __sparkring_content__(self) -> tuple[Any, ...]:
        return self.directory, self.keep, self.metric, self.mode, self.sharded

    def __getstate__(self) -> dict[str, Any]:
        return {member.name: getattr(self, member.name) for member in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def _state_apart(self, state: dict[str, Any]) -> tuple[Any, dict[str, Leaf], Any]:
        """Split a state into its skeleton and its arrays (not copied), and return its tree, too.

        Raises CheckpointError if the state cannot be saved.
        """
        kept = parts.tree_of(state)
        if not self.sharded:
            parts.refuse_pieces(kept)
        return *tree.flatten(kept, "state"), kept

    def _room(self, state: dict[str, Any]) -> Room:
        """Return the arrays of a state that a file can be read into.

        Raises CheckpointError if this rank could not save the state: it is better known now than after an epoch.
        """
        try:
            _, leaves, _ = self._state_apart(state)
        except tree.NotYet:
            return {}
        except CheckpointError:
            if self.sharded or not world.world().rank:
                raise
            return {}  # only rank 0 saves its state
        return parts.in_place(leaves)

    def _apart(self, state: dict[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any], dict[str, Watched]]:
        """Split a state and the random states into their arrays (not copied) and everything else.

        The third value has the arrays that must be finite.
        """
        skeleton, own, kept = self._state_apart(state)
        watch = {f"state/{name}": watched for name, watched in finite.watched(state, kept, own).items()}
        random, others = tree.flatten(parts.random_states(), "random")
        leaves = {f"state/{name}": leaf for name, leaf in own.items()}
        leaves.update((f"random/{name}", leaf) for name, leaf in others.items())
        return leaves, {"layout": LAYOUT, "state": skeleton, "random": random, "history": self.history}, watch

    def _commit(self, step: int, metrics: dict[str, float], data: dict[str, str]) -> Commit:
        """Return the commit of a new checkpoint, which has no files yet."""
        now = here()
        self._lineage = now.lineage or self._lineage or secrets.token_hex(8)
        return Commit(
            step=step,
            time=time.time(),
            files=(),
            metrics=metrics,
            lineage=self._lineage,
            run_id=now.run_id,
            size=world.world().size,
            sharded=self.sharded,
            code=now.code,
            data=data,
            uses=now.uses,
        )

    def _policy(self, lineage: str) -> Policy:
        alone = self._is_here()
        resume = here().resume if alone else ""
        return Policy(self.keep, self.metric, self.mode, lineage, resume, self._stamp_now(), alone)

    def _values(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        if not isinstance(metrics, Mapping):
            raise CheckpointError(
                f'metrics must be a dict of numbers, as in {{"val_loss": loss}}, not a `{type(metrics).__name__}`.'
            )
        values = {str(name): _number(str(name), value) for name, value in metrics.items()}
        if self.metric and self.metric not in values:
            given = f"only {', '.join(map(repr, values))}" if values else "no metrics"
            raise CheckpointError(
                f"best={self.metric!r}, but save() was given {given}: pass this metric to each call, as in save(step, "
                f"state, {{{self.metric!r}: …}})."
            )
        return values

    def _stamp_now(self) -> int:
        return here().stamp or self._stamp

    def _choose_stamp(self) -> None:
        """Make the next checkpoint the newest in the directory, even if the clock was set back or another store saved.

        The directory is listed only if this store has not saved before, or has restored a checkpoint since, or if
        another store of this process has saved since.
        """
        last = _stamps.get(self._location.url, 0)
        if self._newest and last == self._stamp:
            return
        stamps = [last]
        with contextlib.suppress(OSError, CheckpointError):  # the save itself reports what is wrong with the directory
            stamps += [name.stamp for name in map(Name.of, folder.folders(self._location)) if name is not None]
        _stamps[self._location.url] = self._stamp = stamp_after(stamps)
        self._newest = True

    def _steps(self) -> Steps:
        """Return the steps that this process has passed to save() in this attempt."""
        return _steps.setdefault((self._location.url, self._stamp_now()), [])

    def _is_here(self) -> bool:
        """Return whether the store's directory is the run's --checkpoint-dir."""
        there = locate(here().directory) if here().directory else None
        return there is not None and (there.fs, there.path) == (self._location.fs, self._location.path)

    def _restored(self, entry: Entry, contents: CheckpointContents, began: float) -> None:
        self.history = contents.history
        self._lineage = contents.commit.lineage
        self._newest = False
        took_s = time.monotonic() - began
        report.tell(messages.CheckpointRestored(self._location.written, entry.name, entry.step, took_s))

    def _read_resume_point(self, room: Room) -> tuple[Entry, CheckpointContents] | None:
        """Read the checkpoint that the driver has chosen for all ranks; None if there is none."""
        name = here().resume
        if not name:
            return None
        entry = Entry(name, "committed")
        with self._telling_damage(entry):
            return entry, self._read_contents(entry, room)

    @contextlib.contextmanager
    def _telling_damage(self, entry: Entry) -> Iterator[None]:
        """Tell the driver if the checkpoint that the run continues from is found to be damaged in this block."""
        try:
            yield
        except CheckpointDamagedError as error:
            writing.tell_damaged(self._location, entry, str(error))
            raise CheckpointDamagedError(
                f"the checkpoint {entry.name} in {self.directory}, from which this run continues, is damaged: {error}. "
                "The ranks restart and continue from the one before it."
            ) from error

    def _loaded(self, which: Which) -> tuple[Entry, Any]:
        """Read a checkpoint. Return it with the tree of its state, or with the StatesByKey that all ranks have saved.

        Raises CheckpointError if it does not exist.
        """
        self.wait()
        checkpoint = self._read(which, {}, self._read_whole)
        if checkpoint is None:
            raise self._missing("checkpoint")
        return checkpoint

    def states_by_key(self, entry: Entry) -> StatesByKey:
        """Return the states that a checkpoint of %%stream with --by has, of all ranks."""
        _, states = self._loaded(entry)
        if not isinstance(states, StatesByKey):
            raise self._not_by_key(entry)
        return states

    def _not_by_key(self, entry: Entry) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {entry.name} in {self.directory} has a single state, not one for each key: only %%stream "
            "with --by saves those."
        )

    def _read_whole(self, entry: Entry, room: Room) -> Any:
        """Return the tree of a checkpoint's state, or the StatesByKey that all ranks have saved."""
        if not self.key_columns(entry):
            return self._read_contents(entry, room).tree("state")
        ranks = range(self._commit_of(entry).size)
        name = f"the checkpoint {entry.name} in {self.directory}"
        return keyed.joined(name, (self._read_shard(entry, rank, {}).tree("state") for rank in ranks))

    def _read(
        self, which: Which, room: Room, read: Callable[[Entry, Room], Any] | None = None
    ) -> tuple[Entry, Any] | None:
        """Return a checkpoint and what `read` returns for it; by default, its CheckpointContents."""
        read = read or self._read_contents
        if which not in ("latest", "best"):
            return self._read_named(which, room, read)
        passed = False
        for entry in self._candidates("latest" if which == "latest" else "best"):
            if entry.state == "corrupt":
                # A checkpoint whose commit cannot be read may never have been complete. If there are only such
                # checkpoints, the result is None, as in an empty directory.
                passed = passed or entry.commit is not None
                self._skip_damaged(entry, entry.reason)
                continue
            try:
                return entry, read(entry, room)
            except CheckpointDamagedError as error:
                if entry.commit is not None and entry.commit.sharded and world.world().size > 1:
                    # This rank must not skip the checkpoint: ranks whose own files are intact would still restore it.
                    raise CheckpointDamagedError(
                        f"the checkpoint {entry.name} in {self.directory} is damaged: {error}. Restore another one by "
                        f"its name, on all ranks. {self._there()}"
                    ) from error
                passed = True
                self._skip_damaged(entry, str(error))
        if passed:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used: all are damaged. Use another directory, or remove "
                "them to start over."
            )
        return None

    def _candidates(self, which: Literal["latest", "best"]) -> Iterator[Entry]:
        """Yield the checkpoints to try, the preferred ones first. For "latest", these include damaged checkpoints.

        Say which checkpoints with NaN or infinity are passed over.
        """
        listed = self.list()
        entries = [entry for entry in listed if not entry.not_finite]
        first = self.choose(which, entries)
        since = (0, 0) if first is None or which == "best" else first.parsed.age
        odd = {entry.step: entry.not_finite for entry in listed if entry.not_finite and entry.parsed.age > since}
        if odd:
            tell(f"{passed_over(odd)} in {self.directory}")
        if which == "latest":
            yield from (entry for entry in entries if entry.state != "partial")
            return
        while (entry := self._best(entries)) is not None:
            yield entry
            entries.remove(entry)

    def _named(self, which: Which) -> tuple[Entry | None, str]:
        """Return the checkpoint with a step or a name, or None, and the words for this checkpoint in errors."""
        if isinstance(which, Entry | str):
            name = which.name if isinstance(which, Entry) else which
            return (folder.look(self._location, name) if Name.of(name) else None), f"checkpoint {name!r}"
        step = _whole(which, 0)
        if step is None:
            raise CheckpointError(f'which={which!r}: expected "latest", "best", a step, or a name from list().')
        entries = [entry for entry in self.list() if entry.step == step and entry.state == "committed"]
        entry = newest(entries) or (entries[0] if entries else None)  # with NaN, if it is asked for by its step
        return entry, f"checkpoint of step {step:,}"

    def _read_named(
        self, which: int | str | Entry, room: Room, read: Callable[[Entry, Room], Any]
    ) -> tuple[Entry, Any]:
        entry, words = self._named(which)
        if entry is None:
            raise self._missing(words)
        try:
            return entry, read(entry, room)
        except CheckpointDamagedError as error:
            writing.tell_damaged(self._location, entry, str(error))
            raise CheckpointError(
                f"the {words} in {self.directory} cannot be used: {error}. {self._there()}"
            ) from error

    def _read_contents(self, entry: Entry, room: Room) -> CheckpointContents:
        """Read this rank's file of a checkpoint. An array that has a fitting array in `room` is read into that array.

        Raises CheckpointDamagedError, which says what is wrong with the file. In that case, `room` is unchanged.
        """
        rank, size = world.world()[:2]
        commit = self._commit_of(entry)
        if commit.sharded and commit.size != size:
            raise CheckpointError(
                f"the checkpoint {entry.name} in {self.directory} was saved by {commit.size} ranks with sharded=True, "
                f"but this run has {size}: run it with -n {-commit.size} (processes) or -n {commit.size} (Spark "
                "tasks), or save with sharded=False, so that any number of ranks can restore the checkpoint."
            )
        return self._read_shard(entry, rank if commit.sharded else 0, room)

    def _commit_of(self, entry: Entry) -> Commit:
        try:
            return folder.read_commit(self._location, entry.name)
        except FileNotFoundError:
            raise CheckpointDamagedError("it has no commit.json") from None

    def _read_shard(self, entry: Entry, rank: int, room: Room) -> CheckpointContents:
        """Read the file of a checkpoint that `rank` has saved; see _read_contents()."""
        commit, wanted = self._commit_of(entry), folder.data(rank)
        written = next((file for file in commit.files if file.name == wanted), None)
        if written is None:
            raise CheckpointDamagedError(f"its commit does not list {wanted}")
        try:
            with folder.in_words(f"the checkpoint {entry.name} in {self.directory} cannot be read"):
                metadata, leaves = tensors.read(
                    self._location / entry.name / wanted,
                    written,
                    {f"state/{name}": array for name, array in room.items()},
                )
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{wanted} is missing") from None
        if metadata.get("layout") != LAYOUT:
            raise CheckpointError(
                f"the checkpoint {entry.name} in {self.directory} was written by another version of sparkring: read "
                "it with that version."
            )
        history = [(int(step), dict(values)) for step, values in metadata["history"]]
        return CheckpointContents(commit, metadata["state"], metadata["random"], history, leaves)

    def _best(self, entries: Entries) -> Entry | None:
        if not self.metric:
            raise CheckpointError(
                'no metric is set. Name it when you make the store: checkpoints(…, best="val_loss", mode="min").'
            )
        lineage = here().lineage or self._lineage
        return best(of_lineage(entries, lineage) if lineage else entries, self.metric, self.mode)

    def _skip_damaged(self, entry: Entry, reason: str) -> None:
        writing.tell_damaged(self._location, entry, reason)
        tell(f"skipped the damaged checkpoint of step {entry.step:,} in {self.directory}: {reason}")

    def _missing(self, what: str) -> CheckpointError:
        return CheckpointError(f"there is no {what} in {self.directory}. {self._there()}")

    def _there(self) -> str:
        """Return a sentence that names the complete checkpoints in the directory."""
        names = [entry.name for entry in self.list() if entry.state == "committed"]
        if not names:
            return "It has no complete checkpoint."
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        there = f"There {'are' if len(names) > 1 else 'is'} {', '.join(names[:_NAMED])}{more}."
        odd = any(entry.not_finite for entry in self.list())
        return f"{there} Those with NaN or infinity are used only if you name them." if odd else there


class CheckpointContents(NamedTuple):
    """The contents of a checkpoint. `state` and `random` are skeletons of trees, and `leaves` has their arrays."""

    commit: Commit
    state: Any
    random: Any
    history: History
    leaves: dict[str, Leaf]

    def tree(self, which: Literal["state", "random"]) -> Any:
        """Rebuild one of the two trees."""
        start = f"{which}/"
        leaves = {name.removeprefix(start): leaf for name, leaf in self.leaves.items() if name.startswith(start)}
        return tree.rebuild(self.state if which == "state" else self.random, leaves)


def keyed_counts(location: Location, entry: Entry) -> tuple[tuple[str, ...], int] | None:
    """Return the columns of --by, and the number of keys, if a checkpoint has a state for each key; otherwise None.

    Only the beginning of each rank's file is read. Raises CheckpointDamagedError or CheckpointError.
    """
    commit = entry.commit
    try:
        commit = folder.read_commit(location, entry.name) if commit is None else commit
        if not commit.sharded:
            return None
        total, by = 0, tuple[str, ...]()
        with folder.in_words(f"the checkpoint {entry.name} in {location.written} cannot be read"):
            for file in commit.files:
                metadata = tensors.read_metadata(location / entry.name / file.name, file)
                counts = keyed.columns_and_count(metadata.get("state"))
                if counts is None:
                    return None
                by, total = counts[0], total + counts[1]
    except FileNotFoundError:
        raise CheckpointDamagedError("one of its files is missing") from None
    return by, total


def save_batch(store: Store, batch_id: int, state: dict[str, Any]) -> None:
    """Save a state like store.save(). `batch_id` is a micro-batch, or INITIAL for the state before the first one.

    NaN is not looked for: a stream cannot go back, since the rows of earlier micro-batches may be gone.
    """
    store._save(batch_id, state, {}, checks=False)


def restore_shards(store: Store, put: Callable[[Any], None], room: Room) -> int:
    """Call `put(tree)` with a saved state, to put back what belongs to this rank. Return the step.

    This is like store.restore(), from the checkpoint that the run continues from, but random states are left as they
    are. If the state is sharded, and the number of ranks has changed, `put` is called with the states of all earlier
    ranks, one after another; otherwise, only with this rank's own. Arrays that have a fitting array in `room` are read
    into that array.
    """
    began = time.monotonic()
    entry = Entry(here().resume, "committed")
    with store._telling_damage(entry):
        commit, (rank, size, *_) = store._commit_of(entry), world.world()
        changed = commit.sharded and commit.size != size
        for shard in range(commit.size) if changed else [rank if commit.sharded else 0]:
            contents = store._read_shard(entry, shard, room)
            put(contents.tree("state"))
    store._restored(entry, contents, began)
    return entry.step


def variables_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved state by their names.

    What %%stream saves is a dict of its variables beside the position of the stream (worker/rank/batches.py). For such
    a state, return the variables.
    """
    inner = state.get("state")
    if state.keys() == {"state", "position"} and isinstance(inner, dict) and parts.MARK not in inner:
        return inner
    return state


def _model_among(values: dict[str, Any], model: Any) -> str:
    """Return the name of the saved value from which `model` can be restored; '' if this is not clear."""
    if "model" in values:
        return "model"
    if len(values) == 1:
        return next(iter(values))
    alike = [name for name, value in values.items() if parts.is_like(model, value)]
    of_class = [name for name in alike if values[name]["class"] == type(model).__name__]
    return next((names[0] for names in (alike, of_class) if len(names) == 1), "")


def _check_state(state: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f'a state is a dict of the values to save, as in {{"model": model, "step": step}}, not a '
            f"`{type(state).__name__}`."
        )


def _whole(value: Any, least: int) -> int | None:
    """Return the value as an int, or None if it is not a whole number or is less than `least`."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        return number if number >= least and not isinstance(value, bool) else None
    return None


def _number(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)  # torch warns if a tensor that requires a gradient is converted
    number = value if detach is None else detach()
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(number, numbers.Real) or (getattr(number, "shape", None) is not None and len(number.shape) == 0):
            return float(number)
    raise CheckpointError(
        f"metrics[{name!r}] is a `{type(value).__name__}`, not a number: reduce it first, for example with .mean()."
    )
