"""Prepares a run: checks everything that can fail before the launch, and packs what is sent to the ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.capture import mount_paths, notebook_state, own_modules, packages, set_attributes
from sparkring.capture.calls import CALLED, check_call, name_of, names_of, source_of
from sparkring.capture.cell import LARGE_BYTES, Captured, capture, captured_call
from sparkring.capture.names import method_calls, names_read
from sparkring.capture.packages import CodeImports
from sparkring.capture.packing import pack_call
from sparkring.capture.picklability import Namespace, ipython_names
from sparkring.capture.versions import modules_of, versions
from sparkring.checkpointing.compatibility import unnoticed
from sparkring.compat import legacy_keras
from sparkring.engine.doctor import preflight
from sparkring.engine.run import background
from sparkring.engine.run.environments import (
    environment_estimate,
    environment_notices,
    environment_rows,
    packed_environment,
)
from sparkring.engine.run.options import Options, SharedOptions
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Call, Cell, RunSpec
from sparkring.errors import CaptureError, CheckpointError, OptionsError
from sparkring.frameworks import FRAMEWORKS
from sparkring.gangs.execution import Request
from sparkring.history import describe, events, run_store
from sparkring.launchers import open_launcher
from sparkring.launchers.base import LaunchRequest, Place
from sparkring.runtime.kernel import tell
from sparkring.runtime.storage import locate, protocols, root_for_ranks
from sparkring.wire.messages import Buffers, CellCode, FunctionCall, ModuleFiles, Run

if TYPE_CHECKING:
    from sparkring.checkpointing.directory import CheckpointDirectory
    from sparkring.cluster.partitions import Data
    from sparkring.engine.run.warm_gang import WarmGang

# Names that ranks have unless the notebook defines them. `exit` and `quit` are listed because IPython hides the
# builtins with these names, so they are not found among the kernel's builtins.
PROVIDED = ("rank", "size", "local_rank", "get_ipython", "display", "displayHTML", "exit", "quit")


class PreparedRun(NamedTuple):
    """A validated run that has not started.

    `launch` says what to start if the run has ranks of its own. Otherwise, the run uses the `ranks` of `gang`.
    `directory` is the directory of checkpoints, or None. `started` is the first event of the run's record, and the
    `notices` are recorded after it. `on_result` is called with the result.
    """

    options: Options
    request: Request
    launch: LaunchRequest
    started: events.RunStarted
    notices: tuple[str, ...] = ()
    directory: CheckpointDirectory | None = None
    gang: WarmGang | None = None
    ranks: tuple[int, ...] = ()
    on_result: Callable[[RunResult], None] = lambda result: None


class Uses(NamedTuple):
    """The digests of the values and functions that a run uses, by name, and the names that cannot be compared."""

    parts: Mapping[str, str] = {}
    incomparable: Sequence[str] = ()


class _Packed(NamedTuple):
    """What a cell or a call needs: the request, the names that are sent, and the sizes of large values."""

    request: Request
    captured: tuple[events.CapturedName, ...]
    large: dict[str, int]
    values: list[tuple[str, Any]]  # pairs of a name in the notebook ('' for an argument) and its value
    title: str
    code: str
    scripts: tuple[str, ...] = ()  # sources of the cell's scripts; for checkpoints, they are part of the cell's code
    uses: Uses = Uses()
    data: Data | None = None
    on_result: Callable[[RunResult], None] = lambda result: None


def prepare(spec: RunSpec) -> PreparedRun:
    """Look up, check and pack what a run needs.

    Raises CaptureError if something that the cell or the function reads is missing or cannot be sent. If something else
    is wrong, OptionsError, CheckpointError, PathError or LaunchError is raised.
    """
    packed = _pack_cell(spec, spec.work) if isinstance(spec.work, Cell) else _pack_call(spec, spec.work)
    options, request = spec.options, packed.request
    if packed.data is not None:
        options = replace(options, np=options.np or packed.data.ranks())
    code = packed.request.run.what
    validate(packed.values, code.source if isinstance(code, CellCode) else "", options.size)
    takes_every_slot = not options.np
    if takes_every_slot:
        options = replace(options, np=options.place.every_slot())
    size = options.size
    directory = _open_directory(options, size, packed)
    here = spec.framework != "barrier"
    pack = packed_environment(options.place) if options.env_pack else None
    launch = LaunchRequest(options.place, size, dict(options.env), packed.title, options.gpus, packed.data, here)
    launch = launch._replace(environment_pack=pack)
    if options.background or (options.survives and not options.place.here):
        # The run opens its own launchers. Open one here, too, so that errors are raised at once. This is the main
        # thread, where a new SparkSession can be made, and where an interrupt ends the wait for an executor.
        open_launcher(launch, tell)
    if options.background:
        # The parts share memory with the notebook's arrays, which the notebook may change before the parts are sent, at
        # the start or at a restart. So copy the parts now.
        request = request._replace(run=request.run._replace(parts=tuple(map(bytes, request.run.parts))))
    legacy = needs_legacy_keras(spec.framework, options.env, packed.code, request.modules)
    if legacy:
        environment = {legacy_keras.VARIABLE: "1", **request.run.environment}
        request = request._replace(run=request.run._replace(environment=environment))
    modules = own_modules_for(options.place, spec.work, request.modules)
    request = request._replace(own_modules=modules.files, code_imports=modules.imports)
    captured = (*packed.captured, *modules.table, *environment_rows(pack))
    started = run_started(options, packed.title, packed.code, size, spec.framework, captured)
    started = started._replace(logs=options.logs, ranks=tuple(spec.ranks), warm=spec.gang is not None)
    notices = (
        [f"-n 0 (every task slot, {size} here) is deprecated: give the number of ranks"] if takes_every_slot else []
    )
    notices += [describe.large_value(name, size_bytes) for name, size_bytes in packed.large.items()]
    notices += [unnoticed(packed.uses.incomparable)] if packed.uses.incomparable else []
    notices += [spec.notice] if spec.notice else []
    notices += environment_notices(pack)
    notices += spec.gang.held.notices if spec.gang is not None else []
    notices += [legacy_keras.NOTICE] if legacy else []
    notices += [*code_notices(spec.work, request.sent, request.run.parts), *modules.notices]
    notices += [] if spec.gang is not None else preflight.notices([launch], spec.framework)
    return PreparedRun(
        options, request, launch, started, tuple(notices), directory, spec.gang, tuple(spec.ranks), packed.on_result
    )


def run_started(
    options: SharedOptions, title: str, code: str, size: int, framework: str, captured: tuple[events.CapturedName, ...]
) -> events.RunStarted:
    """Return the first event of the record of a run that begins now."""
    kept, place = captured[: events.CAPTURED_KEPT], options.place.name
    directory = locate(options.checkpoint_dir).anchored().written if options.checkpoint_dir else ""
    started = events.RunStarted(time.time(), run_store.new_id(), title, code, size, place, framework, "all")
    return started._replace(checkpoint_dir=directory, captured=kept, versions=versions(), notify=options.notify)


def needs_legacy_keras(framework: str, env: Iterable[tuple[str, str]], code: str, modules: Collection[str]) -> bool:
    """Whether to set the variable that makes the ranks use Keras 2.

    The variable is needed if the ranks run Horovod and `code` or `modules` use Keras 2, unless the notebook's
    environment or `env` already has the variable.
    """
    return (
        framework == "horovod"
        and legacy_keras.VARIABLE not in {**os.environ, **dict(env)}
        and legacy_keras.is_used(code, modules)
    )


# ── What is sent ──────────────────────────────────────────────────────────────


def capture_cell(spec: RunSpec, cell: Cell, *, numbered: bool = False) -> Captured:
    """Return what `cell` needs from the notebook, except what the ranks of a warm gang already have."""
    gang = spec.gang
    try:
        return capture(
            cell.source,
            cell.namespace,
            provided=PROVIDED,
            reserved=(*FRAMEWORKS[spec.framework].reserved, *spec.bound),
            also=spec.options.push,
            held=gang.held.beside(cell.namespace, _taking_part(spec)) if gang else (),
            on_ranks=gang.held.names if gang else (),
            scripts=cell.scripts,
            pull=() if cell.apart else spec.options.pull,  # the ranks know which variables they have
            dry_run=spec.options.dry_run,
            numbered=numbered,
        )
    except CaptureError as error:
        if gang and gang.news:  # the news may explain why a name is missing: its value was on ranks that have been lost
            raise CaptureError("\n".join([str(error), *gang.news]), line=error.line) from None
        raise


def _pack_cell(spec: RunSpec, cell: Cell) -> _Packed:
    options, gang, namespace = spec.options, spec.gang, cell.namespace
    captured = capture_cell(spec, cell)
    needed = {name.name: namespace.get(name.name) for name in captured.names if name.required}
    refuse_lone(needed, spec.framework, options.size)
    if gang is not None and cell.apart:  # later cells compare what the ranks have with the notebook's own variables
        gang.held.beside(_main(), _taking_part(spec))
    run = Run(
        CellCode(cell.source, tuple(cell.scripts)),
        options.pull,
        options.autolog,
        post_mortem=options.pm,
        traces=bool(options.trace),
        environment={**root_for_ranks(), **dict(gang.wanted.env if gang else ()), **dict(options.env)},
        notebook=notebook_state.gather(),
        parts=(captured.payload, *captured.buffers),
        stops_on_nan=bool(options.stop_on),
        grace_s=options.grace_s,
        profile=options.profile,
    )
    modules = modules_of(namespace[name] for name in captured.sent)
    data = None
    if options.data:
        from sparkring.cluster.partitions import find_data

        frames = namespace if spec.frame is None else {options.data: spec.frame}
        data = find_data(options.data, frames, counted=not options.np)

    def on_result(result: RunResult) -> None:
        namespace.update(result.pulled)
        if gang is not None:
            # The notebook now has the pulled values, so they do not count as newer than those of the ranks.
            ours = set() if cell.apart else {*result.pulled}
            gang.held.kept(captured.binds - ours, _taking_part(spec), sent=False)
            gang.held.kept(ours, _taking_part(spec), sent=True)

    return _Packed(
        Request(run, spec.framework, modules, tuple(captured.sent), options.timeline, uses=captured.uses),
        captured.table,
        {name.name: name.size_bytes or 0 for name in captured.large},
        [(name.name, namespace.get(name.name)) for name in captured.names],
        spec.title,
        spec.code or "",
        tuple(script.source for script in cell.scripts),
        uses_of(used_by(cell, captured, gang), namespace) if options.checkpoint_dir else Uses(),
        data,
        on_result,
    )


def _pack_call(spec: RunSpec, call: Call) -> _Packed:
    function, args, kwargs = call.function, call.args, dict(call.kwargs)
    if not callable(function):
        raise OptionsError(f"run() takes a function, not {type(function).__name__}: {CALLED}")
    check_call(function, args, kwargs)
    gang, namespace = spec.gang, _main()
    title = spec.title or name_of(function)
    held = gang.held.beside(namespace, _taking_part(spec)) if gang else None
    packed = pack_call(function, kwargs, namespace, args, held)
    arguments = {**dict(zip(names_of(function, args), args, strict=True)), **kwargs}
    used = {name: namespace.get(name) for name in packed.carried}
    refuse_lone({**used, **arguments}, spec.framework, spec.options.size)
    run = Run(
        FunctionCall(),
        autolog=spec.options.autolog,
        post_mortem=spec.options.pm,
        traces=bool(spec.options.trace),
        environment={**root_for_ranks(), **dict(gang.wanted.env if gang else ())},
        notebook=notebook_state.gather(),
        parts=(packed.payload, *packed.buffers),
        stops_on_nan=bool(spec.options.stop_on),
        grace_s=spec.options.grace_s,
        profile=spec.options.profile,
    )
    modules = modules_of((function, *args, *kwargs.values()))
    size_bytes = len(packed.payload) + sum(buffer.nbytes for buffer in packed.buffers)
    return _Packed(
        Request(
            run,
            spec.framework,
            modules,
            (*packed.carried, *packed.changed),
            spec.options.timeline,
            imports=call.imports,
        ),
        captured_call(function, kwargs, packed, args),
        {title: size_bytes} if size_bytes > LARGE_BYTES else {},
        [("", value) for value in (*args, *kwargs.values())],
        title,
        source_of(function) if spec.code is None else spec.code,
        uses=uses_of({name_of(function): function, **arguments}, namespace) if spec.options.checkpoint_dir else Uses(),
    )


def _main() -> dict[str, Any]:
    """Return the variables of the notebook or program."""
    return vars(sys.modules["__main__"])


def code_notices(work: Cell | Call, names: Iterable[str], parts: Buffers) -> list[str]:
    """Return notices about what the code will not find on the ranks.

    These are paths below /dbfs where there is no such mount, and attributes that the notebook has set in modules.
    `names` are the names whose values are sent, and `parts` contain these values.
    """
    sources, namespace, names = _sources(work), work.namespace if isinstance(work, Cell) else _main(), list(names)
    notices = mount_paths.notices(sources, {name: namespace.get(name) for name in names}, bytes(parts[0]))
    return notices + set_attributes.notices(sources, names, namespace)


def _sources(work: Cell | Call) -> list[str]:
    """Return the code of a cell and of its scripts, or of a function."""
    if isinstance(work, Cell):
        return [work.source, *(script.source for script in work.scripts)]
    return [source_of(work.function)]


class ModulesToSend(NamedTuple):
    """The user's own modules: the message for the ranks, rows for the table of what is sent, and notices.

    `imports` are the modules that the code imports, there or in the user's modules.
    """

    files: ModuleFiles | None = None
    imports: CodeImports = CodeImports()
    table: tuple[events.CapturedName, ...] = ()
    notices: tuple[str, ...] = ()


def own_modules_for(place: Place, work: Cell | Call, used: frozenset[str] = frozenset()) -> ModulesToSend:
    """Return the user's own modules that the notebook has imported, or that its cells and `work` import.

    Ranks on this machine need none, because they import the notebook's files. `used` are modules that values need.
    """
    if place.here:
        return ModulesToSend()
    sources = _sources(work)
    modules = own_modules.own_modules(sources)
    rows = (
        events.CapturedName(
            module.title,
            "your module",
            None if module.problem else module.size_bytes,
            "cannot" if module.problem else "by value",
            module.problem or None,
        )
        for module in modules
    )
    needed = packages.needed(work.source) if isinstance(work, Cell) else frozenset()
    imports = CodeImports(own_modules.imports(modules, sources) | used, needed)
    problems = own_modules.problems(modules, sources)
    return ModulesToSend(own_modules.packed(modules), imports, tuple(rows), tuple(problems))


def sent_with(spec: RunSpec, cell: Cell, place: Place) -> tuple[events.CapturedName, ...]:
    """Return what --dry-run shows: what is sent to the ranks at `place`."""
    rows = (*capture_cell(spec, cell).table, *own_modules_for(place, cell).table)
    rows += environment_estimate(place) if spec.options.env_pack else ()
    return rows


def _taking_part(spec: RunSpec) -> Iterable[int]:
    return spec.ranks or range(spec.options.size)


def validate(values: Iterable[tuple[str, Any]], source: str, size: int) -> None:
    """Call `__sparkring_validate__()` on the values that have this method.

    The method raises an error if the value does not support `size` ranks, or does not support a method that the cell
    calls on the value.
    """
    for name, value in values:
        validate_value = getattr(type(value), "__sparkring_validate__", None)
        if validate_value is not None and size:
            validate_value(value, size, method_calls(source, name) if name else ())


# Lightning's objects find out about the ranks when they are made.
_LONE = {
    ("lightning", "Trainer"),
    ("lightning", "Fabric"),
    ("pytorch_lightning", "Trainer"),
    ("lightning_fabric", "Fabric"),
}


def refuse_lone(values: Mapping[str, Any], framework: str, size: int) -> None:
    """Raise CaptureError if ranks of torch.distributed would use one of Lightning's objects that the notebook has made.

    Where the object was made, there was one process. So each rank would train alone, without an error.
    """
    if framework != "torch" or size == 1:
        return
    for name, value in values.items():
        for base in type(value).__mro__:
            if (base.__module__.partition(".")[0], base.__name__) in _LONE:
                raise CaptureError(
                    f"`{name}` is a Lightning {base.__name__} that was made in the notebook, where there is only one "
                    "process. Each rank would train alone: make it in the cell, or in a function that the cell calls."
                )


# ── Checkpoints ───────────────────────────────────────────────────────────────


def _open_directory(options: Options, size: int, packed: _Packed) -> CheckpointDirectory | None:
    """Return the checkpoint directory, with the checkpoint to continue from; None if the run has no such directory.

    Raises CheckpointError if the run cannot use the directory, and PathError if its path is invalid.
    """
    if not options.checkpoint_dir:
        return None
    check_directory(options.checkpoint_dir)
    from sparkring.checkpointing.directory import open_directory
    from sparkring.checkpointing.parts import versions as versions_of

    data = versions_of([value for _, value in packed.values if hasattr(type(value), "__sparkring_validate__")])
    code = "\n".join([packed.code, *packed.scripts])
    return open_directory(
        options.checkpoint_dir, size, code, data, packed.uses.parts, fresh=options.fresh, resume=options.resume
    )


def used_by(cell: Cell, captured: Captured, gang: WarmGang | None) -> dict[str, Any]:
    """Return the notebook's values that a cell uses: those that are sent, and those that ranks have copies of."""
    names = set(captured.sent)
    if gang is not None:
        read = names_read(cell.source)
        names |= gang.held.copies({*read.required, *read.optional})
    return {name: cell.namespace[name] for name in names}


def uses_of(used: Mapping[str, Any], namespace: Namespace) -> Uses:
    """Return digests of the values in `used`, and of what these use from the notebook.

    The weights of models do not count, because ranks restore them.
    """
    from sparkring.capture.content import PYTHON, Contents

    hidden = ipython_names(namespace, PROVIDED)
    parts, incomparable = Contents(namespace, hidden, weights=False).parts(used)
    return Uses({"": PYTHON, **parts}, incomparable)


def check_directory(directory: str) -> None:
    """Raise CheckpointError if ranks cannot save to `directory`, or if a background run saves to it."""
    if "memory" in protocols(locate(directory).fs):
        raise CheckpointError(
            f"{directory} is in the memory of a single process, so the checkpoints would be lost with the rank that "
            "saves them. Use a directory that the kernel and all ranks can reach."
        )
    refuse_shared(directory)


def refuse_shared(directory: str) -> None:
    """Raise CheckpointError if a background run saves to `directory`, even if that run spells the path differently."""
    location = locate(directory)
    other = next((run for run in background.going() if run.saves_in(location)), None)
    if other is not None:
        raise CheckpointError(
            f"{directory} is in use by run {other.run_id}, which is running in the background: wait for it, stop it "
            f"(%runs --stop {other.run_id}), or use another directory."
        )
