"""The result of a run: the values that the ranks returned, the names that were pulled, and the record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkring.engine.spec import Results
from sparkring.errors import DataError
from sparkring.gangs.execution import Execution
from sparkring.history import describe, run_store
from sparkring.history import values as value_texts
from sparkring.history.record import RunRecord


@dataclass(eq=False, repr=False)
class RunResult:
    """The result of a run.

    `value`: the value of the last expression, or what the function returned, on rank 0. `values`: the values of all
    ranks, in rank order; `by_rank`: the same as a dict. `pulled`: the values of the names in --pull, from rank 0.
    `record`: the RunRecord. `logs(rank)`: everything that the rank printed. `problems`: sentences that say which values
    could not be returned, and why. For a run on only some ranks (%%ranks), `values` contains their values, and the
    first of these ranks takes the place of rank 0.
    """

    by_rank: dict[int, Any]
    pulled: dict[str, Any]
    record: RunRecord
    problems: tuple[str, ...] = ()

    @property
    def value(self) -> Any:
        return next(iter(self.values), None)

    @property
    def values(self) -> list[Any]:
        return [self.by_rank.get(rank.rank) for rank in self.record.taking_part]

    def logs(self, rank: int = 0) -> str:
        """Return what `rank` wrote to stdout and stderr, in order of arrival. Invalid UTF-8 is shown as \\xNN.

        Raises DataError if the run's folder has been removed.
        """
        if not 0 <= rank < self.record.size:
            raise IndexError(f"there is no rank {rank}: this run had ranks 0 to {self.record.size - 1}")
        folder = Path(self.record.log_folder)
        if not folder.exists():
            raise DataError(
                f"the logs of run {self.record.run_id} no longer exist: the folder {folder} has been removed. "
                f"Only about {run_store.KEEP} runs are kept."
            )
        return run_store.log(folder, rank)

    def __repr__(self) -> str:
        took = describe.duration(self.record.ended - self.record.started)
        shown = next((rank.value for rank in self.record.taking_part), "")
        value = f", value={shown}" if shown else ""
        return f"RunResult({describe.ranks(self.record)}, {self.record.outcome} in {took}{value})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what IPython shows in Out[]: the ranks' values, or the repr if the result is part of another object."""
        whole = len(printer.stack) <= 1
        printer.text((value_texts.told(self.by_rank, value_texts.like(printer)) if whole else "") or repr(self))


def unpack_results(execution: Execution) -> Results:
    """Unpack the values that the ranks have sent so far, and say which values are missing."""
    import cloudpickle

    missing = [f"rank {execution.ranks[0]} has no variable `{name}` to pull" for name in execution.missing]
    found = Results({}, {}, missing)
    for rank, named in sorted(execution.values.items()):
        for name, packed in named.items():
            problem = f"cannot be pickled ({packed.error})" if packed.error else ""
            try:
                # Unpickling is safe: the sender has proved that it knows the gang's secret, so it is as trusted as this
                # process.
                value = None if problem else cloudpickle.loads(packed.parts[0], buffers=packed.parts[1:])
            except Exception as error:  # the value's class may raise any error when the value is rebuilt
                problem = f"cannot be rebuilt here ({type(error).__name__}: {error})"
            if problem:
                what = f"`{name}`" if name else "the value"
                found.problems.append(f"{what} of rank {rank} is a {packed.type_name}, which {problem}")
            elif name:
                found.pulled[name] = value
            else:
                found.values[rank] = value
    return found
