"""A run is compared with the last run of the same cell: a faint curve, and how much the value has changed."""

from pathlib import Path

from texts import mentions

from sparkring.history import describe
from sparkring.history.events import Ending, Event, Metrics, RunFinished, RunStarted
from sparkring.history.record import RunRecord, replay
from sparkring.history.run_folder import RunFolder
from sparkring.views.charts import charts
from sparkring.views.html import panel
from sparkring.views.live import state_message

CELL = "%%horovod -n -1\nbuild()\nlearning_rate = 0.1\ntrain(learning_rate)\nevaluate()"


def run(number: int, values: list[float], *, code: str = CELL, ending: Ending | None = "finished") -> RunRecord:
    """Save a run of one rank, and return its record. It reports the `values` of val_loss, one in each step."""
    began = 100.0 * number
    run_id = f"2026-11-20_14-03-2{number}_00000"
    events: list[Event] = [
        RunStarted(began, run_id, "train", code, 1, "local", "horovod", "all"),
        *(Metrics({"val_loss": value}, step=step, time=began + step) for step, value in enumerate(values, 1)),
    ]
    events += [RunFinished(began + 50, ending)] if ending else []
    folder = RunFolder(run_id)
    folder.seen(events, RunRecord())
    folder.ended(RunRecord())
    return replay(events, RunRecord(log_folder=str(folder.path)))


def test_a_run_is_compared_with_the_last_run_of_its_cell(tmp_path: Path) -> None:
    assert "ghost" not in charts(run(1, [9.0, 8.0, 7.0, 6.0]))["charts"][0]["curves"][0]
    run(2, [4.0, 3.0, 2.0, 1.0])
    run(3, [0.1] * 4, code="%%horovod -n -1\nanother()\ncell()\naltogether()\n")
    run(4, [0.1] * 4, ending="failed")
    edited = CELL.replace("0.1", "0.2")
    running = run(5, [3.9, 2.7, 1.5], code=edited, ending=None)
    [curve] = charts(running)["charts"][0]["curves"]
    assert curve["ghost"] == {"x": [1, 2, 3, 4], "time": [1, 2, 3, 4], "mean": [4, 3, 2, 1]}
    # While it is running, a run is compared with the last run at the same step.
    assert mentions(curve["last"], "1.5", "−25 %")
    (words,) = state_message(running, 505.0)["last"]
    assert mentions(words, "val_loss 1.5", "−25 %")
    ended = replay([RunFinished(600.0, "finished")], running)
    (words,) = describe.metric_words(ended, 4)
    assert mentions(words, "val_loss 1.5", "+50 %")
    page = panel(ended, now=600.0, final=True)
    assert "+50 % against" in page
    assert "pale line:" in page
