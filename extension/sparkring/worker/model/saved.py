"""Models whose weights are in checkpoints: those of one checkpoint, or those of the newest or best one at any time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

from sparkring.checkpointing import parts
from sparkring.checkpointing.entries import Entry
from sparkring.checkpointing.store import Store, variables_of
from sparkring.errors import CheckpointError, CheckpointStorageError, OptionsError
from sparkring.worker.model import predictors
from sparkring.worker.model.by_key import ModelsByKey
from sparkring.worker.model.scorer import error_text

_TRIES = 3  # how many checkpoints are tried before the first one is in use


class Saved:
    """A model whose weights are in one checkpoint.

    `make_model` makes the model into which the weights are loaded; None for a Keras model with its configuration. `key`
    is as for Store.load_model(). With `by_key`, there is a model for each key, and `key` is None.
    """

    def __init__(
        self, store: Store, entry: Entry, make_model: Callable[[], Any] | None, key: str | None, *, by_key: bool = False
    ) -> None:
        # A copy has no save that is still being written, and need not send the history to the model processes.
        self._store = replace(store, history=[])
        self._entry, self._make_model, self._key, self._by_key = entry, make_model, key, by_key

    @property
    def label(self) -> str:
        """The name of the model in messages: the checkpoint and its directory."""
        return f"{self._entry.name} of {self._store.directory}"

    @property
    def step(self) -> int | None:
        return self._entry.step

    def load(self) -> Any:
        return self._loaded(self._entry)

    def _loaded(self, entry: Entry) -> Any:
        if self._by_key:
            states = self._store.states_by_key(entry)
            return ModelsByKey(states, lambda saved: self._model(entry, saved))
        if self._make_model is not None:
            model = self._made()
            self._store.load_model(model, entry.name, self._key)
            return model
        return self._with_configuration(entry, variables_of(self._store.load(entry.name)))

    def _made(self) -> Any:
        assert self._make_model is not None
        model = self._make_model()
        if not predictors.is_model(model):
            raise OptionsError(
                f"make_model returned a `{type(model).__name__}`: it must return a torch module or a Keras model."
            )
        return model

    def _model(self, entry: Entry, saved: dict[str, Any]) -> Any:
        """Return the model of a key from the tree of its state."""
        if self._make_model is None:
            return self._with_configuration(entry, parts.plain(saved))
        model = self._made()
        self._store.put_model(model, entry, saved)
        return model

    def _with_configuration(self, entry: Entry, values: dict[str, Any]) -> Any:
        models = {name: value for name, value in values.items() if predictors.is_model(value)}
        key = self._key or ("model" if "model" in models or len(models) != 1 else next(iter(models)))
        if key in models:
            return models[key]
        if len(models) > 1:
            raise OptionsError(
                f"the checkpoint {entry.name} in {self._store.directory} has several models "
                f"({', '.join(map(repr, models))}): name one of them, as in key={next(iter(models))!r}."
            )
        raise OptionsError(
            f"the checkpoint {entry.name} in {self._store.directory} has weights, but no configuration from which to "
            "make the model: pass a function that makes it, as in predict(df, directory, make_model, …)."
        )


class ModelListener(Protocol):
    """Hears what a Followed model does: see Reporter."""

    def swapped(self, step: int, seconds: float) -> None: ...

    def kept(self, problem: str) -> None: ...


class Followed(Saved):
    """A model whose weights are those of the latest or best checkpoint, for which it looks every `every_s` seconds.

    `entry` is the checkpoint that was found first. The weights never go back to an older or worse checkpoint, because
    a listing of the directory may be out of date.
    """

    def __init__(
        self,
        store: Store,
        entry: Entry,
        make_model: Callable[[], Any] | None,
        key: str | None,
        which: Literal["latest", "best"],
        every_s: float,
        *,
        by_key: bool = False,
    ) -> None:
        super().__init__(store, entry, make_model, key, by_key=by_key)
        self._which, self._every_s = which, every_s
        self._unusable: set[str] = set()
        self._is_failing = False

    @property
    def label(self) -> str:
        return f"the {self._which} checkpoint of {self._store.directory}"

    def load(self) -> Any:
        """Load the checkpoint that is chosen now. The one that was found first may have been removed since."""
        first: CheckpointError | None = None
        for _ in range(_TRIES):
            entry = self._chosen()
            if entry is None:
                break
            try:
                model = self._loaded(entry)
            except CheckpointError as error:
                first = first or error
                self._unusable.add(entry.name)
            else:
                self._entry = entry
                return model
        assert first is not None  # the first choice includes the entry that was found first
        raise first

    def follow(self, use: Callable[[Any, int], None], listener: ModelListener) -> None:
        """Look for newer checkpoints in a thread from now on, and pass each model and its step to `use`."""

        def follow() -> None:
            while True:
                time.sleep(self._every_s)
                self.look(use, listener)
                # The objects of a Keras model refer to one another, so only the garbage collector frees the memory of
                # a model that is no longer used. It would rarely do so by itself, because a framework has many objects.
                gc.collect()

        gc.freeze()  # the collector need not visit the objects that exist now, which would take a tenth of a second
        threading.Thread(target=follow, name="sparkring-follow", daemon=True).start()

    def look(self, use: Callable[[Any, int], None], listener: ModelListener) -> None:
        """If there is a newer or better checkpoint, load it, and pass the model and the step to `use`.

        If this fails, the model in use stays. The listener is told so once, until a checkpoint has been loaded again.
        """
        began, entry = time.monotonic(), None
        try:
            entry = self._chosen()
            if entry is None or entry.name == self._entry.name:
                return
            use(self._loaded(entry), entry.step)
        except Exception as error:  # make_model is the user's code, and each kind of storage has its own errors
            if entry is not None and not isinstance(error, CheckpointStorageError):
                self._unusable.add(entry.name)
            if not self._is_failing:
                listener.kept(error_text(error))
            self._is_failing = True
        else:
            self._entry, self._is_failing = entry, False
            listener.swapped(entry.step, time.monotonic() - began)

    def _chosen(self) -> Entry | None:
        """Return the checkpoint to be used: the one in use, unless the directory has a newer or better one."""
        listed = [entry for entry in self._store.list() if entry.state != "partial" and entry.name != self._entry.name]
        self._unusable &= {self._entry.name, *(entry.name for entry in listed)}
        # A checkpoint that is listed as damaged may be complete, if the listing is out of date. Loading it will tell.
        candidates = [self._entry, *(entry._replace(state="committed") for entry in listed)]
        return self._store.choose(
            self._which, [candidate for candidate in candidates if candidate.name not in self._unusable]
        )
