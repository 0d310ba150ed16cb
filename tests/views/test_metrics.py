import io
import json
import math

import pytest
from texts import mentions

from sparkring.history import describe, metrics, progress
from sparkring.history.curves import (
    CURVE_POINTS,
    MARKED_PLACES,
    curve_axis,
    curves_of,
    marks_of,
    other_axes,
    used_curves,
)
from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Metrics,
    RankFinished,
    RankStarted,
    RankUsed,
    RunFinished,
)
from sparkring.history.record import apply, replay
from sparkring.views.charts import best_words, charts, since
from sparkring.views.figure import figures
from sparkring.views.html import panel
from sparkring.views.live import state_message
from sparkring.views.markup import RANK_COLOURS
from sparkring.views.terminal import TerminalView
from sparkring.views.watching import watching


def epochs(rank, count, begin=0.0, first=1):
    """Return what a rank with Keras reports: in each epoch, running values and then the values of the whole epoch."""
    for epoch in range(first, first + count):
        now = begin + epoch * 10
        yield Metrics({"loss": 2 / epoch}, step=20, epoch=epoch, steps=40, epochs=4, time=now - 5, rank=rank)
        ended = {"loss": 1 / epoch, "val_loss": 1.5 / epoch}
        yield Metrics(ended, epoch=epoch, epochs=4, ends_epoch=True, time=now, rank=rank)


def test_a_table_has_the_last_values_of_each_epoch_over_the_ranks(replayed):
    record = replayed(*epochs(0, 2), *epochs(1, 2), Metrics({"loss": 0.7, "test": 0.9}, time=21.0, rank=1))
    table = metrics.table(record)
    assert (table.by, table.names) == ("epoch", ("loss", "val_loss", "test"))
    assert [table.label(row) for row in table.rows] == ["1", "2"]
    (_, first), (_, second) = table.newest(2)
    assert first["loss"] == (1.0, 1.0, 1.0)
    assert second["loss"] == pytest.approx((0.6, 0.5, 0.7))
    assert second["loss"].differs
    assert second["test"].mean == 0.9, "a report without an epoch counts for the epoch that its rank is in"


def test_a_second_fit_begins_a_new_lap(replayed):
    table = metrics.table(replayed(*epochs(0, 2), *epochs(0, 2, begin=30.0), *epochs(1, 2), *epochs(1, 2, begin=31.0)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [table.label(row) for row in table.rows] == ["1st 1", "1st 2", "2nd 1", "2nd 2"]


def steps(first, last, rank=0, begin=0.0, **more):
    """Return what a rank logs at each step. There is one step per second."""
    for step in range(first, last + 1):
        yield Metrics({"loss": 1 / step + 0.5 * rank}, step=step, **more, time=begin + step, rank=rank)


def restarted(replayed):
    """Return a run of two ranks, one of them slower. They are lost at step 10 and continue from step 8.

    A checkpoint is saved at every fourth step.
    """
    return replayed(
        AttemptStarted(0.0, 1, 2),
        *steps(1, 10),
        *steps(1, 7, 1),
        *(CheckpointSaved("/ck", str(step), step, 9, time=step + 0.1, rank=0) for step in (4, 8)),
        AttemptEnded(20.0, 1, "lost", 1),
        AttemptStarted(30.0, 2, 2, "8", 8),
        *(each for rank in (0, 1) for each in steps(9, 20, rank, 30.0)),
        *(CheckpointSaved("/ck", str(step), step, 9, time=30.1 + step, rank=0) for step in (12, 16, 20)),
    )


def test_only_steps_that_a_restart_made_again_say_so(replayed):
    table = metrics.table(restarted(replayed))
    labels = [table.label(row) for row in table.rows]
    assert labels[7:14] == ["8", "1st 9", "1st 10", "2nd 9", "2nd 10", "11", "12"]
    assert all("nd" not in label for label in labels[12:])
    assert set(table.rows[10].by_rank["loss"]) == {0, 1}, "a rank that was behind is in the row of attempt 2"
    assert set(table.rows[8].by_rank["loss"]) == {0}


def test_a_curve_goes_on_where_a_restart_did(replayed):
    record = restarted(replayed)
    table = metrics.table(record)
    [[curve]] = curves_of(record, table)
    assert curve_axis(record, table) == "step"
    assert [point.x for point in curve.points] == [*range(1, 21)]
    assert [[point.x for point in line] for line in curve.undone] == [[9, 10]]
    assert marks_of(record, table) == [
        (4, "checkpoint"), (8, "checkpoint"), (9, "restart"), (12, "checkpoint"), (16, "checkpoint"),
        (20, "checkpoint"),
    ]  # fmt: skip
    told = charts(record._replace(started=0.0))
    assert (told["axis"], told["restarts"], told["checkpoints"]) == ("step", [9], [4, 8, 12, 16, 20])
    [chart] = told["charts"]
    [drawn] = chart["curves"]
    assert chart["x"] == [*range(1, 21)]
    assert [chart["time"][at] for at in (7, 8)] == [8, 39], "by time, there is a gap before the restart"
    assert drawn["undone"] == [{"x": [9, 10], "time": [9, 10], "mean": pytest.approx([1 / 9, 1 / 10], rel=1e-5)}]


def test_time_never_runs_backwards_along_a_curve(replayed):
    """When a rank reports a step, it has reached all earlier steps, even those that only slower ranks have reported."""

    def reports(rank, *found):
        return [Metrics({"loss": 1 / step}, step=step, time=time, rank=rank) for step, time in found]

    record = replayed(
        AttemptStarted(0.0, 1, 2),
        *reports(0, (10, 10.0), (20, 20.0), (30, 30.0)),
        *reports(1, (5, 15.0), (15, 45.0), (25, 75.0)),
    )
    [chart] = charts(record._replace(started=0.0))["charts"]
    assert (chart["x"], chart["time"]) == ([5, 10, 15, 20, 25, 30], [10, 10, 20, 20, 30, 30])


def test_checkpoints_by_epoch_are_marked_by_when_they_were_saved(replayed):
    saved = [CheckpointSaved("/ck", str(at), 777, 9, kind="keras", time=at, rank=0) for at in (20.0, 35.0, 99.0)]
    record = replayed(*epochs(0, 4), *saved)
    assert marks_of(record, metrics.table(record)) == [(2, "checkpoint"), (3.5, "checkpoint"), (4, "checkpoint")]


def test_marks_that_would_hide_each_other_are_one(replayed):
    saved = [CheckpointSaved("/ck", str(n), n, 9, time=n + 0.1, rank=0) for n in range(1, 1_001)]
    record = replayed(*steps(1, 1_000), *saved)
    assert 50 <= len(marks_of(record, metrics.table(record))) <= MARKED_PLACES + 1


@pytest.mark.parametrize(("size", "lines"), [(1, 0), (2, 2), (8, 8), (9, 0)])
def test_few_ranks_have_a_line_each_and_many_a_band(replayed, size, lines):
    record = replayed(*(each for rank in range(size) for each in steps(1, 5, rank)), size=size)
    [[curve]] = curves_of(record, metrics.table(record))
    assert [*curve.ranks] == [*range(lines)]
    told = charts(record)
    [chart] = told["charts"]
    [drawn] = chart["curves"]
    assert chart["x"] == [1, 2, 3, 4, 5]
    assert list(drawn["ranks"]) == [*range(lines)]
    assert ("low" in drawn) == (size == 9)
    assert ("thin: each rank" in told["legend"], "band" in told["legend"]) == (bool(lines), size == 9)
    if lines:
        assert curve.ranks[1][-1] == (5, pytest.approx(0.7))
        assert drawn["ranks"][1][-1] == pytest.approx(0.7)
    if size == 9:
        assert (drawn["low"][-1], drawn["lowest"][-1]) == (pytest.approx(0.2), 0)
        assert (drawn["high"][-1], drawn["highest"][-1]) == (pytest.approx(4.2), 8)


def test_ranks_that_agree_have_one_line(replayed):
    same = [Metrics({"loss": 1 / step}, step=step, time=step, rank=rank) for step in range(1, 6) for rank in (0, 1)]
    [[curve]] = curves_of(record := replayed(*same), metrics.table(record))
    assert curve.ranks == {}


def test_single_reports_of_several_ranks_are_no_curve(replayed):
    """There is no curve, because a curve would connect values of different ranks."""
    told = [Metrics({"accuracy": 0.9}, step=10 + rank, time=rank, rank=rank) for rank in range(4)]
    ended = [RankFinished(9.0, rank, "") for rank in range(4)]
    record = replayed(*told, *ended, size=4)
    assert len(metrics.table(record).rows) == 4
    assert charts(record) == {}


def test_the_mean_of_ranks_that_report_in_turns_does_not_jump(replayed):
    told = [Metrics({"loss": float(n % 2)}, step=n, epoch=1, steps=60, time=n, rank=n % 2) for n in range(60)]
    [[curve]] = curves_of(record := replayed(*told), metrics.table(record))
    assert {point.value.mean for point in curve.points[1:]} == {0.5}
    assert curve.last == 0.5


def test_values_between_the_reports_of_a_rank_are_interpolated(replayed):
    """The ranks report at different steps, as Keras' fit() does. Neither the mean nor a rank's line has stairs."""
    told = [(0, 1, 4.0), (1, 1, 6.0), (1, 2, 5.0), (0, 3, 2.0), (1, 4, 3.0), (0, 5, 0.0), (1, 5, 3.0)]
    reports = [Metrics({"loss": value}, step=step, time=float(step), rank=rank) for rank, step, value in told]
    record = replayed(*reports, RankFinished(6.0, 0, ""), RankFinished(6.0, 1, ""))
    [[curve]] = curves_of(record, metrics.table(record))
    assert curve.ranks[0] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0), (5, 0.0)]
    assert curve.ranks[1] == [(1, 6.0), (2, 5.0), (3, 4.0), (4, 3.0), (5, 3.0)]
    means = [5.0, 4.0, 3.0, 2.0, 1.5]
    assert [point.value.mean for point in curve.points] == means
    assert [values["loss"].mean for _, values in metrics.table(record).newest(9)] == means, "as in the table"
    assert [values["loss"].mean for _, values in metrics.table(record).newest(2)] == means[3:]


def test_the_last_mean_covers_ranks_that_have_reported_other_steps(replayed):
    """Rank 1 has no report at the last step that both ranks have reached, but it has reports before and after it."""
    told = [Metrics({"loss": 1 / step}, step=step, time=step, rank=0) for step in (7, 14, 21)]
    told += [Metrics({"loss": 1 + 1 / step}, step=step, time=step, rank=1) for step in (8, 16, 24)]
    [[curve]] = curves_of(record := replayed(*told), metrics.table(record))
    assert (curve.points[-1].x, curve.points[-1].value.mean) == (21, curve.last)
    assert curve.last == pytest.approx((1 / 21 + 1 + 1 / 16) / 2)
    assert curve.best == (21, curve.last)


def test_a_curve_by_step_ends_with_the_end_of_the_last_epoch(replayed):
    """Keras reports the end of an epoch without a step. The last value must not be better than the best one."""
    told = []
    for epoch in (1, 2):
        values = [2 / epoch, 1.5 / epoch]
        told += [Metrics({"loss": v}, 10 * at, epoch, 40, 2, rank=0) for at, v in enumerate(values, 1)]
        told.append(Metrics({"loss": 1 / epoch, "val_loss": 9.0}, epoch=epoch, epochs=2, ends_epoch=True, rank=0))
    [[curve]] = curves_of(record := replayed(*told), metrics.table(record))
    assert [point.x for point in curve.points] == [10, 20, 40, 50, 60, 80]
    assert (curve.last, curve.best) == (0.5, (80, 0.5))


def test_what_is_not_new_is_not_made_again(replayed):
    record = replayed(*steps(1, 5))
    found = metrics.table(record)
    assert metrics.table(record._replace(title="other")) is found
    longer = replayed(*steps(1, 6))
    assert len(metrics.table(longer).rows) == 6
    assert metrics.table(record) == found


def test_fits_of_one_epoch_each_are_laps_and_a_report_after_the_epoch_is_none(replayed):
    table = metrics.table(replayed(*epochs(0, 1), *epochs(0, 1, begin=10.0)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1), (2, 1)]
    table = metrics.table(replayed(*epochs(0, 1), Metrics({"auc": 0.8}, epoch=1, time=11.0, rank=0)))
    assert [(row.lap, row.at) for row in table.rows] == [(1, 1)]


def test_steps_where_there_are_no_epochs(replayed):
    table = metrics.table(
        replayed(*(Metrics({"loss": 1 / step}, step=step * 10, time=step, rank=0) for step in (1, 2, 3)))
    )
    assert (table.by, [row.at for row in table.rows]) == ("step", [10, 20, 30])
    table = metrics.table(replayed(*(Metrics({"loss": value}, time=1.0, rank=0) for value in (3, 2, 1))))
    assert [row.at for row in table.rows] == [1, 2, 3]


def test_the_end_of_an_epoch_of_unknown_length_is_at_its_last_step(replayed):
    told = []
    for epoch in (1, 2):
        told += [Metrics({"loss": 2 / epoch / step}, step, epoch, rank=0) for step in (1, 2, 3)]
        told.append(Metrics({"loss": 0.1 / epoch}, epoch=epoch, epochs=2, ends_epoch=True, rank=0))
    [[curve]] = curves_of(record := replayed(*told), metrics.table(record))
    assert [point.x for point in curve.points] == [1, 2, 3, 4, 5, 6]
    assert (curve.last, curve.best) == (0.05, (6, 0.05))


def test_a_report_without_a_step_belongs_to_the_step_that_its_rank_has_reached(replayed):
    logged = [
        each
        for step in range(100, 1100, 100)
        for each in (
            Metrics({"loss": 1.0}, step, time=step, rank=0),
            Metrics({"accuracy": 0.5}, time=step + 1.0, rank=0),
        )
    ]
    table = metrics.table(replayed(*logged, size=1))
    assert [(row.lap, row.at, sorted(row.by_rank)) for row in table.rows] == [
        (1, step, ["accuracy", "loss"]) for step in range(100, 1100, 100)
    ]
    numbered = [Metrics({"rate": 0.1}, 0, time=0.0, rank=0), *(logged[at]._replace(step=None) for at in range(5))]
    assert [row.at for row in metrics.table(replayed(*numbered, size=1)).rows] == [0, 2, 3, 4, 5, 6]


def test_the_table_by_rank_says_which_rank_has_no_finite_value(replayed):
    told = [Metrics({"loss": math.nan if rank else 0.5}, step=1, time=1.0, rank=rank) for rank in (0, 1)]
    record = replayed(*told, RunFinished(9.0, "finished"))
    assert "metrics by rank" in panel(record, now=9.0, final=True)
    assert "metrics by rank" not in panel(replayed(told[0], RunFinished(9.0, "finished")), now=9.0, final=True)


def test_steps_are_not_counted_if_some_may_have_been_dropped(replayed):
    for count, note in ((40, "the last 12 of 40 steps"), (3_000, "the last 12 steps")):
        record = replayed(*steps(1, count), *steps(1, count, 1), RunFinished(9.0, "finished"))
        assert f">{note}<" in panel(record, now=9.0, final=True)


def test_the_mean_of_huge_values(replayed):
    record = replayed(*(Metrics({"loss": 1.5e308}, step=1, time=1.0, rank=rank) for rank in (0, 1)))
    assert metrics.table(record).last()["loss"].mean == 1.5e308


def test_numbers_that_are_none(replayed):
    found = metrics.table(
        replayed(Metrics({"loss": math.nan}, 1, time=1.0, rank=0), Metrics({"loss": 2.0}, 1, time=1.0, rank=1))
    )
    assert math.isnan(found.last()["loss"].mean)
    assert curves_of(replayed(), metrics.table(replayed())) == []


def test_progress_and_the_time_left(replayed):
    found = progress.slowest(replayed(*epochs(1, 2), *epochs(0, 1)), now=12.0)
    assert found is not None
    assert (found.rank, found.epoch, found.epochs, found.step) == (0, 1, 4, None)
    assert found.fraction == 0.25
    assert found.left_s == pytest.approx(5 / 0.125 * 0.75 - 2)


@pytest.mark.parametrize("counted", ["epoch", "step"])
def test_a_report_without_totals_changes_neither_the_progress_nor_the_time_left(replayed, counted):
    totals = {"epoch": {"epoch": 1, "epochs": 2, "steps": 20}, "step": {"steps": 40}}[counted]
    validated = {"epoch": {"epoch": 1}, "step": {"step": 10}}[counted]
    record = replayed(*steps(1, 10, **totals), Metrics({"val_loss": 0.5}, time=10.0, rank=0, **validated))
    found = progress.slowest(record, now=10.0)
    assert (found.epochs, found.step, found.steps) == (totals.get("epochs"), 10, totals["steps"])
    assert (found.fraction, found.left_s) == (0.25, pytest.approx(30.0))
    later = progress.slowest(replayed(*record.metrics, *steps(11, 20, **totals)), now=20.0)
    assert (later.fraction, later.left_s) == (0.5, pytest.approx(20.0, rel=0.1))


def test_after_a_restart_the_progress_waits_for_all_ranks(replayed):
    """If one rank starts slowly, the progress of the other one alone would go back later."""
    before = [AttemptStarted(0.0, 1, 2), *steps(1, 10, steps=40), *steps(1, 10, 1, steps=40)]
    lost = [AttemptEnded(20.0, 1, "lost", 1), AttemptStarted(30.0, 2, 2, "8", 8)]
    lost += [RankStarted(31.0, rank, "node", 5000 + rank) for rank in (0, 1)]
    record = replayed(*before, *lost, *steps(9, 20, 0, 30.0, steps=40))
    assert progress.slowest(record, 50.0) is None
    record = replayed(*before, *lost, *steps(9, 20, 0, 30.0, steps=40), *steps(9, 12, 1, 40.0, steps=40))
    found = progress.slowest(record, 52.0)
    assert (found.rank, found.step) == (1, 12)
    alone = replayed(AttemptStarted(0.0, 1, 2), *steps(1, 10), *lost, *steps(9, 20, 0, 30.0))
    assert progress.slowest(alone, 50.0).step == 20, "rank 1 has never reported anything"


def test_progress_is_that_of_the_slowest_rank_that_goes_on(replayed):
    """Ranks that have finished or are in a later epoch do not affect the progress. Only the current attempt counts."""
    told = [
        *epochs(0, 4),
        *epochs(1, 1),
        Metrics({"loss": 1.0}, step=13, epoch=2, steps=40, epochs=4, time=21.0, rank=1),
    ]
    for done in ((), (RankFinished(40.0, 0, ""),)):
        record = replayed(*told, *done)
        found = progress.slowest(record, now=21.5)
        assert found is not None
        assert (found.rank, found.epoch, found.step, found.fraction) == (1, 2, 13, pytest.approx(1.325 / 4))
        words = describe.progress_words(found)
        assert words == f"{'1 of 2 ranks finished · ' if done else ''}epoch 2 of 4 · step 13 of 40 · 33 % · 51 s left"
    assert progress.slowest(record, now=500.0).left_s is None, "if it takes longer than estimated, nothing is predicted"
    over = replayed(*epochs(0, 4), *(RankFinished(40.0, rank, "") for rank in (0, 1)))
    assert progress.slowest(over, now=41.0).fraction == 1
    alone = progress.slowest(replayed(*epochs(0, 4), RankFinished(40.0, 0, "")), now=41.0)
    assert describe.progress_words(alone) == "1 of 2 ranks finished · epoch 4 of 4", "a silent rank does not count"
    restarted = replayed(AttemptStarted(0.0, 1, 2), *told, AttemptStarted(50.0, 2, 2))
    assert progress.slowest(restarted, now=51.0) is None


def test_a_metric_has_one_value(replayed):
    """The header, the table and the chart end where the slowest rank is."""
    fast, slow = [*steps(1, 39)], [*steps(1, 13, 1)]
    by_step = replayed(*fast, *slow), 1 / 13 + 0.25
    in_epochs = [
        [
            Metrics({"loss": 10 * rank + s / 100}, step=s, epoch=e, steps=20, epochs=3, time=s, rank=rank)
            for e, s in [(e, s) for e in (1, 2, 3) for s in range(1, 21)][:count]
        ]
        for rank, count in enumerate((58, 27))
    ]
    within = replayed(*(each for told in in_epochs for each in told)), 5 + 7 / 100
    for record, mean in (by_step, within):
        table = metrics.table(record)
        [(_, row)] = table.newest(1)
        [[curve]] = curves_of(record, table)
        values = row["loss"].mean, metrics.table(record).last()["loss"].mean, curve.last, curve.points[-1].value.mean
        assert values == pytest.approx((mean,) * 4)
    assert len(metrics.table(by_step[0]).rows) == 13
    # Views do not wait for a rank that has finished, or for other ranks if only one rank reports the metric.
    record = replayed(*fast, *slow, RankFinished(50.0, 1, ""), Metrics({"alone": 1.0}, step=39, time=60.0, rank=0))
    assert metrics.table(record).last()["loss"].mean == pytest.approx(1 / 39)
    assert metrics.table(record).last()["alone"].mean == 1
    # If the ranks report in turn, the last value of each rank is used.
    record = replayed(*(Metrics({"loss": float(n % 2)}, step=n, time=n, rank=n % 2) for n in range(1, 60)))
    assert {row["loss"].mean for _, row in metrics.table(record).newest(20)} == {0.5}


def test_progress_of_one_who_counts_from_zero(replayed):
    found = progress.slowest(
        replayed(Metrics({"loss": 1.0}, epoch=0, epochs=4, step=1, steps=2, time=1.0, rank=0)), now=1.0
    )
    assert found is not None
    assert (found.epoch, found.fraction, found.left_s) == (1, 0.125, None)


def loop(steps, numbered, first=0, epochs=4, each=20, begin=0, every=1):
    """Return what a training loop of one rank logs. `numbered(epoch, step)` is the number that it gives to a step."""
    for epoch in range(begin, epochs):
        for step in range(1, each + 1):
            if (epoch * each + step - 1) % every == 0:
                at, time = numbered(epoch, step), float(epoch * each + step)
                values = {"loss": 1 / time}
                yield Metrics(values, step=at, epoch=epoch + first, steps=steps, epochs=epochs, time=time, rank=0)
        yield Metrics({"accuracy": 0.5}, epoch=epoch + first, time=float((epoch + 1) * each), rank=0)


@pytest.mark.parametrize("zero", [0, 1], ids=["from 1", "from 0"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("steps", [20, 80], ids=["steps of an epoch", "steps of all epochs"])
def test_steps_may_be_counted_on_from_epoch_to_epoch(replayed, steps, first, zero):
    """Progress and curves are the same as those of a loop that counts its steps within the epoch."""
    wanted = [*loop(20, lambda epoch, step: step - zero, first)]
    counted = [*loop(steps, lambda epoch, step: 20 * epoch + step - zero, first)]
    for reports in range(22, len(wanted)):  # in the first epoch, it is not clear what `steps` counts
        one, other = replayed(*wanted[:reports]), replayed(*counted[:reports])
        assert progress.slowest(other, 90.0) == progress.slowest(one, 90.0)
        assert progress.paces(other) == progress.paces(one)
        assert curves_of(other, metrics.table(other)) == curves_of(one, metrics.table(one))
    assert curves_of(other, metrics.table(other))
    assert other_axes(other, metrics.table(other)) == {"step": (0, 20)}


@pytest.mark.parametrize("first", [0, 1])
def test_a_loop_that_continues_in_a_later_epoch_may_count_on(replayed, first):
    found = [each for each in loop(20, lambda epoch, step: 20 * epoch + step, first, begin=2) if each.step]
    assert [each.step for each in replayed(*found[:30]).metrics] == [*range(1, 21), *range(1, 11)]


@pytest.mark.parametrize("every", [1, 7, 10, 15, 30])
def test_steps_within_the_epoch_are_left_as_they_are(replayed, every):
    """A loop that logs rarely may begin an epoch with a large step."""
    reports = [*loop(20, lambda epoch, step: step, every=every)]
    assert list(replayed(*reports).metrics) == reports


@pytest.mark.parametrize(("steps", "found"), [(20, [20, 20, 20, 20]), (80, [25, 30])], ids=["the last ones", "few"])
def test_one_step_in_each_epoch_is_left_as_it_is(replayed, steps, found):
    """The later steps could be counted over all epochs, but the one before does not fit."""
    reports = [Metrics({"loss": 1.0}, step, epoch, steps, 4, time=epoch, rank=0) for epoch, step in enumerate(found)]
    assert list(replayed(*reports).metrics) == reports


def test_a_second_fit_begins_its_progress_anew(replayed):
    found = progress.slowest(replayed(*epochs(0, 4), *epochs(0, 1, begin=50.0)), now=60.0)
    assert found is not None
    assert (found.epoch, found.fraction) == (1, 0.25)
    assert found.left_s == pytest.approx(30)


def generator(rank, begin=0.0, told=50):
    """Return what a rank with Keras reports if the number of steps is not known: 3 epochs of 50 steps in 10 s."""
    for epoch in (1, 2, 3):
        for step in range(1, 51 if epoch > 1 else told + 1):
            time = begin + 10 * (epoch - 1) + 0.2 * step
            yield Metrics({"loss": 1.0}, step=step, epoch=epoch, epochs=3, time=time, rank=rank)
        yield Metrics({"loss": 1.0}, epoch=epoch, epochs=3, ends_epoch=True, time=begin + 10.0 * epoch, rank=rank)


@pytest.mark.parametrize(("time", "left"), [(10.0, 20.0), (15.0, 15.0), (19.9, 10.1), (25.0, 5.0)])
def test_the_time_left_does_not_grow_within_an_epoch_of_unknown_length(replayed, time, left):
    reports = [each for rank in (0, 1) for each in generator(rank) if each.time <= time]
    assert progress.slowest(replayed(*reports), now=time).left_s == pytest.approx(left, abs=0.5)


@pytest.mark.parametrize("time", [10.0, 12.0, 25.0])
def test_ranks_are_not_compared_by_the_steps_of_an_earlier_epoch(replayed, time):
    """In the first epoch, rank 1 has not reported its last steps. How many steps it took then is not known."""
    reports = [each for rank in (0, 1) for each in generator(rank, told=(50, 40)[rank]) if each.time <= time]
    record = replayed(*reports)
    assert progress.lags(record) == []
    assert [each.rate for each in progress.paces(record).values()] == pytest.approx([5, 5])
    slower = replayed(*(each for each in generator(0) if each.time <= 25), *generator(1, begin=1000.0))
    assert progress.paces(slower)[0].rate == pytest.approx(5), "the rate is that of the current epoch"


@pytest.mark.parametrize(
    "extra",
    [{"epoch": 2}, {"step": 19}, {"step": 59}, {"epoch": 2, "step": 19}, {"epoch": 2, "step": 20}],
    ids=str,
)
def test_reports_that_only_add_values_do_not_change_the_progress(replayed, extra):
    """With Keras, the user may report further values, without totals or with another way of counting."""
    reports = [*epochs(0, 2)][:3]
    wanted = replayed(*reports, size=1)
    record = replayed(*reports, Metrics({"rate": 0.1}, time=15.5, rank=0, **extra), size=1)
    found = progress.slowest(record, 16.0)
    assert found == progress.slowest(wanted, 16.0)
    assert (found.epoch, found.step, found.steps, found.fraction) == (2, 20, 40, 0.375)
    assert found.left_s == pytest.approx(10 / 0.25 * 0.625 - 1)
    ranks = [state_message(each, 16.0)["ranks"] for each in (record, wanted)]
    assert [(each["epoch"], each["step"], each["done"]) for each in ranks] == [([2], [20], [0.375])] * 2
    assert "(e2 · 20)" in panel(record, now=16.0, final=False)


def test_the_time_left_is_known_although_the_first_report_has_no_totals(replayed):
    record = replayed(Metrics({"begun": 1.0}, epoch=1, time=4.0, rank=0), *epochs(0, 2), size=1)
    assert progress.slowest(record, now=20.0).left_s == pytest.approx(15 / 0.375 * 0.5)


def test_a_rank_that_is_one_report_late_is_not_behind(replayed):
    """Ranks that report rarely do not report at exactly the same time."""

    def rarely(rank, count):
        return [Metrics({"loss": 1.0}, step=100 * at, time=10.0 * at, rank=rank) for at in range(1, count + 1)]

    for reports in (2, 8):
        assert progress.lags(replayed(*rarely(0, reports), *rarely(1, reports - 1))) == []
    [lag] = progress.lags(replayed(*rarely(0, 8), *rarely(1, 6)))
    assert lag[:2] == (1, 200)


def test_steps_over_all_epochs_are_compared_although_epochs_have_no_known_length(replayed):
    reports = [*loop(None, lambda epoch, step: 20 * epoch + step)]
    slow = [each._replace(rank=1) for each in reports[:50]]
    [lag] = progress.lags(replayed(*reports[:75], *slow))
    assert lag[:2] == (1, 24)


def test_values_after_training_do_not_hide_the_epoch(replayed):
    record = replayed(*epochs(0, 4), Metrics({"test": 0.9}, time=60.0, rank=0), size=1)
    assert state_message(record, 60.0)["ranks"]["epoch"] == [4]
    assert "(e4)" in panel(record, now=60.0, final=False)


def test_nothing_is_predicted_for_a_rank_that_hangs(replayed):
    record = replayed(*(each for rank in (0, 1) for each in steps(1, 20 if rank else 60, rank, steps=100)))
    assert progress.slowest(record, now=25.0).left_s == pytest.approx(75)
    assert progress.slowest(record, now=60.0).left_s is None
    [lag] = progress.lags(record)
    assert (lag.rank, lag.steps) == (1, 40)
    assert lag.ratio < 0.4, "its rate before it stopped is not its rate now"


def test_ranks_with_fewer_steps_in_each_epoch_are_not_behind(replayed):
    """Neither if the ranks finish their epochs together, nor if they take their steps together."""
    for of_36 in (10 / 36, 10 / 40):
        reports = [
            Metrics({"loss": 1.0}, step, epoch, steps, 10, time=10 * epoch + step * each, rank=rank)
            for epoch in range(1, 11)
            for rank, steps, each in ((0, 40, 10 / 40), (1, 36, of_36))
            for step in range(1, steps + 1)
        ]
        for time in (35.0, 59.5, 95.0):
            assert progress.lags(replayed(*(each for each in reports if each.time <= time))) == []
    slow = [each for each in reports if each.time <= (95.0, 35.0)[each.rank]]
    [lag] = progress.lags(replayed(*slow))
    assert (lag.rank, lag.steps) == (1, pytest.approx(6 * 36, abs=2))


def test_a_rank_that_has_begun_another_fit_is_not_behind(replayed):
    both = [each._replace(rank=rank) for rank in (0, 1) for each in steps(1, 39, epoch=1, epochs=1, steps=40)]
    ahead = [Metrics({"loss": 1.0}, epoch=1, epochs=1, ends_epoch=True, time=40.0, rank=0)]
    ahead += steps(1, 2, begin=41.0, epoch=1, epochs=1, steps=40)
    assert progress.lags(replayed(*both, *ahead)) == []


def test_a_run_is_complete_only_when_nothing_is_left(replayed):
    found = progress.slowest(replayed(*steps(1, 997, steps=1000)), now=997.0)
    assert describe.progress_words(found) == "step 997 of 1,000 · 99 % · 3 s left"


def test_progress_without_totals(replayed):
    assert progress.slowest(replayed(), now=0.0) is None
    found = progress.slowest(replayed(Metrics({"loss": 1.0}, step=7, time=1.0, rank=1)), now=1.0)
    assert found is not None
    assert (found.rank, found.step, found.fraction) == (1, 7, None)


def test_training_and_validation_share_a_chart(replayed):
    record = replayed(*epochs(0, 4))
    found = curves_of(record, metrics.table(record))
    assert [[curve.name for curve in curves] for curves in found] == [["loss", "val_loss"]]
    [drawn] = charts(record)["charts"]
    assert [(curve["name"], curve["last"], curve["dashed"]) for curve in drawn["curves"]] == [
        ("loss", "0.25", False), ("val_loss", "0.375", True),
    ]  # fmt: skip
    assert drawn["words"] == (
        "loss by epoch: from 1 to 0.25, best 0.25 at epoch 4; "
        "val_loss by epoch: from 1.5 to 0.375, best 0.375 at epoch 4"
    )
    assert charts(replayed()) == {}


def test_few_epochs_have_curves_by_step(replayed):
    reports = [
        Metrics({"loss": 1 / step}, step=step, epoch=epoch, steps=5, epochs=2, time=step, rank=0)
        for epoch in (1, 2)
        for step in (1, 2, 3, 4, 5)
    ]
    record = replayed(*reports)
    table = metrics.table(record)
    [[curve]] = curves_of(record, table)
    assert curve_axis(record, table) == "step"
    assert [point.x for point in curve.points] == [*range(1, 11)]


@pytest.mark.parametrize(("size", "same"), [(3, False), (3, True), (12, False)])
def test_what_faster_ranks_have_reported_is_shown_beyond_the_mean(replayed, size, same):
    """With few ranks, their lines go on; if they agree, a line for all of them does; with many ranks, the band does."""
    fast = [each for rank in range(1, size) for each in steps(1, 30, 0 if same else rank)]
    fast = [each._replace(rank=1 + at // 30) for at, each in enumerate(fast)]
    record = replayed(*fast, *steps(1, 10), size=size)
    [[curve]] = curves_of(record, metrics.table(record))
    assert [point.x for point in curve.points] == [*range(1, 11)]
    assert [point.x for point in curve.ahead] == [*range(11, 31)]
    told = charts(record)
    [chart] = told["charts"]
    [drawn] = chart["curves"]
    assert (chart["x"], drawn["until"]) == ([*range(1, 31)], 10)
    assert "only some ranks" in told["legend"]
    assert (drawn["mean"][9] is None, drawn["mean"][10] is None) == (False, not same)
    if same:
        assert drawn["ranks"] == {}
        assert drawn["mean"][29] == pytest.approx(1 / 30, rel=1e-5)
    elif size == 3:
        assert drawn["ranks"][0][9:11] == [pytest.approx(0.1), None]
        assert drawn["ranks"][2][29] == pytest.approx(1 / 30 + 1.0, rel=1e-5)
    else:
        assert (drawn["lowest"][9], drawn["lowest"][29], drawn["highest"][29]) == (0, 1, 11)
    assert "<img" in figures([[curve]], "step")
    # A faster rank that is in an epoch which the slowest one has not begun is beyond its steps, too.
    ahead = [Metrics({"loss": 1 / s}, step=s, epoch=e, steps=20, time=s, rank=1) for e in (1, 2) for s in range(1, 21)]
    slow = [Metrics({"loss": 2 / s}, step=s, epoch=1, steps=20, time=2 * s, rank=0) for s in range(1, 8)]
    record = replayed(*ahead, *slow)
    [[curve]] = curves_of(record, metrics.table(record))
    assert (curve.points[-1].x, curve.ahead[0].x, curve.ahead[-1].x, curve.ranks[1][-1]) == (7, 8, 40, (40, 0.05))


@pytest.mark.parametrize(
    ("name", "at"),
    [("loss", 3), ("val_loss", 3), ("mean_squared_error", 3), ("MAE", 3), ("accuracy", 5), ("val_auc_1", 5), ("acc", 5),
     ("lr", None), ("f1", None), ("error_rate", None), ("", None)],
)  # fmt: skip
def test_the_best_value_is_known_by_the_name_of_the_metric(replayed, name, at):
    values = [5.0, 4.0, 1.0, 4.0, 6.0, 2.0]
    told = [Metrics({name: v + r}, step=s, time=s, rank=r) for s, v in enumerate(values, 1) for r in (0, 1)]
    [[curve]] = curves_of(record := replayed(*told), metrics.table(record))
    assert curve.best == (at and (at, values[at - 1] + 0.5))
    assert best_words(curve, "step") == (f"best {values[at - 1] + 0.5} at step {at}" if at else "")
    assert charts(record)["charts"][0]["curves"][0].get("best") == (at and {"x": at, "value": values[at - 1] + 0.5})


def test_the_best_value_is_known_by_the_best_checkpoint(replayed):
    told = [Metrics({"f1": 1 - abs(s - 4) / 10}, step=s, time=s, rank=0) for s in range(1, 7)]
    saved = [
        CheckpointSaved("/ck", str(s), s, 9, metrics={"f1": 1 - abs(s - 4) / 10}, best=s == 4, time=s, rank=0)
        for s in (2, 4, 6)
    ]
    [[curve]] = curves_of(record := replayed(*told, *saved), metrics.table(record))
    assert curve.best == (4, 1.0)
    # If the best checkpoint has the extreme values of two metrics, either may be the reason why it is the best.
    both = [each._replace(metrics={**each.metrics, "lr": -each.metrics["f1"]}) for each in saved]
    [[curve]] = curves_of(record := replayed(*told, *both), metrics.table(record))
    assert curve.best is None


def test_the_best_mean_is_over_all_ranks(replayed):
    early = Metrics({"loss": 0.001}, step=1, time=1.0, rank=0)
    record = replayed(early, *steps(2, 9), *steps(2, 9, 1))
    [[curve]] = curves_of(record, metrics.table(record))
    assert curve.best == (9, pytest.approx(1 / 9 + 0.25))


def test_the_axis_can_count_epochs_or_steps(replayed):
    """The other axis is an offset and a factor. It needs epochs that all have the same number of steps."""
    assert charts(replayed(*epochs(0, 4)))["axes"] == {"step": (0, 40)}
    zero = [each._replace(epoch=each.epoch - 1) for each in epochs(0, 4)]
    shown = charts(replayed(*zero))
    assert (shown["charts"][0]["x"], shown["axes"]) == ([1, 2, 3, 4], {"step": (0, 40)}), (
        "shown from 1 on, as in the progress"
    )
    within = [Metrics({"loss": 1 / s}, step=s, epoch=1, steps=50, time=s, rank=0) for s in range(1, 9)]
    assert charts(replayed(*within))["axes"] == {"epoch": (0, 1 / 50)}
    assert charts(replayed(*steps(1, 9)))["axes"] == {}
    uneven = [each._replace(steps=7) if each.epoch == 2 and each.steps else each for each in epochs(0, 4)]
    assert charts(replayed(*uneven))["axes"] == {}


def test_steps_of_a_run_that_continues_in_a_later_epoch(replayed):
    record = replayed(*(each for epoch in (6, 7) for each in steps(1, 20, epoch=epoch, steps=20, begin=20.0 * epoch)))
    table = metrics.table(record)
    [[curve]] = curves_of(record, table)
    assert [point.x for point in curve.points] == [*range(101, 141)]
    assert other_axes(record, table) == {"epoch": (0, 1 / 20)}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("over_all", [False, True], ids=["within the epoch", "over all epochs"])
def test_steps_of_epochs_of_unknown_length(replayed, first, over_all):
    counted = [(epoch, step) for epoch in (1, 2) for step in range(20 if epoch == 1 else 7)]
    record = replayed(
        *(
            Metrics({"loss": 1.0 / time}, first + step + 20 * (epoch - 1) * over_all, epoch, time=time, rank=0)
            for time, (epoch, step) in enumerate(counted, 1)
        ),
        size=1,
    )
    [[curve]] = curves_of(record, metrics.table(record))
    assert [point.x for point in curve.points] == [first + step for step in range(27)]
    assert [point.value.mean for point in curve.points] == [1 / time for time in range(1, 28)]


def test_curves_of_a_run_that_restarts_within_its_first_epoch(replayed):
    """Steps that the restart has undone are a part of their own. The curve is by step until it has three epochs."""

    def reports(epoch, last, ends=True):
        found = [Metrics({"loss": 1 / step}, step, epoch, 10, 5, time=step, rank=0) for step in range(1, last + 1)]
        return [*found, Metrics({"loss": 0.1}, None, epoch, 10, 5, True, time=11, rank=0)] if ends else found

    lost = [AttemptStarted(0.0, 1, 1), RankStarted(0.0, 0, "h", 1), *reports(1, 7, False), AttemptEnded(8.0, "died", 0)]
    second = [AttemptStarted(20.0, 2, 1), RankStarted(20.0, 0, "h", 1)]
    seen = []
    for more in (reports(1, 4, False), reports(1, 10), reports(1, 10) + reports(2, 10), []):
        later = [each._replace(time=each.time + 20) for each in more]
        shown = charts(replayed(*lost, *second, *later, size=1))
        [curve] = shown["charts"][0]["curves"]
        seen.append((shown["axis"], len(shown["charts"][0]["x"]), len(curve["undone"])))
    assert seen == [("step", 4, 1), ("step", 10, 1), ("step", 20, 1), ("step", 7, 0)]


def test_only_new_points_of_curves_are_sent(replayed):
    ranks = range(8)
    whole = charts(replayed(*(each for rank in ranks for each in steps(1, 300, rank)), size=8))
    longer = charts(replayed(*(each for rank in ranks for each in steps(1, 301, rank)), size=8))
    sent = since(whole, longer)
    assert sent["charts"][0]["x"] == {"from": 300, "then": [301]}
    assert sent["charts"][0]["curves"][0]["ranks"][7] == {"from": 300, "then": [pytest.approx(3.50332, rel=1e-5)]}
    assert sent["axis"] == "step"
    assert since({}, longer) == longer, "a page that knows nothing gets everything"
    assert len(json.dumps(sent)) < 1_500 < 20_000 < len(json.dumps(longer))


def test_long_curves_are_thinned_but_keep_their_extremes_and_their_end(replayed):
    spike = {8_900: 100.0}
    record = replayed(*(Metrics({"loss": spike.get(n, 1.0)}, step=n, time=1.0, rank=0) for n in range(1, 9_000)))
    [[curve]] = curves_of(record, metrics.table(record))
    assert len(curve.points) <= CURVE_POINTS
    assert max(point.value.high for point in curve.points) == 100.0
    assert (curve.points[-1].x, curve.last) == (8_999, 1.0)


def test_ranks_that_have_fallen_behind(replayed):
    """A rank is behind if the median rank is clearly ahead of it. Epochs count."""
    fast = [each for rank in (0, 1) for each in steps(1, 60, rank)]
    assert progress.lags(replayed(*fast, *steps(1, 58, 2), size=3)) == [], "some ranks are always a step ahead"
    slow = [Metrics({"loss": 1.0}, step=step, time=3.0 * step, rank=2) for step in range(1, 21)]
    record = replayed(*fast, *slow, size=3)
    assert progress.paces(record)[2].rate == pytest.approx(1 / 3)
    [lag] = progress.lags(record)
    assert (lag.rank, lag.steps, lag.ratio) == (2, 40, pytest.approx(1 / 3))
    assert describe.lag_words([lag]) == "rank 2 is 40 steps behind, at 0.33× the median rate"
    assert describe.lag_words([lag._replace(ratio=1.001)]) == "rank 2 is 40 steps behind"
    page = panel(record, now=70.0, final=False)
    assert "rank 2 is 40 steps behind, at 0.33× the median rate" in page
    words = "rank 2, the slowest: step 20"
    assert words in page
    assert state_message(record, 70.0)["progress"] == words, "the live view has the same words"
    assert ">2 ▶ (20)<" in page, "the saved view says where each rank is"
    assert describe.lag_words([lag, lag._replace(rank=0, steps=1)]) == "ranks 0, 2 are 1 to 40 steps behind"
    assert progress.lags(replayed(*fast, *slow, RankFinished(70.0, 2, ""), size=3)) == []
    over = [RankFinished(60.0, rank, "") for rank in (0, 1)]
    assert progress.lags(replayed(*fast, *slow, *over, size=3)) == [lag], "ranks that have finished count"
    epochs_apart = [each for rank, count in ((0, 3), (1, 3), (2, 1)) for each in epochs(rank, count)]
    assert [lag[:2] for lag in progress.lags(replayed(*epochs_apart, size=3))] == [(2, 80)]


def odd_from(step, odd, rank=3, size=4, last=60, **more):
    """Return what ranks log at 60 steps, where one rank's loss is `odd` from a step on."""
    for at in range(1, last + 1):
        for other in range(size):
            value = odd if other == rank and at >= step else 1 / at
            yield Metrics({"train/loss": value}, step=at, time=float(at), rank=other, **more)


@pytest.mark.parametrize(("odd", "text", "what"), [(math.nan, "nan", "NaN"), (-math.inf, "-inf", "infinite")])
def test_ranks_whose_values_are_finite_go_on_when_another_rank_s_are_not(replayed, odd, text, what):
    record = replayed(AttemptStarted(0.0, 1, 4), *odd_from(41, odd), size=4)._replace(started=0.0)
    [chart] = charts(record)["charts"]
    [curve] = chart["curves"]
    assert chart["x"] == [*range(1, 61)]
    assert curve["ranks"][0][39:] == pytest.approx([1 / at for at in range(40, 61)], rel=1e-5)
    assert curve["ranks"][3][39:] == curve["mean"][39:] == [0.025, *[text] * 20]
    assert chart["odd"] == [(41, 60)]
    assert curve["best"]["x"] == 40
    assert "red bar" in charts(record)["legend"]
    words = f"train/loss is {what} on rank 3 since step 41"
    assert describe.not_finite_words(record) == [words]
    assert state_message(record, 61.0)["notices"] == [words]
    ended = replay([RunFinished(62.0, "finished")], record)
    assert words in panel(ended, now=62.0, final=True)
    json.dumps(charts(record), allow_nan=False)


def test_no_mean_has_the_colour_of_a_rank_beside_it(replayed):
    reports = [
        Metrics({"loss": 1 / at + rank, "val_loss": 2 / at + rank}, step=at, time=float(at), rank=rank)
        for at in range(1, 9)
        for rank in range(4)
    ]
    told = charts(replayed(*reports, size=4))
    colours = [curve["colour"] for curve in told["charts"][0]["curves"]]
    assert len({*colours, *RANK_COLOURS}) == 2 + len(RANK_COLOURS)
    assert "dashed: validation" in told["legend"]
    assert "dashed" not in charts(replayed(*steps(1, 9)))["legend"]


def test_many_ranks_keep_their_band_where_one_rank_is_not_finite(replayed):
    record = replayed(*odd_from(41, math.nan, size=12), size=12)
    [chart] = charts(record)["charts"]
    [curve] = chart["curves"]
    assert (curve["mean"][-1], curve["low"][-1], curve["high"][-1]) == ("nan", *[pytest.approx(1 / 60, rel=1e-5)] * 2)


def test_a_few_values_that_are_not_finite_leave_the_others_in_a_long_curve(replayed):
    reports = [
        Metrics({"loss": math.nan if at % 100 == 0 else 1.0 + rank}, step=at, time=float(at), rank=rank)
        for at in range(1, 2001)
        for rank in (0, 1)
    ]
    [chart] = charts(replayed(*reports))["charts"]
    [curve] = chart["curves"]
    assert {*curve["ranks"][0]} == {1.0}
    assert len(chart["odd"]) == 20


def test_the_words_name_the_ranks_by_when_their_values_stopped_being_finite(replayed):
    def reported(*events):
        (words,) = describe.not_finite_words(replayed(*events, size=4))
        return words

    def loss(value, rank, step=None, **more):
        return Metrics({"loss": value}, step=step, time=1.0, rank=rank, **more)

    first = [loss(math.nan, 3, 41), loss(math.inf, 3, 42), *(loss(math.nan, rank, 42) for rank in (0, 1, 2))]
    assert mentions(reported(*first), "loss is not finite", "rank 3", "step 41", "ranks 0–2", "step 42")
    words = reported(*first, loss(1.0, 3, 43))
    assert mentions(words, "loss is NaN", "ranks 0–2", "step 42")
    assert "41" not in words, "rank 3 is finite again"
    words = reported(loss(math.nan, 0), loss(math.nan, 1), loss(1.0, 2), loss(math.nan, 2))
    assert mentions(words, "loss is NaN", "ranks 0, 1", "step 1", "rank 2", "step 2")
    assert mentions(reported(loss(math.nan, 1, 4, epoch=0)), "loss is NaN", "rank 1", "epoch 1, step 4")
    again = AttemptStarted(0.0, 1, 4), *first, AttemptEnded(2.0, 1, "lost", 3), AttemptStarted(3.0, 2, 4)
    assert describe.not_finite_words(replayed(*again, size=4)) == []


def test_what_needs_attention_most(replayed):
    """A validation metric that gets worse, a restart, and above all a value that is not finite; else nothing."""

    def watched(*reported, attempts=()):
        record = replayed(*attempts, *reported)
        text = watch.text if (watch := watching(record)) else ""
        assert state_message(record, 60.0)["watch"] == watch
        assert text in panel(record, now=60.0, final=True)
        TerminalView(printed := io.StringIO()).close(apply(record, RunFinished(60.0, "finished")))
        if watch is None or watch.tab == "metrics":  # a terminal has told a restart when it happened
            assert text in printed.getvalue()
        finished = apply(record, RunFinished(60.0, "finished"))
        look = "cut" if describe.not_finite_words(record) else "finished"
        assert state_message(finished, 60.0)["look"] == look
        assert f"sr-state sr-{look}" in panel(finished, now=60.0, final=True)
        return watch and (watch.tab, text)

    def losses(*values, name="val_loss"):
        return [Metrics({name: value}, epoch=at, rank=rank) for at, value in enumerate(values) for rank in (0, 1)]

    assert watched(*losses(3, 2, 1, 1.2, 1.3)) is None
    tab, words = watched(*losses(3, 1, 1.2, 1.3, 1.4, 1.5, 1.6))
    assert tab == "metrics"
    assert mentions(words, "val_loss", "risen", "5 epochs", "1", "1.6")
    assert watched(*losses(3, 1, 1.2, 1.3, 1.4, 1.3)) is None
    assert watched(*losses(1, 2, 3, 4, 5, name="loss")) is None  # while training, the loss of a batch may rise
    assert watched(*losses(1, 2, 3, 4, 5, name="val_accuracy")) is None
    tab, words = watched(*losses(5, 4, 3, 2, name="val_accuracy"))
    assert tab == "metrics"
    assert mentions(words, "val_accuracy", "fallen", "3 epochs", "5", "2")
    restart = [
        AttemptStarted(0.0, 1, 2),
        AttemptEnded(5.0, 1, "rank 1 failed", 1),
        AttemptStarted(6.0, 2, 2, "step-30", 30),
    ]
    tab, words = watched(attempts=restart)
    assert tab == "restarts"
    assert mentions(words, "attempt 1", "rank 1 failed", "step 30")
    assert watched(*losses(1, 2, math.nan), attempts=restart)[0] == "metrics"


def test_what_ranks_use_has_the_axis_of_the_metrics(replayed):
    """Samples of one moment are one point, at the step that the run had reached. What is unknown has no chart."""
    told = [
        Metrics({"loss": 1 / step}, step=step, time=2.0 * step, rank=rank) for step in range(1, 16) for rank in (0, 1)
    ]
    told += [RankUsed(50 + rank, 10**9, 4, 10**10, at + rank / 10, rank) for at in range(3, 40, 5) for rank in (0, 1)]
    record = replayed(*told)
    [cpu], [memory] = used_curves(record, metrics.table(record))
    assert (cpu.name, memory.name) == ("CPU (%)", "memory (GB)")
    assert [point.time for point in cpu.points] == [4.5, 9.5, 14.5, 19.5, 24.5, 29.5]
    assert [point.x for point in cpu.points] == [time / 2 for time in (4.5, 9.5, 14.5, 19.5, 24.5, 29.5)]
    assert {rank: {value for _, value in line} for rank, line in cpu.ranks.items()} == {0: {50}, 1: {51}}
    assert {point.value.mean for point in memory.points} == {1.0}
    assert memory.ranks == {}, "the ranks' values are the same"
    assert [chart.get("used") for chart in charts(record)["charts"]] == [None, True, True]
    assert "CPU (%)" in panel(record, now=40.0, final=True)
    few = replayed(*told[:20])
    assert used_curves(few, metrics.table(few)) == []
