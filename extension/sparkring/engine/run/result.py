"""The result of a run: the values that the ranks returned, the names that were pulled, and the record."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkring.capture import returning
from sparkring.engine.run.spec import Lost, Results
from sparkring.errors import DataError
from sparkring.gangs.execution import Execution, Value
from sparkring.history import describe, run_store
from sparkring.history import values as value_texts
from sparkring.history.record import RunRecord
from sparkring.runtime.storage import for_this_user_only


class Result:
    """The result of a run of a cell, or of independent items. `record` is the RunRecord."""

    record: RunRecord


@dataclass(eq=False, repr=False)
class RunResult(Result):
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
                f"Only about {run_store.kept_runs()} runs are kept (SPARKRING_KEEP_RUNS)."
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


def unpack_results(execution: Execution, folder: str, ranks: Collection[int] | None = None, label: str = "") -> Results:
    """Unpack the values that the ranks have sent so far, and say which values are missing.

    What was sent of a value that cannot be rebuilt is saved in `folder`, the run's; `label` is added to the file's
    name. If `ranks` is given, only the values of these ranks are unpacked.
    """
    missing = [Lost(f"rank {execution.ranks[0]} has no variable `{name}` to pull") for name in execution.missing]
    results, without, on_gpus = Results({}, {}, missing), dict[str, dict[str, None]](), dict[str, dict[str, None]]()
    for rank, named in sorted(execution.values.items()):
        for name, sent in named.items():
            if (name and not sent.parts and not sent.packed.error) or (ranks is not None and rank not in ranks):
                continue  # from this rank, only the shards are wanted
            what = f"`{name}`" if name else "the value"
            try:
                rebuilt = None if sent.packed.error else _rebuilt(execution, name, sent)
            except Exception as error:  # the value's class may raise any error when the value is rebuilt
                problem = f"cannot be rebuilt here ({type(error).__name__}: {error})"
                rebuilt = None
            else:
                problem = f"cannot be pickled ({sent.packed.error})"
            if rebuilt is None:
                kept = _kept(sent, name or "value", Path(folder), f"{name or 'value'}-rank-{rank}{label}.pkl")
                results.lost.append(Lost(f"{what} of rank {rank} is a {sent.packed.type_name}, which {problem}", kept))
                continue
            if sent.packed.without:
                without.setdefault(what, {}).update(dict.fromkeys(sent.packed.without))
            if rebuilt.was_on:
                on_gpus.setdefault(what, {})[rebuilt.was_on] = None
            if name:
                results.pulled[name] = rebuilt.value
            else:
                results.values[rank] = rebuilt.value
    notices = []
    if left_out := [f"{_listed(whats)} without {wrappers}" for wrappers, whats in _by_content(without)]:
        notices.append(
            f"the bare objects came back, because these wrappers work only on the ranks: {', '.join(left_out)}"
        )
    if moved := [f"{_listed(whats)} from {gpus}" for gpus, whats in _by_content(on_gpus)]:
        notices.append(f"is in the CPU's memory now, because this machine lacks the GPU: {', '.join(moved)}")
    return results._replace(notices=notices)


def _rebuilt(execution: Execution, name: str, sent: Value) -> returning.Rebuilt:
    shards = []
    if sent.packed.shards:
        of_ranks = [named[name].shards for named in execution.values.values() if name in named]
        shards = [pickle.loads(pickled) for of_rank in of_ranks for pickled in of_rank]
    # Unpickling is safe: the sender has proved that it knows the gang's secret, so it is as trusted as this process.
    return returning.unpack_value(sent.parts[0], sent.parts[1:], shards)


def _by_content(notes: Mapping[str, Mapping[str, None]]) -> Iterable[tuple[str, list[str]]]:
    """Group the names of values by what is noted about them, in words."""
    groups: dict[str, list[str]] = {}
    for what, noted in notes.items():
        groups.setdefault(_listed(noted), []).append(what)
    return groups.items()


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _kept(sent: Value, name: str, folder: Path, file: str) -> str:
    """Save what was sent of a value that has not arrived. Return a sentence that says how to load it."""
    if not sent.parts:
        return "Nothing of it could be saved"
    path = folder / "values" / file
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        with open(path, "wb", opener=for_this_user_only) as out:
            payload, *buffers = sent.parts
            if buffers:
                pickle.dump([bytearray(buffer) for buffer in buffers], out, protocol=5)
            out.write(payload)
    except OSError as error:
        return f"It could not be saved in {path}: {error.strerror or error}"
    load = f'pickle.load(open("{path}", "rb"))'
    if buffers:
        load = f'file = open("{path}", "rb"); {name} = pickle.load(file, buffers=pickle.load(file))'
    if not sent.packed.error:
        return f"Its pickle is saved. Load it where its class and modules can be imported: {load}"
    if sent.packed.is_state_dict:
        return f"Its state_dict() is saved: model.load_state_dict({load})"
    left_out = f" Without {_listed(sent.packed.left_out)}." if sent.packed.left_out else ""
    return f"What can be pickled of it is saved: {load}.{left_out}".rstrip(".")
