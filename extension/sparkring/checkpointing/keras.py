"""`Store.keras(…)`: a callback that restores a checkpoint, says where fit() has to begin, and saves checkpoints.

resume = store.keras(model, data=data, every=100)
model.fit(data.as_tf("x", "y"), epochs=5, initial_epoch=resume.initial_epoch, callbacks=[resume])
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sparkring.checkpointing import keras_3_state, parts, tensorflow_state
from sparkring.data.tensorflow_dataset import whole_steps
from sparkring.errors import CheckpointError, OptionsError
from sparkring.runtime import going, report, world

if TYPE_CHECKING:
    from sparkring.checkpointing.store import Store
    from sparkring.data.shards import Shards


class Positioned:
    """Takes the place of `data` in a state that is saved, with `position` as the position of the data set.

    The data set's own position cannot be saved: it is ahead of the training, because TensorFlow reads ahead.
    """

    def __init__(self, data: Shards, position: Any) -> None:
        self.dataset = data.dataset
        self._data, self._position = data, position

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._data.load_state_dict(state)


def resume(store: Store, model: Any, data: Shards | None = None, every: str | int = "epoch") -> Any:
    """Restore `model` and `data` from the newest checkpoint, and return a Keras callback that saves them.

    every: "epoch", or a number of batches. A save that is due at an epoch's last batch is made at the epoch's end. With
        "epoch", a checkpoint has the metrics of the epoch, including validation; otherwise, the metrics so far.

    Pass the callback's `initial_epoch` to fit(), although the callback also tells Keras where to begin. The callback's
    `history` holds the metrics of all epochs by name. If training continues within an epoch, fit() reads only the rest
    of this epoch, and the epoch's metrics cover only that part. If you pass `steps_per_epoch`, repeat() the data set;
    otherwise, Keras could expect more batches than are left.

    The training continues with exactly the numbers that it would have had without the interruption, and reads every row
    of the epoch once. So a checkpoint contains the weights, the optimizer with its learning rate and loss scale, and
    the states of the generators from which Dropout and similar layers draw. In three cases, the numbers differ, but the
    training is just as good: the model or its data use tf.random in a tf.function without a generator; operations add
    numbers in varying order, as on GPUs; or the number of ranks has changed. On ranks that do not save, random layers
    may draw different numbers, because the states of their generators are not saved. Without `data`, the data set that
    is passed to fit() decides what is read in the rest of an epoch. Under a strategy with several replicas, `data` is
    refused, and random layers are not changed.

    With Keras 3, the backend must be TensorFlow, callbacks count the batches of a continued epoch from 0, and fit()
    must be given `data.as_tf(…)` itself, not a data set made from it with map().

    Raises OptionsError and CheckpointError.
    """
    is_keras_3 = keras_3_state.is_model(model)
    _check(model, is_keras_3, data, every)
    if not is_keras_3:  # Keras 3's random layers keep their states in variables already
        tensorflow_state.keep_random(model)
    state: dict[str, Any] = {"model": model, "epoch": 0, "batch": 0, "history": {}}
    if data is not None:
        state["data"] = data
    step = store.restore(state)
    if data is not None and data.start.legs and not data.steps:
        # With the current number of ranks, the rest of the epoch is too small for a batch: go on with the next epoch.
        data.ended(data.epoch)
        state.update(epoch=state["epoch"] + 1, batch=0)
    keras = sys.modules["keras"] if is_keras_3 else tensorflow_state.keras_of(model)
    base = ResumeKeras3 if is_keras_3 else ResumeKeras2
    kind: Any = type("Resume", (base, keras.callbacks.Callback), {})
    return kind(store, model, data, every, step, state)


def _check(model: Any, is_keras_3: bool, data: Shards | None, every: str | int) -> None:
    """Raise OptionsError or CheckpointError if resume() does not accept its arguments."""
    if every != "epoch" and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise OptionsError(f'every={every!r}: expected "epoch" or a number of batches, at least 1.')
    if not (is_keras_3 or tensorflow_state.is_model(model)):
        raise CheckpointError(
            f"keras() is for a Keras model, not a `{type(model).__name__}`: use restore(state) and save(step, state)."
        )
    if is_keras_3 and keras_3_state.backend() != "tensorflow":
        raise CheckpointError(
            f"keras() needs Keras' backend tensorflow, not {keras_3_state.backend()}: use restore(state) and "
            "save(step, state)."
        )
    state_of = keras_3_state if is_keras_3 else tensorflow_state
    if not state_of.is_optimizer(getattr(model, "optimizer", None)):
        raise CheckpointError("the model has no optimizer yet: compile it before store.keras(model).")
    if data is not None and tensorflow_state.replicas(model) > 1:
        raise CheckpointError(
            f"the model trains on {tensorflow_state.replicas(model)} replicas, among which TensorFlow splits each "
            "batch, so their position in the data is unknown: leave data out of store.keras(), and save by epoch."
        )


class Resume:
    """Saves checkpoints during fit(). The classes that resume() makes have Keras' Callback as a second base."""

    params: dict[str, Any]  # Keras sets it

    def __init__(
        self, store: Store, model: Any, data: Shards | None, every: str | int, step: int, state: dict[str, Any]
    ) -> None:
        super().__init__()
        self._store, self._kept_model, self._data, self._every = store, model, data, every
        self.initial_epoch: int = state["epoch"]
        self.history: dict[str, list[float]] = state["history"]
        self._step = self._saved = step
        # The epoch and the batch where fit() begins; None once fit() has begun.
        self._first: tuple[int, int] | None = (state["epoch"], state["batch"])
        self._epoch, self._batch = -1, 0  # Keras' epoch, and how many of its batches are done
        self._start: Any = None  # the position from which the data's current epoch is read
        self._left = self._taken = 0  # how many batches follow `_start`, and how many of them were taken

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count(batch + 1 - self._batch)
        self._batch = batch + 1
        steps = self.params.get("steps")
        whole = bool(steps and self._batch >= steps)
        if going.point():  # validation may take too long, so this save does not wait for on_epoch_end()
            self._note_epoch(logs if whole else None)
            self._save(self._epoch + whole, 0 if whole else self._batch, logs)
        # After an epoch's last batch, nothing is saved here: on_epoch_end() follows, and saves with more metrics.
        elif self._due() and not whole:
            self._save(self._epoch, self._batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = self.params.get("steps")
        whole = not steps or self._batch >= steps
        self._note_epoch(logs if whole else None)
        if self._every == "epoch" or self._due():
            self._save(epoch + whole, 0 if whole else self._batch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._store.wait()

    def _note_epoch(self, logs: Any) -> None:
        for name, value in report.numbers(logs).items():
            self.history.setdefault(name, []).append(value)

    def _count(self, batches: int) -> None:
        self._step += batches
        self._taken += batches
        if self._data is not None and self._taken >= self._left:
            # The next epoch is the one after `_start`, not the one after data.start: TensorFlow reads ahead, so
            # data.start may already be in a later epoch than the training.
            self._begin(type(self._start)(self._start.epoch + 1, self._start.seed))

    def _begin(self, start: Any) -> None:
        assert self._data is not None
        self._start, self._left, self._taken = start, self._data.resume(start).steps, 0

    def _due(self) -> bool:
        return isinstance(self._every, int) and self._step // self._every > self._saved // self._every

    def _save(self, epoch: int, batch: int, logs: Any) -> None:
        state: dict[str, Any] = {"model": self._kept_model, "epoch": epoch, "batch": batch, "history": self.history}
        if self._data is not None:
            state["data"] = Positioned(self._data, self._data.resume(self._start).position(self._taken))
        if _read_together(self._kept_model) and world.world().rank and not getattr(self._store, "sharded", False):
            # This rank saves nothing, but must read the model's variables when rank 0 does: variables that are averaged
            # over the replicas can be read only by all replicas together.
            parts.tree_of(self._kept_model)
        self._store.save(self._step, state, report.numbers(logs))
        self._saved = self._step


class ResumeKeras2(Resume):
    """Makes Keras 2's fit() start at the checkpoint's position."""

    # With this attribute, Keras passes the logs as tensors, whose values are fetched only when they are saved.
    _supports_tf_logs = True

    model: Any  # Keras sets it

    def on_train_begin(self, logs: Any = None) -> None:
        if self._data is not None:
            self._begin(self._data.start)
            if not self.params.get("steps"):
                # fit() may begin with the rest of an epoch. Keras would then expect every epoch to be that short.
                self.params["steps"] = whole_steps(self._data)
                self._end_epoch_in_time()
        if self._first and getattr(self.model, "_training_state", None) is None:
            self.model._training_state = self  # Keras asks this object where to begin
        self._epoch, self._batch = -1, 0

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int | None, initial_epoch: int, mode: Any
    ) -> tuple[int, int]:
        """Return the epoch and the batch that fit() begins with. Keras calls this method of `model._training_state`."""
        self.model._training_state = None
        assert self._first is not None
        epoch, batch = self._first
        if epoch >= self.params.get("epochs", epoch + 1):
            return epoch, 0  # this fit() has nothing left to train: the next one begins at this epoch and batch
        self._first = None
        if initial_epoch > epoch:
            return initial_epoch, 0
        if self._data is not None and not steps_per_epoch:
            # Keras takes the length of every epoch from the number of the last batch. So the last batch of this partial
            # epoch must get the number that the last batch of a whole epoch has with the current number of ranks.
            batch = max(0, whole_steps(self._data) - self._data.steps)
        self._epoch, self._batch = epoch, batch
        return epoch, batch

    def _end_epoch_in_time(self) -> None:
        """Make Keras end an epoch after its last step. Otherwise, random layers would draw numbers in one more step."""
        step = getattr(self.model.train_function, "_sparkring", self.model.train_function)

        def step_if_any(iterator: Any) -> Any:
            if self._batch >= self.params["steps"]:
                raise StopIteration
            return step(iterator)

        step_if_any._sparkring = step  # type: ignore[attr-defined]
        self.model.train_function = step_if_any

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch != self._epoch:
            self._epoch, self._batch = epoch, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.train_function = getattr(self.model.train_function, "_sparkring", self.model.train_function)
        super().on_epoch_end(epoch, logs)


_EPOCH_ENDS = object()


class ResumeKeras3(Resume):
    """Makes Keras 3's fit() start at the checkpoint's position.

    Keras 3 counts the steps of the continued epoch from 0, so this class ends that epoch early.
    """

    model: Any  # Keras sets it
    _before = 0  # how many batches of this epoch were taken before this fit()

    def on_train_begin(self, logs: Any = None) -> None:
        if self._data is not None:
            if self._data.start.legs and not self.params.get("steps"):
                raise CheckpointError(
                    f"Keras does not know how many batches an epoch of {self._data.dataset.name} has, and would treat "
                    "the rest of this epoch as a whole one: pass data.as_tf(…) itself to fit(). To change "
                    "the data, pass a function to shards() as transform=."
                )
            self._begin(self._data.start)
        self._epoch, self._batch = -1, 0
        if self._first:
            self.model._initial_epoch = self._first[0]  # fit() reads it after on_train_begin(), for BackupAndRestore

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._before = epoch, 0
        if self._first:
            (first, batch), self._first = self._first, None
            self.model._initial_epoch = None  # otherwise, the next fit() would begin at this epoch, too
            if epoch == first:
                self._before = batch
                if self._data is not None and self.params.get("steps") == whole_steps(self._data):
                    self._before = max(0, self.params["steps"] - self._data.steps)  # for the current number of ranks
        self._batch = self._before

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(self._before + batch, logs)
        if self._before and self._batch == self.params.get("steps") and not self.model.stop_training:
            self.model.stop_training = _EPOCH_ENDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.model.stop_training is _EPOCH_ENDS:  # no other callback wants the training to stop
            self.model.stop_training = False


def _read_together(model: Any) -> bool:
    extended = getattr(getattr(model, "distribute_strategy", None), "extended", None)
    several = getattr(extended, "_in_multi_worker_mode", None)
    return bool(several and several())
