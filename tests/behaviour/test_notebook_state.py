"""State that a notebook has set up in its process reaches its ranks, on every launcher."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys

import pytest

from sparkring.capture import mlflow_settings
from sparkring.capture.notebook_state import import_path

# A stand-in for MLflow, with what sparkring uses.
MLFLOW = """
import os, sys, types

ended, autologs, tracking_uri, run = [], [], None, None
fluent = sys.modules["mlflow.tracking.fluent"] = types.SimpleNamespace(_active_experiment_id=None)
registry = sys.modules["mlflow.tracking._model_registry.utils"] = types.SimpleNamespace(_registry_uri=None)
utils = sys.modules["mlflow.utils.autologging_utils"] = types.SimpleNamespace(AUTOLOGGING_INTEGRATIONS={})

def active_run():
    return run

def end_run(status):
    ended.append(status)

def get_tracking_uri():
    return tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "the default")

def is_tracking_uri_set():
    return tracking_uri is not None

def set_tracking_uri(uri):
    global tracking_uri
    tracking_uri = uri

def set_registry_uri(uri):
    registry._registry_uri = uri

def set_experiment(experiment_id):
    fluent._active_experiment_id = experiment_id

def experiment():
    return fluent._active_experiment_id or os.environ.get("MLFLOW_EXPERIMENT_ID")

def start_run():
    global run
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="run-7", experiment_id="5"))

def autolog(disable=False, silent=False):
    utils.AUTOLOGGING_INTEGRATIONS["mlflow"] = {"disable": disable, "silent": silent}
    autologs.append(("mlflow", disable, silent))

def autolog_of_pretend(log_models=True, tags=None):
    utils.AUTOLOGGING_INTEGRATIONS["pretend"] = {"log_models": log_models, "tags": tags}
    autologs.append(("pretend", log_models, tags))

sys.modules["mlflow.pretend"] = types.SimpleNamespace(autolog=autolog_of_pretend)
if "MLFLOW_RUN_ID" in os.environ:
    start_run()
"""


@pytest.fixture
def loggers():
    """Restores logging after a test that sets it up."""
    root = logging.getLogger()
    level, handlers, known = root.level, list(root.handlers), set(root.manager.loggerDict)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for name in set(root.manager.loggerDict) - known:
        del root.manager.loggerDict[name]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder at the front of sys.path with an `mlflow`, and a `click` in place of the installed one."""
    (tmp_path / "click.py").write_text("version = 'in development'\n")
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    (tmp_path / "pretend.py").touch()
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "click")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in list(sys.modules):
        if name.partition(".")[0] in ("click", "mlflow", "pretend"):
            del sys.modules[name]


def configure(level):
    """Configure logging as a notebook does."""
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stdout, force=True)


@pytest.mark.standalone("executors have a state of their own")
def test_ranks_have_what_the_notebook_has_set_up(ring, loggers, modules, monkeypatch):
    """Ranks have the notebook's sys.path, logging, MLflow run, and variables set after the SparkSession was started."""
    configure(logging.INFO)
    own = logging.getLogger("notebook's own")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("{name} says {message}", style="{"))
    own.addHandler(handler)
    own.propagate = False
    logging.getLogger("chatty").setLevel(logging.ERROR)
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    monkeypatch.setenv("PYTHONNOUSERSITE", "of this machine")
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri("http://tracking:5000")
    mlflow.start_run()
    cell = """
        import logging, os, sys, click
        logging.info("info")
        logging.debug("debug")
        logging.getLogger("chatty").warning("not heard")
        logging.getLogger("notebook's own").warning("hello")
        click.version, [os.environ.get(name) for name in names], sys.path
    """
    names = ["HOROVOD_TIMELINE_MARK_CYCLES", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"]
    names.append("PYTHONNOUSERSITE")
    # A package that another test imported may have added its vendored packages, which executors do not get.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("setuptools/_vendor")])
    before = list(sys.path)  # modules that Spark's client imports later may add to sys.path
    result = ring.run(cell, namespace={"names": names})
    told = {line.text for rank in result.record.ranks for line in rank.tail}
    assert told == {"INFO: info", "notebook's own says hello"}
    for version, values, path in result.values:
        assert version == "in development"
        of_machine = "of this machine" if ring.where == "local" else None
        assert values == ["1", "run-7", "5", "http://tracking:5000", of_machine]
        there = [entry for entry in dict.fromkeys(before) if os.path.exists(entry or ".")]
        assert [entry for entry in path if entry in there] == there


@pytest.mark.any_launcher
def test_what_changes_between_cells(shared_gang, loggers, modules, monkeypatch):
    """A warm gang gets the notebook's changes. What a cell has set on the ranks stays until the notebook changes it."""
    configure(logging.INFO)
    monkeypatch.setenv("CHANGES", "1")
    importlib.import_module("mlflow").start_run()
    cell = "import logging, os\nlogging.info('info')\nlogging.error('error')\nos.environ.get('CHANGES')"
    result = shared_gang.cell(f"import mlflow\n{cell}, os.environ.pop('MLFLOW_RUN_ID')")
    assert result.values == [("1", "run-7")] * 3
    assert [line.text for line in result.record.ranks[0].tail] == ["INFO: info", "ERROR: error"]
    # MLflow removes the run's id from the environment after reading it, but the next cell finds the id there again.
    # Ranks do not end the run; only the notebook does.
    change = "logging.getLogger().setLevel(logging.ERROR)\nos.environ['CHANGES'] = 'by the cell'"
    assert (
        shared_gang.values(f"{change}\nos.environ['MLFLOW_RUN_ID'], list(mlflow.ended)") == [("run-7", ["RUNNING"])] * 3
    )
    result = shared_gang.cell(cell)
    assert result.values == ["by the cell"] * 3
    assert [line.text for line in result.record.ranks[0].tail] == ["ERROR: error"]
    configure(logging.WARNING)
    monkeypatch.delenv("CHANGES")
    sys.modules.pop("mlflow")
    result = shared_gang.cell(f"{cell}, os.environ.get('MLFLOW_RUN_ID'), logging.getLogger().level")
    assert result.values == [(None, None, logging.WARNING)] * 3
    assert [line.text for line in result.record.ranks[0].tail] == ["ERROR: error"]


@pytest.mark.any_launcher
def test_what_mlflow_is_set_to(shared_gang, modules, monkeypatch):
    """Without an active run, ranks use the notebook's server, registry and experiment. Only rank 0 logs by itself."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri("sqlite:///runs.db")
    mlflow.set_registry_uri("./models")
    mlflow.set_experiment("3")
    mlflow.autolog(silent=True)
    mlflow.sys.modules["mlflow.pretend"].autolog(tags={"of": "the notebook"})
    mlflow.utils.AUTOLOGGING_INTEGRATIONS["sklearn"] = {"globally_configured": True}
    cell = "import mlflow, os, pretend\nmlflow.get_tracking_uri(), mlflow.experiment(), mlflow.autologs"
    own = "mlflow.set_tracking_uri('of a cell'), mlflow.set_experiment('8')"
    here = f"sqlite:///{os.getcwd()}/runs.db"
    called = [("mlflow", False, True), ("pretend", True, {"of": "the notebook"})]
    assert shared_gang.values(cell) == [(here, "3", called), (here, "3", []), (here, "3", [])]
    names = "os.environ['MLFLOW_REGISTRY_URI'], os.environ.get('MLFLOW_EXPERIMENT_NAME')"
    assert shared_gang.values(f"{own}\n{names}") == [(f"{os.getcwd()}/models", None)] * 3
    assert shared_gang.values(cell)[1] == ("of a cell", "8", []), "what a cell has set stays"
    mlflow.set_tracking_uri("http://tracking")
    mlflow.set_experiment("4")
    mlflow.autolog(disable=True)
    now = ("http://tracking", "4")
    assert shared_gang.values(cell) == [(*now, [*called, ("mlflow", True, False)]), (*now, []), (*now, [])]


@pytest.mark.parametrize(
    ("uri", "sent"),
    [
        ("mlruns", "/notebooks/mlruns"),
        ("./mlruns", "/notebooks/mlruns"),
        ("file:../runs", "/runs"),
        ("file:///runs", "file:///runs"),
        ("/runs", "/runs"),
        ("sqlite:///x.db", "sqlite:////notebooks/x.db"),
        ("sqlite+pysqlite:///a/x.db?timeout=5", "sqlite+pysqlite:////notebooks/a/x.db?timeout=5"),
        ("sqlite:////x.db", "sqlite:////x.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("https://user:password@tracking:5000", "https://user:password@tracking:5000"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_relative_uris(monkeypatch, uri, sent):
    """A path in a URI is relative to the notebook's folder, even if a rank changes its own."""
    monkeypatch.setattr(os, "getcwd", lambda: "/notebooks")
    assert mlflow_settings._absolute(uri) == sent


def test_another_pythons_packages_are_left_out(tmp_path):
    """The ranks' own packages replace the notebook's. Entries that belong to neither Python keep their position."""
    dev, beside, late = (str(tmp_path / name) for name in ("dev", "beside", "late"))
    for folder in (dev, beside, late):
        os.mkdir(folder)
    notebook = [(dev, ""), ("/a/lib/python311.zip", "stdlib"), ("", ""), (beside, ""), ("/a/site-packages", "site"),
                (late, ""), ("/nowhere", "")]  # fmt: skip
    own = ["/tmp/shipped.zip", "/b/lib/python311.zip", "/b/lib/lib-dynload", "/b/site-packages", "/b/more"]
    assert import_path(own, notebook, same_python=False) == [
        "/tmp/shipped.zip", dev, "/b/lib/python311.zip", "/b/lib/lib-dynload", "", beside, "/b/site-packages", late,
        "/b/more"
    ]  # fmt: skip
