"""Tests that two runs and their checkpoints, which version 0.1 saved (in tests/saved_by_0_1), can still be read."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from texts import mentions
from versions import KERAS

import sparkring
from sparkring.history import compression, run_store
from sparkring.history.events import from_json
from sparkring.views import html
from sparkring.views.terminal import TerminalView

SAVED = Path(__file__).parent / "saved_by_0_1"
FAILED, FINISHED = "2026-11-22_10-32-08_c9e1b7", "2026-11-22_10-32-17_b0de79"


@pytest.fixture
def saved_runs(monkeypatch, tmp_path):
    """Copy the saved runs into the folder of runs."""
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path))
    shutil.copytree(SAVED / "runs", run_store.home())


def test_a_failed_run(saved_runs):
    """The record has the failure, metrics, shards, checkpoint, displays and logs; static views show the failure."""
    path = run_store.find(FAILED)
    record = run_store.load(path)
    assert (record.outcome, record.failed_rank, record.size) == ("failed", 1, 2)
    assert mentions(record.failure.summary, "ValueError", "rank 1")
    assert (record.failure.cause, record.failure.error) == ("exception", "builtins.ValueError")
    assert [report.step for report in record.metrics if report.rank == 0] == [1, 2, 3]
    assert [(kept.saved.step, kept.saved.metrics) for kept in record.checkpoints] == [
        (2, {"loss": 0.12940563261508942})
    ]
    assert [display.data for display in record.displays] == [b"<b>shown by a rank</b>"] * 2
    assert sum(reading.opened.rows for rank in record.ranks for reading in rank.readings) == 8000
    assert run_store.log(path, 1).startswith("rank 1 step 1\nrank 1 step 2\nrank 1 step 3\n")
    text = io.StringIO()
    TerminalView(text).close(record)
    for shown in (html.panel(record, now=record.ended, final=True), text.getvalue()):
        assert "rank 1 has had enough" in shown
        assert "rank 1 step 3" in shown


def test_compressed_runs(saved_runs, monkeypatch):
    """Their records and logs are the same when their files have been compressed."""
    before = [(run_store.load(path), run_store.log(path, 0), run_store.log(path, 1, 2)) for path in run_store.saved()]
    for name in ("LARGE_FILE_BYTES", "END_BYTES", "LOOKED_THROUGH_BYTES"):
        monkeypatch.setattr(compression, name, 1)
    for path in run_store.saved():
        compression.compress(path)
        assert (path / "events-middle.jsonl.gz").exists()
        assert not any(path.glob("*.log"))
    after = [(run_store.load(path), run_store.log(path, 0), run_store.log(path, 1, 2)) for path in run_store.saved()]
    assert after == before


@pytest.mark.parametrize(
    ("saved", "cause", "signal", "exit_code"),
    [
        ({"kind": "exception", "summary": "TypeError: killed by SIGKILL", "cause": "code"}, "code", "", None),
        ({"kind": "exception", "summary": "torn", "cause": "damaged"}, "damaged checkpoint", "", None),
        ({"kind": "exception", "summary": "TypeError: no", "cause": "code", "follows": True}, "echo", "", None),
        ({"kind": "exception", "summary": "interrupted", "interrupt": True}, "interrupt", "", None),
        ({"kind": "exit", "summary": "exited with code 3 before the cell ended"}, "exit", "", 3),
        ({"kind": "exit", "summary": "called sys.exit(2)"}, "exit", "", None),
        ({"kind": "signal", "summary": "killed by SIGSEGV"}, "signal", "SIGSEGV", None),
        ({"kind": "signal", "summary": "out of memory: killed by SIGKILL; …"}, "out of memory", "SIGKILL", None),
        ({"kind": "lost", "summary": "lost: its connection broke off"}, "lost", "", None),
    ],
)
def test_causes(saved, cause, signal, exit_code):
    """Several fields and the summary of version 0.1 become one cause, a signal and an exit code."""
    failure = from_json({"type": "RankFailed", "time": 0.0, "rank": 1, "failure": saved}).failure
    assert (failure.cause, failure.signal, failure.exit_code) == (cause, signal, exit_code)


def test_a_finished_run(saved_runs):
    """Both runs are in the list of runs, newest first, with their titles and outcomes."""
    assert [(run_store.first(path).title, run_store.last(path).outcome) for path in run_store.saved()] == [
        ("keras", "finished"),
        ("torch", "failed"),
    ]


def test_torch_checkpoint():
    """Model, optimizer, arrays and plain values come back as they were saved."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "notes": None, "table": None}
    assert sparkring.checkpoints(str(SAVED / "checkpoints/torch")).restore(state) == 2
    assert state["notes"] == {"lr": 0.001, "names": ["a", "b"]}
    np.testing.assert_array_equal(state["table"], np.arange(6).reshape(2, 3))
    np.testing.assert_allclose(model.weight[0].tolist(), [-0.0023561576, 0.3116821945, -0.4732189775], rtol=1e-6)
    assert state["optimizer"].state_dict()["state"][0]["step"] == 2


def test_keras_checkpoint():
    """The model is rebuilt and compiled, with its weights; with Keras 3, load() gives its arrays by name."""
    pytest.importorskip("tensorflow")
    model = sparkring.checkpoints(str(SAVED / "checkpoints/keras")).load()["model"]
    arrays = model.get_weights() if KERAS.major == 2 else list(model.values())
    sums = [float(np.abs(weights).sum()) for weights in arrays]
    assert sums == pytest.approx([4.502236366, 0.0059994995, 1.2266719341, 0.0019998313], rel=1e-5)
    if KERAS.major == 2:
        assert int(model.optimizer.iterations) == 2
