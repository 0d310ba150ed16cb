"""Captures what a cell reads: finds the names, packs their values, and says which values cannot be sent.

`--dry-run` shows the result as a table.
"""

from __future__ import annotations

import builtins
import difflib
import itertools
import re
import types
from collections.abc import Collection, Container, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import sparkring
from sparkring.capture.names import BINDING, IMPLICIT, CellNames, global_names, names_read
from sparkring.capture.packing import Packed, PackedObjects, pack
from sparkring.capture.picklability import Namespace, Problem, by_reference, ipython_names, type_name, walk
from sparkring.capture.platform_names import INSTEAD_OF
from sparkring.capture.reducers.tensorflow import is_model
from sparkring.capture.remote_names import RemoteNames
from sparkring.capture.scripts import Script
from sparkring.capture.string_names import MARKS, names_in_hints, names_in_hints_of, names_in_strings
from sparkring.capture.submodules import imported_submodules
from sparkring.capture.syntax import parsed
from sparkring.errors import CaptureError
from sparkring.history.events import CapturedName

LARGE_BYTES = 10 * 1024**2  # the user is warned about larger values
NUMBERS_KEPT = 30  # of a dict's numbers


class Captured(NamedTuple):
    """What a cell takes from the notebook.

    names: one row for each name; first the names whose values cannot be sent, then the others, largest first.
    payload, buffers: the packed values, which `unpack_names` loads on the ranks.
    left_out: the rows of `names` whose values cannot be sent, but which the cell may not need.
    binds: the names that the cell binds if it runs to its end.
    scripts: the scripts that the cell runs; they are sent separately from the payload.
    uses: the names whose values on the ranks are needed to load the payload.
    objects: what is packed, for payloads that share it.
    """

    names: tuple[CapturedName, ...]
    payload: bytes
    left_out: tuple[CapturedName, ...]
    binds: frozenset[str] = frozenset()
    buffers: tuple[memoryview, ...] = ()
    scripts: tuple[CapturedName, ...] = ()
    uses: frozenset[str] = frozenset()
    objects: PackedObjects | None = None

    @property
    def table(self) -> tuple[CapturedName, ...]:
        """The rows for all values and scripts, including the values that cannot be sent."""
        return self.names + self.scripts

    @property
    def sent(self) -> list[str]:
        return [name.name for name in self.names if name.travels != "cannot"]

    @property
    def large(self) -> tuple[CapturedName, ...]:
        return tuple(name for name in self.names if (name.size_bytes or 0) > LARGE_BYTES)


_UNSEEN = "*"  # stands for names that a function may set, but that its code does not show
# A cell whose text contains one of these may bind names that its code does not show.
_HIDDEN = re.compile(r"__main__|sys\.modules|f_globals|(?<![.\w])eval\(")


class _Wanted(NamedTuple):
    required: bool
    line: int | None = None
    via: str | None = None


def capture(
    source: str,
    namespace: Namespace,
    *,
    provided: Collection[str] = (),
    reserved: Collection[str] = (),
    also: Collection[str] = (),
    held: RemoteNames | Container[str] = (),
    on_ranks: Collection[str] = (),
    scripts: Collection[Script] = (),
    pull: Collection[str] = (),
    dry_run: bool = False,
    numbered: bool = False,
) -> Captured:
    """Find the names in `namespace` that a cell reads or that its functions use, and pack their values.

    provided: names that a rank defines unless the notebook defines them.
    reserved: names that a rank always defines.
    also: names to send even if the cell does not read them.
    held: names whose values the ranks already have, so that they are not sent again.
    on_ranks: names that earlier cells have bound on the ranks.
    scripts: the scripts that the cell runs.
    numbered: whether later payloads are to share the objects of this one.
    pull: names whose values are wanted back from rank 0.

    Raises SyntaxError if the cell is not valid Python. Raises CaptureError for all names that are defined nowhere, and
    for names in `pull` that the ranks cannot have. If
    there are none, raises CaptureError for all names that the cell needs but whose values cannot be sent. With
    `dry_run`, CaptureError is not raised.
    """
    cell = names_read(source)
    for script in scripts:
        for _, part in script.parts:
            cell = cell.with_script(names_read(part), inside=script.inside)
    hidden = ipython_names(namespace, provided).union(reserved)
    wanted, written = _wanted(source, cell, namespace, hidden, also)
    submodules = imported_submodules(cell.chains, {name: namespace[name] for name in wanted}.get)

    def stays(name: str) -> bool:
        """Return whether the value of `name` stays in the notebook, even if a function that reads the name is sent."""
        return name in hidden or (name not in also and name in held)

    wanted = {name: want for name, want in wanted.items() if not stays(name)}
    missing = _missing(cell, {*namespace} - hidden, {*provided, *reserved, *written, *on_ranks}, also)
    if not (cell.star_imports or _UNSEEN in written or _HIDDEN.search(source)):
        on_rank_0 = {*wanted, *cell.bound, *provided, *reserved, *written, *on_ranks}
        missing += _missing_to_pull(pull, on_rank_0, namespace)
    if not dry_run:
        _raise(missing)

    values = {name: namespace[name] for name in sorted(wanted, key=lambda name: _packing_order(namespace[name]))}
    of_ranks = held if isinstance(held, RemoteNames) else None
    packed = pack(values, namespace, stays, bound=wanted, submodules=submodules, held=of_ranks, numbered=numbered)
    rebound = {name for name in packed.problems if name in wanted and wanted[name].via and name in cell.bound}
    if rebound:  # only functions use these names, and the cell itself binds them on the ranks, so they need not be sent
        hidden |= rebound
        values = {name: value for name, value in values.items() if name not in rebound}
        packed = pack(values, namespace, stays, bound=wanted, submodules=submodules, held=of_ranks, numbered=numbered)

    rows = [_row(name, value, wanted[name], packed.sizes.get(name), packed.problems.get(name))
            for name, value in values.items()]  # fmt: skip
    rows += [_row(name, namespace[name], _Wanted(False, via=dependency.via), dependency.size_bytes, dependency.problem)
             for name, dependency in packed.along.items()]  # fmt: skip
    rows += [_row(name, namespace[name], _Wanted(True), packed.changed.get(name), packed.problems.get(name))
             for name in {*packed.changed, *packed.problems} - values.keys()]  # fmt: skip
    rows.sort(key=lambda row: (row.size_bytes is not None, -(row.size_bytes or 0), row.name))
    cannot = [row for row in rows if row.travels == "cannot" and not row.via]
    if not dry_run:
        _raise(
            [_sentence(row, wanted[row.name].line if row.name in wanted else None) for row in cannot if row.required]
        )
    undefined = [CapturedName(name, "", None, "cannot", what, None, True) for _, name, what in missing]
    left_out = tuple(row for row in cannot if not row.required)
    files = tuple(map(_script_row, scripts))
    return Captured(
        (*undefined, *rows), packed.payload, left_out, cell.bound, packed.buffers, files, packed.uses, packed.objects
    )


def _wanted(
    source: str, cell: CellNames, namespace: Namespace, hidden: Collection[str], also: Collection[str]
) -> tuple[dict[str, _Wanted], set[str]]:
    """Return the notebook's names that the cell may use, except those in `hidden`.

    The second result holds the names that the notebook's functions set when the cell calls the functions.
    """
    wanted = {name: _Wanted(True, cell.required.get(name)) for name in (*also, *cell.required)}
    in_strings = names_in_strings(parsed(source), namespace) if MARKS.search(source) else []
    for name, line in (*cell.optional.items(), *in_strings):
        wanted.setdefault(name, _Wanted(False, line))
    for name in sorted(names_in_hints(source)):
        wanted.setdefault(name, _Wanted(False))
    wanted = {name: want for name, want in wanted.items() if name in namespace and name not in hidden}
    used, hints, written = _used_by(wanted, namespace)
    for name, via in (*hints.items(), *used.items()):
        if name not in hidden and name not in IMPLICIT and name not in wanted and via in wanted:
            wanted[name] = _Wanted(wanted[via].required and name in used, via=via)
    return wanted, written


def _script_row(script: Script) -> CapturedName:
    travels: Literal["by value", "by reference"] = "by reference" if script.module else "by value"
    size_bytes = None if script.module else len(script.source.encode())
    return CapturedName(script.title, "script", size_bytes, travels, None, None, True)


def _row(
    name: str, value: object, want: _Wanted, size_bytes: int | None, problem: Problem | None = None
) -> CapturedName:
    return CapturedName(
        name=name,
        type_name=type_name(value),
        size_bytes=size_bytes,
        travels="cannot" if problem else "by reference" if by_reference(value) else "by value",
        problem=problem.what if problem else None,
        advice=problem.advice if problem else None,
        required=want.required,
        via=want.via,
        numbers=_numbers(value),
    )


def _numbers(value: object) -> tuple[tuple[str, float], ...]:
    """Return the value if it is a number, or the numbers in a dict (CapturedName.numbers)."""
    pairs = value.items() if type(value) is dict else [("", value)]
    kept = ((key, number) for key, number in pairs if type(key) is str and type(number) in (int, float, bool))
    return tuple(itertools.islice(kept, NUMBERS_KEPT))  # type: ignore[arg-type]  # these types are numbers


def captured_call(
    function: object, kwargs: dict[str, Any], packed: Packed, args: Iterable[Any] = ()
) -> tuple[CapturedName, ...]:
    """Return the rows of the table for a function and its arguments, which pack_call() has packed as `packed`."""
    values = (function, *args, *kwargs.values())
    sizes = packed.sizes.items()
    return tuple(_row(name, value, _Wanted(True), size) for (name, size), value in zip(sizes, values, strict=True))


def _used_by(names: Iterable[str], namespace: Namespace) -> tuple[dict[str, str], dict[str, str], set[str]]:
    """Find the notebook's names that are used by the functions and annotations in the values of `names`.

    Return the names that the functions read, the names in string annotations, and the names that the functions
    set, with _UNSEEN if they may set others. The first two are dicts from each name to the name whose value uses it.
    """
    used: dict[str, str] = {}
    hints: dict[str, str] = {}
    written: set[str] = set()
    names = list(names)
    for name in names:
        for step in walk(namespace[name], limit=2_000):
            function = step.value
            if isinstance(function, types.FunctionType) and function.__globals__ is namespace:
                reads, writes = global_names(function.__code__)
                written |= set() if BINDING.isdisjoint(reads) else {_UNSEEN}
                used.update({read: name for read in reads if read in namespace and read not in used})
                written |= writes
            for hint in names_in_hints_of(step.value):
                if hint in namespace and hint not in hints and hint not in names:
                    hints[hint] = name
                    names.append(hint)  # so that the loop also finds the names that the value of `hint` uses
    return used, hints, written


def _packing_order(value: object) -> int:
    """Return the sort key for packing.

    Data comes first, so that its size is not counted as part of the size of a function that uses it. Models come before
    their layers, so that a model that cannot be sent does not keep its layers from being sent.
    """
    if is_model(value):
        return -1
    if isinstance(value, (type, types.FunctionType)):
        return 2
    return 0 if by_reference(type(value)) else 1


_Complaint: TypeAlias = tuple[int, str, str]  # line (0 if none), name, sentence for the user


def _missing(cell: CellNames, defined: set[str], later: set[str], also: Iterable[str]) -> list[_Complaint]:
    """Return a complaint for each name that is not defined anywhere when the cell needs it.

    `defined` are the notebook's names, and `later` the names that are defined on the ranks. `also` is as in capture().
    """
    missing = [(0, name, f"`{name}` should be sent to the ranks, but the notebook does not define it")
               for name in also if name not in defined]  # fmt: skip
    for name, line in () if cell.star_imports else cell.immediate.items():
        if name not in {*defined, *later, *vars(builtins)}:
            where = "which is defined neither in this cell nor in the notebook"
            if name in cell.bound:
                where = "before the cell assigns it, and the notebook does not define it"
            missing.append((line, name, f"cell line {line} reads `{name}`, {where}"))
    known = {*defined, *later, *cell.bound, *vars(builtins)}
    return [(line, name, f"{what}.{_hint(name, known)}") for line, name, what in sorted(missing)]


def _missing_to_pull(pull: Iterable[str], on_rank_0: set[str], namespace: Namespace) -> list[_Complaint]:
    """Return a complaint for each name to pull that rank 0 will not have at the end of the cell."""
    missing = [name for name in pull if name not in on_rank_0]
    uses = {name: "neither assigns nor uses" if name in namespace else "does not assign" for name in missing}
    return [(0, name, f"--pull {name}: the cell {uses[name]} `{name}`.{_hint(name, on_rank_0)}") for name in missing]


def _hint(name: str, known: set[str]) -> str:
    """Return a sentence that suggests what an undefined name may mean, or "" if there is nothing to suggest."""
    if name in INSTEAD_OF:
        return f" {INSTEAD_OF[name]}"
    if name == "sparkring":
        return " Add `import sparkring` to the cell."
    if name in sparkring.__all__:
        return f" Add `from sparkring import {name}` to the cell."
    near = difflib.get_close_matches(name, known - {name}, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def _sentence(row: CapturedName, line: int | None) -> _Complaint:
    reads = f"cell line {line} reads `{row.name}`" if line else f"`{row.name}` should be sent to the ranks"
    return line or 0, row.name, f"{reads}, which cannot be sent to the ranks: {row.problem}; {row.advice}."


def _raise(complaints: list[_Complaint]) -> None:
    if complaints:
        lines, _, sentences = zip(*sorted(complaints), strict=True)
        raise CaptureError("\n".join(sentences), line=next(filter(None, lines), None))
