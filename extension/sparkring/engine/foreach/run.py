"""Prepares and carries out one run of independent items, from its spec to its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture import notebook_state
from sparkring.capture.calls import CALLED, check_call, name_of, names_of, source_of
from sparkring.capture.cell import LARGE_BYTES, captured_call
from sparkring.capture.packages import CodeImports
from sparkring.capture.packing import pack_call
from sparkring.capture.picklability import ipython_names
from sparkring.capture.syntax import parsed
from sparkring.capture.unread_changes import changed_only
from sparkring.capture.versions import modules_of
from sparkring.checkpointing.compatibility import unnoticed
from sparkring.checkpointing.owners import owned
from sparkring.compat import legacy_keras
from sparkring.engine.doctor import preflight
from sparkring.engine.foreach.items import Items, Targets
from sparkring.engine.foreach.meaning import Meaning, meaning_of
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.foreach.plan import Plan, plan
from sparkring.engine.foreach.pool import Pool
from sparkring.engine.foreach.result import ForeachResult
from sparkring.engine.foreach.schedule import ItemAttempt, Schedule
from sparkring.engine.foreach.slot import SlotSettings
from sparkring.engine.run.environments import environment_notices, environment_rows, packed_environment
from sparkring.engine.run.options import Options
from sparkring.engine.run.prepare import (
    PROVIDED,
    capture_cell,
    code_notices,
    needs_legacy_keras,
    own_modules_for,
    refuse_lone,
    refuse_shared,
    run_started,
    validate,
)
from sparkring.engine.run.recorder import Recorder
from sparkring.engine.run.spec import Call, Cell, RunSpec, seed_of
from sparkring.errors import ItemsFailed, OptionsError, RunFailed, SlotsError, SparkringError
from sparkring.gangs.execution import Request
from sparkring.history import describe, events
from sparkring.history.view import View
from sparkring.launchers import open_launcher
from sparkring.launchers.base import LaunchRequest
from sparkring.runtime import report
from sparkring.runtime.interrupts import Interrupts, interrupted
from sparkring.runtime.kernel import tell
from sparkring.runtime.resume_point import Here
from sparkring.runtime.storage import root_for_ranks
from sparkring.wire import messages
from sparkring.wire.messages import Script
from sparkring.worker.rank.failures import as_failure

if TYPE_CHECKING:
    from sparkring.capture.environment import PackedEnvironment
    from sparkring.engine.foreach.kept import Kept

_RESULTS = "All results are in sparkring.last_result: .values, .errors, .table."


class ForeachSpec(NamedTuple):
    """What to run for each item of `iterable`, and with which options.

    `work` is a cell, whose `targets` are bound to the item, or a function, which is called with the item. `title` and
    `code` have the same meanings as in RunSpec, as does the `notice`.
    """

    work: Cell | Call
    iterable: Iterable[Any]
    options: ForeachOptions
    targets: Targets | None = None
    title: str = ""
    code: str | None = None
    notice: str = ""


class PreparedItems(NamedTuple):
    """A validated run that has not started. The `notices` are recorded when the run begins.

    `launches` contains a launch request for each slot. `total` is the total number of items, even if only the first
    one will run. With `stay`, ranks without an item stay up until all items have ended, because other ranks may use
    processes that these ranks have started. `noun` is what an item is called.
    """

    options: ForeachOptions
    items: Items
    work: messages.Work
    modules: frozenset[str]
    own_modules: messages.ModuleFiles | None
    code_imports: CodeImports
    launches: list[LaunchRequest]
    started: events.RunStarted
    notices: tuple[str, ...] = ()
    kept: Kept | None = None
    total: int | None = None
    stay: bool = False
    noun: str = "item"


def prepare(spec: ForeachSpec) -> PreparedItems:
    """Look up, check and pack what all items need. This calls iter() on the iterable, but takes no item from it.

    If the iterable is a grouped Spark DataFrame, Spark writes its rows to the cache.

    Raises CaptureError if something that the cell or the function reads is missing or cannot be sent, and TypeError if
    the function is not callable. If something else is wrong, OptionsError, CheckpointError or PathError is raised.
    """
    if report.connected():
        raise OptionsError(
            "foreach() was called on a rank, and cannot start processes from there: call it in the notebook, or use a "
            "loop."
        )
    options = spec.options
    if type(spec.iterable).__module__.startswith("pyspark."):
        from sparkring.data.parts import items_of  # imports pyarrow

        spec = spec._replace(iterable=items_of(spec.iterable))
    packed = _pack_cell(spec, spec.work) if isinstance(spec.work, Cell) else _pack_call(spec, spec.work)
    title, code = options.name or spec.title or packed.title, packed.code if spec.code is None else spec.code
    size = (1 if options.plan else options.at_once) * options.np_each
    modules = own_modules_for(options.place, spec.work, packed.modules)
    pack = packed_environment(options.place) if options.env_pack else None
    captured = (*packed.captured, *modules.table, *environment_rows(pack))
    started = run_started(options, title, code, size, options.framework, captured)
    kept = _kept(packed, options)
    total = packed.items.total
    if options.plan:
        packed.items.only_the_first()
    launches = _launches(options, title, pack)
    large = [name for name in packed.captured if (name.size_bytes or 0) > LARGE_BYTES]
    notices = tuple(describe.large_value(name.name, name.size_bytes or 0) for name in large)
    if isinstance(spec.work, Cell):
        lost = changed_only(parsed(spec.work.source), spec.work.namespace)
        notices += tuple(map(describe.unread_change, lost))
    names = [name.name for name in packed.captured]
    notices += tuple(code_notices(spec.work, names, packed.work.parts))
    if packed.meaning is not None and packed.meaning.incomparable:
        notices += (unnoticed(packed.meaning.incomparable),)
    notices += (*environment_notices(pack), *((spec.notice,) if spec.notice else ()))
    notices += tuple(preflight.notices(launches, options.framework))
    return PreparedItems(
        options,
        packed.items,
        _for_ranks(packed, options),
        packed.modules,
        modules.files,
        modules.imports,
        launches,
        started,
        (*notices, *modules.notices),
        kept,
        total,
    )


def _for_ranks(packed: _PackedItems, options: ForeachOptions) -> messages.Work:
    """Return the work with the environment that the options require."""
    environment, parts = packed.work.environment, packed.work.parts
    if needs_legacy_keras(options.framework, options.env, packed.code, packed.modules):
        environment = {legacy_keras.VARIABLE: "1", **environment}
    if options.gpus is not None:  # each process gets its own value of this variable, which names its GPUs
        environment = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    if options.background:  # copy the arrays: the notebook may change them before they have been sent to all ranks
        parts = tuple(map(bytes, parts))
    return packed.work._replace(environment=environment, parts=parts)


def _kept(packed: _PackedItems, options: ForeachOptions) -> Kept | None:
    """Open the directory of results, if there is one."""
    planned_search = options.plan and packed.items.steering is not None  # a plan does not change the study of a search
    if packed.meaning is None or planned_search:
        return None
    refuse_shared(options.checkpoint_dir)
    from sparkring.engine.foreach.kept import Kept  # imports NumPy

    fresh, keep = options.fresh or options.plan, options.keep_results
    kept = Kept(options.checkpoint_dir, packed.meaning, options.np_each, fresh=fresh, keep=keep)
    packed.items.key_of = kept.key_of
    return kept


def _launches(options: ForeachOptions, title: str, pack: PackedEnvironment | None) -> list[LaunchRequest]:
    """Return a launch request for each slot.

    On Spark, start a SparkSession if there is none. Raises LaunchError if the items could never run in Spark's tasks.
    """
    place = options.place
    launch = LaunchRequest(place, options.np_each, dict(options.env), title, environment_pack=pack)
    launches = place.pool_requests(launch, options.at_once, options.gpus)
    if place.here:
        return launches
    try:
        open_launcher(launches[0], tell)
    except SlotsError:
        if place.room(launches[0]):  # without executors, raise no error: the items wait for executors
            raise
    return launches


class _PackedItems(NamedTuple):
    """The items, and what all of them need. `title` and `code` are for the record.

    If results are kept, `meaning` says on which code and values they depend.
    """

    work: messages.Work
    modules: frozenset[str]
    captured: tuple[events.CapturedName, ...]
    items: Items
    title: str
    code: str
    meaning: Meaning | None


def _pack_cell(spec: ForeachSpec, cell: Cell) -> _PackedItems:
    options, namespace = spec.options, cell.namespace
    assert spec.targets is not None
    # If scripts depend on the item, it is not yet known which names they bind, so errors are raised later, per item.
    run_options = Options(-options.np_each, push=options.push, dry_run=cell.scripts_of is not None)
    run_spec = RunSpec(cell, run_options, options.framework, bound=spec.targets.names)
    captured = capture_cell(run_spec, cell, numbered=True)
    validate(((name.name, namespace.get(name.name)) for name in captured.names), cell.source, options.np_each)
    needed = {name.name: namespace.get(name.name) for name in captured.names if name.required}
    refuse_lone(needed, options.framework, options.np_each)
    work = messages.Work(
        messages.CellCode(cell.source, tuple(cell.scripts)),
        options.autolog,
        {**root_for_ranks(), **dict(options.env)},
        notebook_state.gather(),
        (captured.payload, *captured.buffers),
    )
    hidden = ipython_names(namespace, PROVIDED).union(spec.targets.names)

    def scripts_of(values: Mapping[str, Any]) -> tuple[tuple[Script, ...], list[str]]:
        """Return the scripts that only an item with these values runs, and the names that only these scripts read."""
        if cell.scripts_of is None:
            return (), []
        scripts = tuple(cell.scripts_of(values))
        of_item = run_spec._replace(options=Options(), bound=(*run_spec.bound, *captured.sent))
        read = capture_cell(of_item, cell._replace(scripts=scripts))
        return tuple(script for script in scripts if script not in cell.scripts), read.sent

    used = {name: namespace[name] for name in captured.sent}
    items = Items(spec.iterable, spec.targets, namespace, hidden.__contains__, scripts_of)
    items.share(captured.objects, used)
    modules = modules_of(namespace[name] for name in captured.sent)
    meaning = None
    if options.checkpoint_dir:
        sources = {
            "the cell": [cell.source],
            "the loop's variables": [f"for {spec.targets.written} in _: pass"],
            "the cell's scripts": [script.source for script in cell.scripts],
            "the seed": [f"{options.seed}"],
        }
        meaning = meaning_of(sources, used, namespace, hidden | captured.binds)
    return _PackedItems(work, modules, captured.table, items, f"foreach {spec.targets.written}", cell.source, meaning)


def _pack_call(spec: ForeachSpec, call: Call) -> _PackedItems:
    function = call.function
    if not callable(function):
        raise OptionsError(f"foreach() takes a function, not {type(function).__name__}: {CALLED}")
    check_call(function, (None,), {})
    namespace = getattr(sys.modules.get("__main__"), "__dict__", {})
    packed = pack_call(function, {}, namespace, numbered=True)
    work = messages.Work(
        messages.FunctionCall(),
        autolog=spec.options.autolog,
        environment={**root_for_ranks(), **dict(spec.options.env)},
        notebook=notebook_state.gather(),
        parts=(packed.payload, *packed.buffers),
    )
    (argument,) = names_of(function, (None,))
    items = Items(spec.iterable, None, namespace, ipython_names(namespace).__contains__, argument=argument)
    items.share(packed.objects, {"": function, **{name: namespace[name] for name in packed.carried}})
    captured = captured_call(function, {}, packed)
    meaning, name = None, name_of(function)
    if spec.options.checkpoint_dir:
        used = {name if name.isidentifier() else "the function": function}
        meaning = meaning_of({"the seed": [f"{spec.options.seed}"]}, used, namespace, ipython_names(namespace))
    return _PackedItems(work, modules_of((function,)), captured, items, name, source_of(function), meaning)


class ForeachRun:
    """A prepared run that is recorded and shown. to_the_end() carries it out, and `interrupts` can stop it.

    `result` is None until to_the_end() has returned or raised an error. `plan` is then the plan, if one was requested.
    `finish` is called with the items' values when all items have finished; if it raises an error, the run fails.
    `kept_words` is a sentence for error messages about the results of a run that did not finish. If it is empty, the
    messages mention `last_result`.
    """

    def __init__(self, prepared: PreparedItems, view: View, interrupts: Interrupts) -> None:
        self.prepared = prepared
        options, started = prepared.options, prepared.started
        noun = prepared.noun if prepared.items.steering is None else "trial"
        total = None if options.plan else prepared.total
        at_once = started.size // options.np_each
        up = None if options.place.here else 0
        planned = events.ItemsPlanned(started.time, at_once, options.np_each, total, up, noun)
        self.recorder = Recorder(view, started, prepared.notices, [planned])
        self.interrupts = interrupts
        self.result: ForeachResult | None = None
        self.plan: Plan | None = None
        self.kept_words = ""
        self.finish: Callable[[Mapping[int, Any]], object] = lambda values: None

    def to_the_end(self) -> ForeachResult:
        """Carry out the run, and return its result.

        Raises ItemsFailed if items failed, RunFailed if the iterable raised an error, LaunchError if processes cannot
        be started, and KeyboardInterrupt if the run was stopped.
        """
        pool, recorder, kept = self._pool(), self.recorder, self.prepared.kept
        with self.interrupts:
            try:
                with nullcontext() if kept is None else owned(kept.location, recorder.record.run_id):
                    pool.run()
                problem = self._error(pool)
                if problem is None:
                    self.finish(pool.values)
            except BaseException as error:  # of any type: it is raised again below, after the record has been closed
                problem = error
            ended = describe.items(recorder.record, over=True)
            if problem is None:
                recorder.close("finished", ended)
            elif isinstance(problem, KeyboardInterrupt):
                recorder.close("interrupted", ended)
            elif isinstance(problem, ItemsFailed):
                recorder.close("failed", ended)
            else:
                recorder.close("failed", str(problem) if isinstance(problem, SparkringError) else repr(problem))
        items = self.prepared.items
        study = None if items.steering is None else items.steering.study
        errors = dict(sorted(pool.failures.items()))
        self.result = ForeachResult(recorder.record, pool.values, errors, items.names, items.shown, pool.records, study)
        if isinstance(problem, RunFailed):
            problem.record = recorder.record
        if problem is not None:
            raise problem
        if self.prepared.options.plan:
            self.plan = self._planned(pool, self.result)
        return self.result

    def _planned(self, pool: Pool, result: ForeachResult) -> Plan:
        options, record = self.prepared.options, result.record
        if not pool.measured:
            raise OptionsError("there are no items, so there is nothing to plan.")
        assert record.items is not None
        wall_s = record.items.ended[-1].ended - record.started
        launch = self.prepared.launches[0]
        there = launch.place.item_room(launch, options.gpus)
        return plan(result, pool.measured, there, items=self.prepared.total, options=options, wall_s=wall_s)

    def _pool(self) -> Pool:
        options, launches, recorder = self.prepared.options, self.prepared.launches, self.recorder
        settings = SlotSettings(
            lambda slot: open_launcher(launches[slot], recorder.notice, patient=False),
            options.np_each,
            options.fresh_after,
            options.timeout_each_s,
            queues=not options.place.here,
            ahead=options.np_each == 1 and self.prepared.items.steering is None,
            folder=recorder.record.log_folder,
        )
        return Pool(
            self.prepared.items,
            Schedule(1 if options.plan else options.at_once, options.retries, fail_fast=options.fail_fast),
            settings,
            self._request_for,
            recorder,
            self.interrupts,
            self.prepared.kept,
            stay=self.prepared.stay,
        )

    def _request_for(self, attempt: ItemAttempt) -> Request:
        prepared, item = self.prepared, attempt.item
        seed = seed_of(prepared.options.seed, item.number)
        record, kept = self.recorder.record, prepared.kept
        here = Here(run_id=record.run_id) if kept is None else kept.here(item.key, record)
        what = messages.NextItem(item.scripts, seed, prepared.options.plan)
        run = messages.Run(what, checkpoints=here, parts=item.parts)
        request = Request(run, prepared.options.framework, prepared.modules | item.modules, work=prepared.work)
        return request._replace(own_modules=prepared.own_modules, code_imports=prepared.code_imports)

    def _error(self, pool: Pool) -> BaseException | None:
        """Return the error to raise now that the pool has ended; None if all items have finished."""
        record, values = self.recorder.record, pool.values
        if self.interrupts.seen:
            done = describe.items(record, over=True)
            return interrupted(f"{done}. {self.kept_words or 'Their results are in sparkring.last_result.'}")
        if pool.error is not None:
            failure = as_failure(pool.error)
            taken = describe.counted(self.prepared.items.taken, record.items.noun if record.items else "item")
            text = f"the iterable raised {failure.summary} after {taken}; the results are in sparkring.last_result."
            return RunFailed(f"{text}\n\n{failure.traceback}".rstrip(), record=record, values=values)
        if pool.failures:
            text = describe.explain_items(record, self.kept_words or _RESULTS)
            return ItemsFailed(text, record=record, values=values)
        return None
