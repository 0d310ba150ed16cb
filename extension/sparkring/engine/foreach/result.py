"""The result of independent runs: the values of the items, a table of them, and the record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from sparkring.engine.run.result import Result
from sparkring.errors import OptionsError
from sparkring.history import describe
from sparkring.history.events import Failure
from sparkring.history.item_records import ItemRecord
from sparkring.history.record import RunRecord
from sparkring.runtime.packages import require

if TYPE_CHECKING:
    import pandas

Mode = Literal["min", "max"]


@dataclass(eq=False, repr=False)
class ForeachResult(Result):
    """The result of foreach().

    `values` lists the items' values in order, with None for items without a value. `errors` maps the number of each
    failed item (from 0) to its Failure. `table` is a pandas DataFrame with a row for each item, and `best(metric)`
    returns the best of these rows. `record` is the RunRecord. `study` is the study of a search, or None.
    """

    record: RunRecord
    by_item: Mapping[int, Any]
    errors: Mapping[int, Failure]
    _names: Sequence[str]
    _shown: Mapping[int, Mapping[str, Any]]
    _records: Mapping[int, ItemRecord]
    study: Any = None

    @property
    def values(self) -> list[Any]:
        return [self.by_item.get(number) for number in range(len(self._shown))]

    @property
    def table(self) -> pandas.DataFrame:
        """A row for each item. The index is the number of the item.

        The columns are the names bound to the item, `state`, `attempts`, `seconds`, `place` (the host), the last value
        of each metric that items have reported, `value`, and `error`. In the columns of the names, large values are
        replaced by short strings.
        """
        pandas = require("pandas", "the table of the items")
        records = [self._records.get(number) or ItemRecord(number, state="stopped") for number in range(len(self))]
        rows = [self._row(record) for record in records]
        metrics = dict.fromkeys(name for record in records for name in record.metrics)
        table = pandas.DataFrame(rows, columns=list(self._columns(metrics).values())).rename_axis("item")
        # A column of objects: otherwise, pandas would turn whole numbers into floats if an item has no value.
        values = pandas.Series(self.values, table.index, dtype=object)
        return table.assign(value=values)

    def best(self, metric: str = "", *, mode: Mode | None = None) -> pandas.Series[Any]:
        """Return the row of the finished item with the lowest value of a metric; with mode="max", the highest value.

        After a search, `metric` and `mode` default to the search's metric and mode. Raises OptionsError if no finished
        item has reported the metric.
        """
        search = self.record.items.search if self.record.items is not None else None
        if search is not None:
            metric = metric or search.metric
            mode = search.mode if mode is None and metric == search.metric else mode
        if not metric:
            raise OptionsError(
                'best() needs the name of a metric, because the items do not come from a search: best("mape").'
            )
        mode = "min" if mode is None else mode
        if mode not in get_args(Mode):
            raise OptionsError(f"best({metric!r}, mode={mode!r}): the mode must be 'min' or 'max'.")
        measured = {
            number: value
            for number, record in sorted(self._records.items())
            if record.state in ("finished", "kept") and not math.isnan(value := record.metrics.get(metric, math.nan))
        }
        if not measured:
            known = sorted({name for record in self._records.values() for name in record.metrics})
            there = (
                f"the items have reported {', '.join(known)}" if known else "sparkring.log(mape=0.1) reports a metric"
            )
            raise OptionsError(f"best({metric!r}): no finished item has reported this metric; {there}.")
        return self.table.loc[(min if mode == "min" else max)(measured, key=measured.__getitem__)]

    def _columns(self, metrics: Mapping[str, object]) -> dict[tuple[str, str], str]:
        """Map the kind and the name of each column's values to the name of the column.

        If two columns would have the same name, the kind is added to one of them, as in `state (item)`, `lr (metric)`.
        """
        columns: dict[tuple[str, str], str] = {}
        first, last = ("state", "attempts", "seconds", "place"), ("value", "error")
        for kind, names in (("item", self._names), ("", first), ("metric", metrics), ("", last)):
            for name in names:
                is_taken = kind and (name in (*first, *last) or (kind == "metric" and name in self._names))
                columns[kind, name] = f"{name} ({kind})" if is_taken else name
        return columns

    def _row(self, record: ItemRecord) -> dict[str, Any]:
        """Return an item's row of the table. Names and metrics without a value are left out."""
        failure = self.errors.get(record.item)
        names = self._columns(record.metrics)
        row = {names["item", name]: value for name, value in self._shown[record.item].items()}
        row |= {names["metric", name]: value for name, value in record.metrics.items()}
        return row | {
            "state": record.state,
            "attempts": record.attempt,
            "seconds": record.seconds(time.time()) if record.started else math.nan,
            "place": record.host,
            "error": "" if failure is None else failure.summary,
        }

    def __len__(self) -> int:
        return len(self._shown)

    def __repr__(self) -> str:
        took = describe.duration(self.record.ended - self.record.started)
        return f"ForeachResult({describe.items(self.record)} in {took})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))
