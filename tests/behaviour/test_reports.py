"""Metrics and messages that ranks report, on every launcher."""

from __future__ import annotations

import pytest

import sparkring
from sparkring.errors import RunFailed
from sparkring.history import metrics

FIT = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd
hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), "mse")
x = np.random.default_rng(0).random((64, 4))
history = model.fit(x, x.sum(1), epochs=2, batch_size=16, verbose=0)
size = hvd.size()
hvd.shutdown()
size, history
"""


@pytest.mark.standalone("the driver's Python reads what the executors' Python reports")
def test_metrics_arrive(ring):
    """Metrics that log() reports, as arguments or in a dict, are in the record, with rank, step, epoch and totals."""
    record = ring.run("""
        from sparkring import log
        for step in (1, 2):
            log(step=step, epoch=1, steps=2, epochs=3, loss=1 / step, rank=rank)
        log({"train/loss": 2}, step=3, loss=0.5)
    """).record
    found = [(m.rank, m.step, m.epoch, m.steps, m.epochs, m.values) for m in record.metrics if m.rank == 1]
    assert found == [
        (1, 1, 1, 2, 3, {"loss": 1.0, "rank": 1.0}),
        (1, 2, 1, 2, 3, {"loss": 0.5, "rank": 1.0}),
        (1, 3, None, None, None, {"train/loss": 2.0, "loss": 0.5}),
    ]
    assert len(record.metrics) == 6
    assert record.ranks[0].metrics.values["loss"] == 0.5


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.any_launcher
def test_arrays_of_one_number_are_numbers(ring):
    """A 0-d array or tensor is reported as a number. For a loss with a gradient, torch prints no warning."""
    record = ring.run("import numpy as np, torch\nfrom sparkring import log\n"
                      "loss = torch.tensor(4.0, requires_grad=True)\n"
                      "log(a=np.float32(0.5), b=np.array(2), c=torch.tensor(3.0), d=float('nan'), e=loss)"
                      ).record  # fmt: skip
    values = record.metrics[0].values
    assert (values["a"], values["b"], values["c"], values["e"]) == (0.5, 2.0, 3.0, 4.0)
    assert values["d"] != values["d"]
    assert not [line.text for rank in record.ranks for line in rank.tail]


@pytest.mark.any_launcher
def test_a_metric_that_is_no_number(ring):
    """The rank raises a TypeError that names the metric, and the error shows the cell's line, not sparkring's."""
    with pytest.raises(RunFailed, match=r"TypeError: log\(accuracy=…\): str .*not .*number") as caught:
        ring.run("from sparkring import log\nlog(loss=1, accuracy='high')")
    assert "cell line 3" in str(caught.value)
    assert "raised in" not in str(caught.value)


def test_what_log_cannot_take():
    """A value without a name is refused, and so is a metric in a dict that is not a number."""
    with pytest.raises(TypeError, match=r"metrics .*dict .*keyword arguments, not 0\.25"):
        sparkring.log(0.25)
    with pytest.raises(TypeError, match="train/loss"):
        sparkring.log({"train/loss": [1, 2]})


@pytest.mark.any_launcher
def test_messages(ring):
    """log_to_driver's text arrives as a message, cut at 4,000 characters."""
    ring.run("from sparkring import log_to_driver\nlog_to_driver('x' * 5000)\nlog_to_driver(rank)", n=1)
    assert [(line.stream, line.text) for line in ring.view.record.recent] == [("message", "x" * 4000), ("message", "0")]


@pytest.mark.slow
@pytest.mark.pair
@pytest.mark.any_launcher
def test_keras_fit_reports_by_itself(ring):
    """With Keras under Horovod, each epoch and the running values are in the record, without a change to the cell.

    The History that fit() returns can be the value of the cell, although the notebook could not rebuild its model.
    """
    result = ring.run(FIT, framework="horovod")
    assert [size for size, _ in result.values] == [2, 2]
    for rank, (_, history) in enumerate(result.values):
        losses, model = history.history["loss"], history.model
        assert model is None
        epochs = [m for m in result.record.metrics if m.rank == rank and m.ends_epoch]
        assert [(m.epoch, m.epochs) for m in epochs] == [(1, 2), (2, 2)]
        assert [m.values["loss"] for m in epochs] == pytest.approx(losses)
        steps = [m for m in result.record.metrics if m.rank == rank and not m.ends_epoch]
        assert steps, "no running values"
        assert all(m.steps == 4 for m in steps)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_callbacks_may_report_more_than_fit_does(pair, first):
    """Epochs that a callback counts from 0 or from 1 are those of fit(), which stops early in the second one."""
    record = pair.run(f"""
        import numpy as np
        import tensorflow as tf
        from sparkring import log
        class More(tf.keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                log(epoch=epoch + {first}, begun=1.0)
            def on_epoch_end(self, epoch, logs=None):
                log(epoch=epoch + {first}, rate=0.1)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse")
        stop = tf.keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1)
        x = np.ones((64, 4))
        model.fit(x, x.sum(1), epochs=5, batch_size=16, verbose=0, callbacks=[More(), stop])
        log(epoch=0, test=0.5)
    """).record
    table = metrics.table(record._replace(metrics=tuple(m for m in record.metrics if "test" not in m.values)))
    assert [(row.lap, row.at, sorted(row.by_rank)) for row in table.rows] == [
        (1, epoch, ["begun", "loss", "rate"]) for epoch in (1, 2)
    ]
    own = [m for m in record.metrics if m.rank == 0]
    assert (own[-2].epoch, own[-2].epochs, own[-2].ends_epoch) == (2, 2, True), "no epochs are left"
    assert own[-1].epoch == 0, "after fit(), numbers are as the user gives them"


@pytest.mark.slow
def test_autolog_can_be_left_out(pair):
    """With --no-autolog, Keras' fit() reports nothing."""
    assert pair.run(FIT, framework="horovod", autolog=False).record.metrics == ()
