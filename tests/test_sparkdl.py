"""Tests of the names that notebooks import from sparkdl."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np

import sparkring
from sparkring.compat.sparkdl import _log_callback, install


def test_log_callback_leaves_out_what_is_no_number(monkeypatch, capsys):
    """A metric may be an array, such as a confusion matrix. This must not end the training."""
    keras = SimpleNamespace(callbacks=SimpleNamespace(Callback=object))
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(keras=keras))
    callback = _log_callback()(per_batch_log=True)
    callback.on_batch_end(0, {"loss": np.float32(0.25), "confusion": np.eye(2)})
    assert capsys.readouterr().out == "batch 1: loss 0.25\n"


def test_packages_that_are_not_installed_are_provided(monkeypatch):
    """A real package is left alone, even if only one of the two is installed."""
    for name in [name for name in sys.modules if name.startswith(("sparkdl", "spark_tensorflow_distributor"))]:
        monkeypatch.delitem(sys.modules, name)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sparkdl" else real("sys"))
    install()
    assert ("sparkdl" in sys.modules, "spark_tensorflow_distributor" in sys.modules) == (True, False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install()
    from spark_tensorflow_distributor import MirroredStrategyRunner as short
    from spark_tensorflow_distributor.mirrored_strategy_runner import MirroredStrategyRunner as long

    assert short is long is sparkring.MirroredStrategyRunner
    for name in [name for name in sys.modules if name.startswith(("sparkdl", "spark_tensorflow_distributor"))]:
        monkeypatch.delitem(sys.modules, name)
