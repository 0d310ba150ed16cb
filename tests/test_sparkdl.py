"""Tests of the names that notebooks import from sparkdl."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from sparkring.compat.sparkdl import _log_callback


def test_log_callback_leaves_out_what_is_no_number(monkeypatch, capsys):
    """A metric may be an array, such as a confusion matrix. This must not end the training."""
    keras = SimpleNamespace(callbacks=SimpleNamespace(Callback=object))
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(keras=keras))
    callback = _log_callback()(per_batch_log=True)
    callback.on_batch_end(0, {"loss": np.float32(0.25), "confusion": np.eye(2)})
    assert capsys.readouterr().out == "batch 1: loss 0.25\n"
