"""Computes how many items fit at once, and how long all items will take, from what the first item used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.result import ForeachResult
from sparkring.history import describe
from sparkring.history.events import ItemMeasured
from sparkring.launchers.base import ItemRoom

Binds = Literal["memory", "cores", "task slots", "GPUs", "GPU memory"]

KEPT_FREE = 0.1  # a plan leaves this fraction of the free memory free, since items differ
# The last item that fits may lack this fraction of its cores. For example, two items that use 1.1 cores each fit on 2
# cores.
CORE_SLACK = 0.25
KERAS_BATCH = 32  # the default batch size of Keras' fit()


@dataclass(frozen=True)
class Plan:
    """The result of %%foreach --plan: how many items fit at once, if all items are like the first item.

    `fits` is how many items fit at once, and `binds` says what limits this number: "memory", "cores", "task slots",
    "GPUs" or "GPU memory". `at_once` is the number that was chosen with -n. `items` is the total number of items, or
    None if it is unknown. `warning` is '' if the chosen number fits. `hosts` is 1 for processes on this machine; for
    Spark tasks, it is the number of hosts with executors, and memory and cores are per host.

    The following attributes describe one item. `seconds` is how long it takes, without the start of its processes. The
    start takes `start_s`; during this time, each process spends `import_s` on its own imports. `cpu_share` is the
    number of cores that the item keeps busy. `read_bytes` is how much it reads with system calls, not counting imports.
    `memory_bytes` is the peak memory of all its processes, not counting `shared_bytes`. `shared_bytes` is the memory
    that all items on a host share: libraries and other files that they map, and packages that one process has imported
    for all of them. `gpu_bytes` is the GPU memory that the item uses.

    `free_bytes`, `cores` and `gpus` say what is available.

    `memory_at(k)` is the memory that each host needs if k items run at once, and `seconds_at(k)` is the time for all
    items. `rule_bytes` is a network's memory by a rule of thumb, `parameters` × bytes per parameter × 2 × `batch_size`
    × steps held, with one step held. `rule_bytes` is None if the item made no Keras or PyTorch model. `result` is the
    ForeachResult for the first item.
    """

    items: int | None
    at_once: int
    fits: int
    binds: Binds
    on_spark: bool
    hosts: int
    seconds: float
    start_s: float
    import_s: float
    cpu_share: float
    read_bytes: int
    memory_bytes: int
    shared_bytes: int
    gpu_bytes: int
    free_bytes: int
    cores: int
    gpus: int
    parameters: int
    batch_size: int
    rule_bytes: int | None
    result: ForeachResult

    def memory_at(self, at_once: int) -> int:
        """Return how much memory each host needs if `at_once` items (or all, if there are fewer) run at once."""
        return self.shared_bytes + math.ceil(self._running(at_once) / self.hosts) * self.memory_bytes

    def seconds_at(self, at_once: int, items: int | None = None) -> float | None:
        """Return how long `items` items (by default, all) take if `at_once` of them run at once.

        Return None if the number of items is unknown. The estimate assumes that all items are like the first one.
        """
        count = self.items if items is None else items
        if count is None:
            return None
        at_once, cores = max(1, min(at_once, count)), self.cores * self.hosts
        start_s = self.start_s + self.import_s * max(0.0, at_once / cores - 1)
        return start_s + self.seconds * max(math.ceil(count / at_once), count * self.cpu_share / cores)

    def _running(self, at_once: int) -> int:
        return at_once if self.items is None else min(at_once, self.items)

    @property
    def warning(self) -> str:
        needed = self.memory_at(self.at_once)
        if self.free_bytes and needed > self.free_bytes:
            host = " on each host" if self.hosts > 1 else ""
            memory = f"{describe.size(needed)} of memory{host}, but only {describe.size(self.free_bytes)} is free"
            return f"{self.at_once} at once need about {memory}: use {self._option}."
        if self.at_once > self.fits and self.binds in ("GPUs", "GPU memory"):
            return f"{self.at_once} at once do not fit on {describe.counted(self.gpus, 'GPU')}: use {self._option}."
        if self.at_once > self.fits and self.binds == "task slots":
            items = describe.counted(self.fits, "item")
            return f"there are task slots for {items}: use {self._option}, or add executors."
        return ""

    @property
    def _option(self) -> str:
        return f"-n {self.fits if self.on_spark else -self.fits}"

    @property
    def title(self) -> str:
        """The plan in one line."""
        all_items = "the items" if self.items is None else describe.counted(self.items, "item")
        hosts = describe.counted(self.hosts, "host")
        where = f"{hosts} with executors" if self.on_spark else "this machine"
        if self.items is not None and self.fits >= self.items > 1:
            return f"plan of {all_items}: all of them fit at once on {where}"
        fit = "fits" if self.fits == 1 else "fit"
        return f"plan of {all_items}: {self.fits} at once {fit} on {where}, limited by {self.binds}"

    def _rows(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return the headers and the rows of the table. There is a column for each number of items at once."""
        columns = sorted({1, self.at_once, self._running(self.fits)})
        headers = ["", *(f"{k} at once" for k in columns), "available"]

        def row(name: str, cells: Sequence[str], available: str = "") -> tuple[str, ...]:
            return (name, *cells, *("" for _ in columns[len(cells) :]), available)

        memory = [describe.size(self.memory_at(k)) for k in columns]
        free = f"{describe.size(self.free_bytes)} free" if self.free_bytes else ""
        cores = self.cores * self.hosts
        busy = [f"{min(cores, k * self.cpu_share):.2g}" for k in columns]
        rows = [
            row(f"memory{' of each host' if self.hosts > 1 else ''}, at the peak", memory, free),
            row("of which shared", [describe.size(self.shared_bytes)]),
            row("cores kept busy", busy, str(cores)),
            row("reads", [describe.size(self.read_bytes)]),
            row("time for 1 item", [describe.duration(self.seconds)]),
        ]
        if self.gpu_bytes:
            rows.insert(2, row("GPU memory", [describe.size(self.gpu_bytes)]))
        count = self.items or 100
        times = [describe.duration(self.seconds_at(k, count) or 0.0) for k in columns]
        rows.append(row(f"time for {'all ' if self.items else ''}{count:,} items", times))
        if self.rule_bytes is not None:
            rows.append(row("memory by the rule of thumb", [describe.size(self.rule_bytes)]))
        return headers, rows

    def _notes(self) -> list[str]:
        start = f"the start and the imports, which take {describe.duration(self.start_s)} before the first item"
        count = f"{self.items or 100:,} items"
        notes = [f"The time for {count} includes {start}. The times assume that all items are like the first one."]
        needed = self._running(self.at_once) * self.cpu_share
        if self.binds == "cores" and needed > self.cores * self.hosts:
            cores = f"together they need {needed:.2g} cores"
            notes.append(f"With {self.at_once} at once, each item takes longer, since {cores}.")
        more_s, chosen_s = self.seconds_at(self.fits), self.seconds_at(self.at_once)
        if self.fits > self.at_once and more_s is not None and chosen_s is not None and more_s > chosen_s:
            imports = f"its own imports, which take {describe.duration(self.import_s)}"
            notes.append(
                f"With {self._running(self.fits)} at once, the run would not be faster: each process has {imports}."
            )
        if self.rule_bytes is not None:
            value_bytes = self.rule_bytes // (2 * self.batch_size * self.parameters)
            factors = (
                f"{self.parameters:,} parameters × {value_bytes} bytes × 2 × batch size {self.batch_size} × 1 step held"
            )
            notes.append(f"The rule of thumb is {factors}. The measured memory is more reliable.")
        return notes

    def __str__(self) -> str:
        from sparkring.views.tables import table_text

        warning = [f"⚠ {self.warning}"] if self.warning else []
        return "\n".join([self.title, *warning, table_text(*self._rows()), *self._notes()])

    def __repr__(self) -> str:
        return f"Plan({self.title})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from sparkring.views.tables import titled_html

        return titled_html(self.title, self.warning, *self._rows(), self._notes())


def plan(
    result: ForeachResult,
    ranks: Sequence[ItemMeasured],
    room: ItemRoom,
    *,
    items: int | None,
    options: ForeachOptions,
    wall_s: float,
) -> Plan:
    """Return the plan that follows from the measurements of all ranks of the first item.

    `items` is the total number of items, `options` are those of the run, and `wall_s` the time until the first
    item has finished, including the start of its processes.
    """
    seconds = max(rank.seconds for rank in ranks)
    own_bytes, shared_bytes = sum(rank.own_bytes for rank in ranks), max(rank.shared_bytes for rank in ranks)
    share = sum(rank.cpu_s for rank in ranks) / max(seconds, 1e-3)
    cores, free_bytes = ranks[0].cores, min(rank.free_bytes for rank in ranks)
    gpu_bytes = max(rank.gpu_bytes for rank in ranks)
    limits: dict[Binds, float] = {"cores": cores / max(share, 0.01) + CORE_SLACK}  # how many items fit on each host
    if free_bytes:
        limits["memory"] = (free_bytes * (1 - KEPT_FREE) - shared_bytes) / max(1, own_bytes)
    if room.tasks is not None:
        limits["task slots"] = room.tasks
    if room.gpus is not None:
        limits["GPUs"] = room.gpus
    if gpu_bytes and room.gpu_free:
        limits["GPU memory"] = sum(free // gpu_bytes for free in room.gpu_free)
    binds = min(limits, key=limits.__getitem__)
    fits = limits[binds] * room.hosts if binds == "task slots" else int(limits[binds]) * room.hosts
    model = max(ranks, key=lambda rank: rank.parameters)
    batch_size = model.batch_size or KERAS_BATCH
    return Plan(
        items=items,
        at_once=options.at_once,
        fits=max(1, round(fits)),
        binds=binds,
        on_spark=not options.place.here,
        hosts=room.hosts,
        seconds=seconds,
        start_s=max(0.0, wall_s - seconds),
        import_s=max(rank.import_s for rank in ranks),
        cpu_share=share,
        read_bytes=sum(rank.read_bytes for rank in ranks),
        memory_bytes=own_bytes,
        shared_bytes=shared_bytes,
        gpu_bytes=gpu_bytes,
        free_bytes=free_bytes,
        cores=cores,
        gpus=len(room.gpu_free),
        parameters=model.parameters,
        batch_size=batch_size,
        rule_bytes=model.parameter_bytes * 2 * batch_size if model.parameters else None,
        result=result,
    )
