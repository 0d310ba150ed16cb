"""MLflow's settings in the notebook, as environment variables that MLflow reads on the ranks.

These are the tracking server, the model registry, the experiment and the active run. Nothing here imports MLflow.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

TRACKING, REGISTRY = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"
EXPERIMENT, EXPERIMENT_NAME, RUN = "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"

_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)(?![/:]|file:)(.*)")  # the path of a database, unless it is absolute
_NO_PATHS = ("databricks", "databricks-uc", "uc")  # what MLflow takes for a server, although it has no colon

# ── On the driver ─────────────────────────────────────────────────────────────────────────────────────────────────────


def environment() -> dict[str, str | None]:
    """Return the variables that give MLflow in another process what has been chosen in this one.

    The value of a variable that would contradict these settings is None.
    """
    run, variables = active_run(), dict[str, str | None]()
    # MLflow has no public function that returns the experiment and the registry only if they have been chosen.
    experiment = run.info.experiment_id if run else getattr(_fluent(), "_active_experiment_id", None)
    registry = getattr(sys.modules.get("mlflow.tracking._model_registry.utils"), "_registry_uri", None)
    if experiment or _call("is_tracking_uri_set"):  # the ids of an experiment and a run are those of one server
        variables[TRACKING] = _absolute(str(_call("get_tracking_uri")))
    if registry:
        variables[REGISTRY] = _absolute(str(registry))
    if experiment:
        # MLflow refuses a name and an id of different experiments, and the name is that of the environment.
        variables |= {EXPERIMENT: str(experiment), EXPERIMENT_NAME: None}
    if run:
        variables[RUN] = str(run.info.run_id)
    return variables


def active_run() -> Any:
    """Return MLflow's active run; None if no run is active, or if MLflow is not imported."""
    return _call("active_run")


def autologging() -> dict[str, str]:
    """Return the arguments of each autolog() that the notebook has called, by its integration, as JSON.

    The integration of `mlflow.autolog()` is "mlflow". Integrations that it has turned on are left out, because it will
    turn them on in any process.
    """
    utils = sys.modules.get("mlflow.utils.autologging_utils")
    called: Mapping[str, Mapping[str, Any]] = getattr(utils, "AUTOLOGGING_INTEGRATIONS", {})
    return {
        name: json.dumps(dict(arguments), default=str)
        for name, arguments in dict(called).items()
        if arguments and not arguments.get("globally_configured")
    }


def _call(name: str) -> Any:
    """Return the result of a function of MLflow; None if MLflow is not imported, or has no such function."""
    function = getattr(sys.modules.get("mlflow"), name, None)
    return None if function is None else function()


def _fluent() -> Any:
    return sys.modules.get("mlflow.tracking.fluent")


def _absolute(uri: str) -> str:
    """Return a URI in which a path that is relative to the notebook's folder is absolute."""
    if match := _SQLITE.fullmatch(uri):
        return match[1] + os.path.abspath(match[2])
    path = uri.removeprefix("file:")
    is_relative = ":" not in path and not path.startswith("/") and path not in _NO_PATHS
    return os.path.abspath(path) if is_relative else uri


# ── On a rank ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def adopt(changed: Mapping[str, str | None]) -> None:
    """Make MLflow use the variables that have changed, even if a cell on this rank has chosen other settings."""
    mlflow = sys.modules.get("mlflow")
    for name, function in ((TRACKING, "set_tracking_uri"), (REGISTRY, "set_registry_uri")):
        if name in changed and hasattr(mlflow, function):
            getattr(mlflow, function)(changed[name])
    if EXPERIMENT in changed and hasattr(_fluent(), "_active_experiment_id"):
        # Not set_experiment(), which would ask the server whether the notebook's experiment exists.
        _fluent()._active_experiment_id = changed[EXPERIMENT]
