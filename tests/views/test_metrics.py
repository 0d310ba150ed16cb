import math

import pytest

from sparkring.events import Metrics
from sparkring.views import metrics
from sparkring.views.curves import chart, nice_ticks


def epochs(rank, count, begin=0.0, first=1):
    """What a Keras rank reports: running values, then the epoch's."""
    for epoch in range(first, first + count):
        now = begin + epoch * 10
        yield Metrics(now - 5, rank, {"loss": 2 / epoch}, step=20, epoch=epoch, steps=40, epochs=4)
        ended = {"loss": 1 / epoch, "val_loss": 1.5 / epoch}
        yield Metrics(now, rank, ended, epoch=epoch, epochs=4, ends_epoch=True)


def test_a_table_has_the_last_values_of_each_epoch_over_the_ranks(replayed):
    record = replayed(*epochs(0, 2), *epochs(1, 2), Metrics(21.0, 1, {"loss": 0.7, "test": 0.9}))
    table = metrics.table(record)
    assert (table.by, table.names) == ("epoch", ("loss", "val_loss", "test"))
    assert [table.label(row) for row in table.rows] == ["1", "2"]
    assert table.rows[0].values["loss"] == (1.0, 1.0, 1.0)
    assert table.rows[1].values["loss"] == pytest.approx((0.6, 0.5, 0.7))
    assert table.rows[1].values["loss"].differs
    assert table.rows[1].values["test"].mean == 0.9, "a report without an epoch belongs where its rank is"


def test_a_second_fit_begins_a_new_lap(replayed):
    table = metrics.table(replayed(*epochs(0, 2), *epochs(0, 2, begin=30.0), *epochs(1, 2)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [table.label(row) for row in table.rows] == ["1st 1", "1st 2", "2nd 1", "2nd 2"]


def test_fits_of_one_epoch_each_are_laps_and_a_report_after_the_epoch_is_none(replayed):
    table = metrics.table(replayed(*epochs(0, 1), *epochs(0, 1, begin=10.0)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1), (2, 1)]
    table = metrics.table(replayed(*epochs(0, 1), Metrics(11.0, 0, {"auc": 0.8}, epoch=1)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1)]


def test_steps_where_there_are_no_epochs(replayed):
    table = metrics.table(replayed(*(Metrics(step, 0, {"loss": 1 / step}, step=step * 10) for step in (1, 2, 3))))
    assert (table.by, [row.at for row in table.rows]) == ("step", [10, 20, 30])
    table = metrics.table(replayed(*(Metrics(1.0, 0, {"loss": value}) for value in (3, 2, 1))))
    assert [row.at for row in table.rows] == [1, 2, 3]


def test_numbers_that_are_none(replayed):
    found = metrics.table(replayed(Metrics(1.0, 0, {"loss": math.nan}, 1), Metrics(1.0, 1, {"loss": 2.0}, 1)))
    assert math.isnan(found.rows[0].values["loss"].mean)
    assert metrics.curves(replayed(), metrics.table(replayed())) == []


def test_progress_and_the_time_left(replayed):
    found = metrics.progress(replayed(*epochs(1, 2), *epochs(0, 1)), now=12.0)
    assert found is not None
    assert (found.rank, found.epoch, found.epochs, found.step) == (0, 1, 4, None)
    assert found.fraction == 0.25
    assert found.left_s == pytest.approx(5 / 0.125 * 0.75 - 2)


def test_progress_of_one_who_counts_from_zero(replayed):
    found = metrics.progress(replayed(Metrics(1.0, 0, {"loss": 1.0}, epoch=0, epochs=4, step=1, steps=2)), now=1.0)
    assert found is not None
    assert (found.epoch, found.fraction, found.left_s) == (1, 0.125, None)


def test_a_second_fit_begins_its_progress_anew(replayed):
    found = metrics.progress(replayed(*epochs(0, 4), *epochs(0, 1, begin=50.0)), now=60.0)
    assert found is not None
    assert (found.epoch, found.fraction) == (1, 0.25)
    assert found.left_s == pytest.approx(30)


def test_progress_without_totals(replayed):
    assert metrics.progress(replayed(), now=0.0) is None
    found = metrics.progress(replayed(Metrics(1.0, 1, {"loss": 1.0}, step=7)), now=1.0)
    assert found is not None
    assert (found.rank, found.step, found.fraction) == (1, 7, None)


def test_training_and_validation_share_a_chart(replayed):
    record = replayed(*epochs(0, 4))
    found = metrics.curves(record, metrics.table(record))
    assert [[curve.name for curve in curves] for curves in found] == [["loss", "val_loss"]]
    svg = chart(found[0], "epoch")
    assert svg.count("<polyline") == 2
    assert "loss by epoch: from 1 to 0.25; val_loss by epoch: from 1.5 to 0.375" in svg


def test_few_epochs_have_curves_by_step(replayed):
    reports = [
        Metrics(step, 0, {"loss": 1 / step}, step=step, epoch=epoch, steps=5, epochs=2)
        for epoch in (1, 2)
        for step in (1, 2, 3, 4, 5)
    ]
    record = replayed(*reports)
    table = metrics.table(record)
    [[curve]] = metrics.curves(record, table)
    assert metrics.curve_axis(table) == "step"
    assert [point.x for point in curve.points] == [*range(1, 11)]


def test_long_curves_are_thinned_but_keep_their_extremes_and_their_end(replayed):
    spike = {5_000: 100.0}
    record = replayed(*(Metrics(1.0, 0, {"loss": spike.get(n, 1.0)}, step=n) for n in range(1, 9_000)))
    [[curve]] = metrics.curves(record, metrics.table(record))
    assert len(curve.points) <= metrics.CURVE_POINTS
    assert max(point.value.high for point in curve.points) == 100.0
    assert (curve.points[-1].x, curve.last) == (8_999, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.5, 1]), (0.3, 2.3, [0.5, 1, 1.5, 2]), (5, 5, [5]), (-1e-7, 1e-7, [-1e-7, -5e-8, 0, 5e-8, 1e-7])],
)
def test_ticks_are_round(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)
