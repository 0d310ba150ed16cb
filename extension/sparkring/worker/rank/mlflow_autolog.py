"""Turns on MLflow's autologging on rank 0 as the notebook has done, once a library that it logs has been imported.

The other ranks train the same model, so each of them would only log another copy of the same run.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

from sparkring.runtime import world
from sparkring.worker.rank.imports import when_imported

MLFLOW = "mlflow"  # MLflow's name for the integration of mlflow.autolog(), which turns on the others
_LIGHTNING = ("lightning", "pytorch_lightning")  # what mlflow.pytorch.autolog() logs
# MLflow takes a second to import, so the arguments of mlflow.autolog() wait for one of these.
_COMMON = (MLFLOW, "sklearn", "tensorflow", "keras", "xgboost", "lightgbm", "statsmodels", "transformers", *_LIGHTNING)

_told: Mapping[str, str] = {}
_waiting: dict[str, dict[str, Any]] = {}  # the arguments of each autolog() that has not been called yet


def turn_on(settings: Mapping[str, str]) -> None:
    """Call the notebook's autolog() functions; `settings` is as in NotebookState. Only changes have an effect."""
    global _told
    before, _told = _told, settings
    if settings == before or world.world().rank:
        return
    for name, written in settings.items():
        arguments = json.loads(written)
        if before.get(name) != written and (name in before or not arguments.get("disable")):
            _waiting[name] = arguments
    # The thread that MLflow 3 starts when it is imported, to send usage data, imports modules at the same time as
    # autolog(), which holds a lock of MLflow's own import hooks: both would wait forever.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for library in (*_COMMON, *(library for name in _waiting for library in _libraries(name))):
        when_imported(library, _call_those_ready)


def _libraries(name: str) -> tuple[str, ...]:
    """Return the libraries of which one must be imported before the integration `name` is turned on."""
    return {MLFLOW: _COMMON, "pytorch": _LIGHTNING}.get(name, (name,))


def _call_those_ready(module: types.ModuleType) -> None:
    ready = [name for name in _waiting if any(library in sys.modules for library in _libraries(name))]
    # For example, TensorFlow imports Keras. MLflow could not patch TensorFlow before that import has ended.
    if not ready or any(_is_being_imported(library) for library in _COMMON if library != module.__name__):
        return
    for name in ready:
        try:
            owner = importlib.import_module(MLFLOW if name == MLFLOW else f"{MLFLOW}.{name}")
            arguments = _waiting.pop(name, None)
            if arguments is not None:
                known = inspect.signature(owner.autolog).parameters  # the rank may have another version of MLflow
                owner.autolog(**{key: value for key, value in arguments.items() if key in known})
        except Exception as error:  # of any type: the user's import must not fail because of a log
            _waiting.pop(name, None)
            print(f"sparkring: {name}'s autologging is not turned on here: {error}", file=sys.stderr)


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
