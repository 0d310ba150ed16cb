"""Finds which of the notebook's names a cell reads, without running the cell.

The compiled code shows which names each statement reads and binds, in which order and in which scope. Statements are
analysed in the order in which they run, so a name that the cell has already bound is not taken from the notebook.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import inspect
import re
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from sparkring.capture.syntax import parsed

# ── Which module-level names a piece of code uses ────────────────────────────────────────────────────────────────────


class GlobalNames(NamedTuple):
    """The module-level names that a code object and all code inside it read (`reads`: name → line) and write."""

    reads: dict[str, int]
    writes: set[str]


def instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Yield the instructions of `code`, each with its source line."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        # Python 3.13 moved the line to `line_number` and made `starts_line` a bool.
        line = getattr(instruction, "line_number", instruction.starts_line) or line
        yield instruction, line


def global_names(code: types.CodeType) -> GlobalNames:
    """Find the module-level names that a function's or class body's code, or any code inside it, reads and writes."""
    reads: dict[str, int] = {}
    writes: set[str] = set()
    own: set[str] = set()  # in a class body: the names that it has bound so far
    for instruction, line in instructions(code):
        match instruction.opname:
            case "LOAD_GLOBAL":
                reads.setdefault(instruction.argval, line)
            case "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS" if instruction.argval not in own:
                reads.setdefault(instruction.argval, line)
            case "STORE_NAME":
                own.add(instruction.argval)
            case "STORE_GLOBAL":
                writes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = global_names(constant)
            reads = {**inner.reads, **reads}
            writes |= inner.writes
    return GlobalNames(reads, writes)


_OUTER_NAMES = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS",
                "LOAD_FROM_DICT_OR_DEREF"}  # fmt: skip


def attribute_chains(code: types.CodeType) -> set[tuple[str, ...]]:
    """Find the attribute chains in code and all code inside it: `("a", "b", "c")` for `a.b.c`."""
    chains: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction, _ in instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, instruction.argval)
            chains.add(chain)
        elif instruction.opname != "EXTENDED_ARG":
            chain = (instruction.argval,) if instruction.opname in _OUTER_NAMES else ()
    return chains.union(
        *(attribute_chains(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    )


# ── Which names a cell reads ─────────────────────────────────────────────────────────────────────────────────────────


class MethodCall(NamedTuple):
    """A method call in a cell.

    `arguments` has one item for each positional argument: the value of a constant, or None for any other expression.
    """

    method: str
    arguments: tuple[Any, ...]


def method_calls(source: str, name: str) -> list[MethodCall]:
    """Find a cell's calls to methods of the notebook's object `name`. Return [] if the cell binds the name."""
    nodes = list(ast.walk(parsed(source)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    if name in bound:
        return []
    return [
        MethodCall(
            node.func.attr,
            tuple(argument.value if isinstance(argument, ast.Constant) else None for argument in node.args),
        )
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == name
    ]


class CellNames(NamedTuple):
    """The names that a cell reads from the notebook, and the names that it binds.

    Each name that is read is mapped to the first line that reads it, or to 0 if a script reads it. The names of
    builtins are included, since the notebook may have redefined them.

    required: names that the cell has not bound when it reads them.
    optional: names that the cell may have bound when it reads them, and names whose NameError it catches.
    immediate: the names of `required` that are read outside functions, in code where no NameError is caught.
    bound: every name that the cell may bind at its top level.
    star_imports: whether the cell may bind names that its text does not show (`import *`, `exec`, `globals()`, `%run`).
    chains: the attribute chains of the cell's code, from attribute_chains().
    """

    required: dict[str, int]
    optional: dict[str, int]
    immediate: dict[str, int]
    bound: frozenset[str]
    star_imports: bool
    chains: frozenset[tuple[str, ...]]

    def with_script(self, script: CellNames, *, inside: bool) -> CellNames:
        """Return these names together with the names of a script that the cell runs.

        With `inside`, the script runs in the cell's namespace, so its reads count as the cell's. Otherwise, it runs in
        a namespace of its own.
        """
        required = {name: line for name, line in self.required.items() if name not in script.bound}
        optional = {**self.optional, **self.required}
        for name in {**script.required, **script.optional} if inside else ():
            certain = name in script.required and name not in self.bound
            (required if certain else optional).setdefault(name, 0)
        optional = {name: line for name, line in optional.items() if name not in required}
        return self._replace(required=required, optional=optional, bound=self.bound | script.bound)


# The names that are bound on every path to a statement, or None if no path leads to the statement.
_Known: TypeAlias = frozenset[str] | None

IMPLICIT = {"__name__", "__doc__", "__file__", "__builtins__", "__annotations__", "__package__", "__spec__",
             "__loader__", "__debug__", "__path__", "_exit_code"}  # fmt: skip
BINDING = {"exec", "globals", "locals", "vars"}  # builtins that may bind names which the code does not show
_UNSEEN = {*BINDING, "run_line_magic", "run_cell_magic", "run_cell"}
_PLACE = re.compile(r"\$([A-Za-z_]\w*)|\{([^{}]*)\}")  # parts of a command that IPython replaces with values
CELL = "<cell>"  # the file name that the compiler's errors show
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def names_read(source: str) -> CellNames:
    """Find the names that a cell reads before it has bound them itself.

    `source` is Python, already transformed by IPython; line numbers are those in `source`. Raises SyntaxError.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statements are compiled several times, and the compiler would warn each time
        tree = ast.parse(source, CELL)
        reader = _CellReader(tree)
        reader.block(tree.body, frozenset())
        for name, line in _in_commands(tree):
            reader.optional.setdefault(name, line)
    required = {name: line for name, line in reader.required.items() if name not in IMPLICIT}
    optional = {name: line for name, line in reader.optional.items() if name not in (required.keys() | IMPLICIT)}
    immediate = {name: line for name, line in reader.immediate.items() if name in required}
    bound = frozenset(reader.bound - IMPLICIT)
    return CellNames(required, optional, immediate, bound, reader.unseen, frozenset(reader.chains))


class _CellReader:
    """Analyses definite assignment on every path through a cell.

    Most methods analyse a piece of code. They take `known`, the names that are certainly bound before the code runs,
    and return the names that are certainly bound after it.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for alias in (alias for node in imports if node.module == "__future__" for alias in node.names):
            self.flags |= getattr(__future__, alias.name).compiler_flag
        self.unseen = any(node.names[0].name == "*" for node in imports)
        self.required: dict[str, int] = {}
        self.optional: dict[str, int] = {}
        self.immediate: dict[str, int] = {}
        self.guards = 0  # how many blocks around the current statement catch a NameError
        self.bodies: dict[str, dict[str, int]] = {}  # function or class → the names that its code reads, with lines
        self.bound: set[str] = set()
        self.possible: set[str] = set()  # names bound by statements that may already have run
        whole = self.compile(tree.body)
        self.chains = attribute_chains(whole)
        self._survey(whole, top=True)

    def _survey(self, code: types.CodeType, *, top: bool) -> None:
        """Record the names that the cell binds and that its functions read, before any statement is analysed."""
        for instruction, _ in instructions(code):
            if instruction.opname == "STORE_GLOBAL" or (top and instruction.opname == "STORE_NAME"):
                self.bound.add(instruction.argval)
                if not top:  # the name is bound by a function, which may run at any time
                    self.possible.add(instruction.argval)
        self.unseen |= not _UNSEEN.isdisjoint(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                reads = self.bodies.setdefault(constant.co_name, {})
                reads.update({**global_names(constant).reads, **reads})
                self._survey(constant, top=False)

    def block(self, statements: Iterable[ast.stmt], known: _Known) -> _Known:
        for statement in statements:
            if known is None:
                break
            known = self.statement(statement, known)
        return known

    def statement(self, node: ast.stmt, known: frozenset[str]) -> _Known:
        """Analyse a statement. A compound statement is analysed part by part, any other by its compiled code."""
        if isinstance(node, _TRIES):
            return self.try_(node, known)
        match node:
            case ast.If(test, body, orelse):
                known = self.expression(test, known)
                if isinstance(test, ast.Constant):
                    return self.block(body if test.value else orelse, known)
                return _either(self.block(body, known), self.block(orelse, known))
            case ast.While(test, body, orelse):
                self.expression(test, known)  # the first test, before the loop has bound anything
                known = self.expression(test, self.before_loop(node, known))
                self.block(body, known)
                self.block(orelse, known)
                return known
            case ast.For(target, iter_, body, orelse) | ast.AsyncFor(target, iter_, body, orelse):
                known = self.before_loop(node, self.expression(iter_, known))
                self.block(body, self.assignment(target, known))
                self.block(orelse, known)
                return known
            case ast.With(items, body) | ast.AsyncWith(items, body):
                for item in items:
                    known = self.expression(item.context_expr, known)
                    if item.optional_vars:
                        known = self.assignment(item.optional_vars, known)
                suppresses = any("suppress" in ast.unparse(item.context_expr) for item in items)
                after = self.guarded(body, known, suppresses)
                # Any context manager may catch an exception that the block raises, as pytest.raises() does.
                return known - _unbound(body) if suppresses or after is None else after
            case ast.Match(subject, cases):
                return self.match(self.expression(subject, known), cases)
            case ast.Break() | ast.Continue():
                # The rest of the block does not run. Names that a loop binds never count as known after the loop.
                return None
            case ast.Raise():
                self.run(node, known)
                return None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                # A function's body runs only when the function is called. So the names that the body reads are recorded
                # where the name of the function or class is read. But a decorator may call the function at once, so the
                # names that a decorated function reads are recorded here.
                return self.run(node, known, deferred=not node.decorator_list)
        return self.run(node, known)

    def try_(self, node: ast.Try, known: frozenset[str]) -> _Known:
        # A handler may start after any part of the body, so it can rely only on names that are bound before the `try`.
        broken = known - _unbound(node.body)
        after = self.guarded(node.body, known, any(map(_catches_name_error, node.handlers)))
        after = self.block(node.orelse, after)
        for handler in node.handlers:
            inside = self.expression(handler.type, broken) if handler.type else broken
            self.possible |= {handler.name} if handler.name else set()
            caught = self.block(handler.body, inside | {handler.name} if handler.name else inside)
            after = _either(after, caught - {handler.name} if caught is not None and handler.name else caught)
        if not node.finalbody:
            return after
        last = self.block(node.finalbody, known - _unbound([node]))
        return None if after is None or last is None else (after | last) - _unbound(node.finalbody)

    def guarded(self, body: list[ast.stmt], known: frozenset[str], catches: bool) -> _Known:
        """Analyse statements. `catches` says whether a NameError in them is caught."""
        self.guards += catches
        after = self.block(body, known)
        self.guards -= catches
        return after

    def match(self, known: frozenset[str], cases: list[ast.match_case]) -> _Known:
        """Analyse the cases of a `match` statement whose subject has been analysed."""
        last = cases[-1]
        catch_all = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        after = None if catch_all else known
        for case in cases:
            tried = ast.match_case(case.pattern, case.guard, [ast.Pass()])
            self.run(ast.Match(ast.Constant(None), [tried]), known)
            parts = list(ast.walk(case.pattern))
            names = {name for part in parts for key in ("name", "rest") if (name := getattr(part, key, None))}
            after = _either(after, self.block(case.body, known | names))
        return after

    def before_loop(self, node: ast.stmt, known: frozenset[str]) -> frozenset[str]:
        """Return the names that are known to be bound in every iteration of a loop, not only in the first."""
        # An iteration may read names that the previous iteration bound, so all names that the loop binds are added to
        # `possible`. To find these names, the loop is compiled. It is inside a `while`, because the `else` of the loop
        # may contain a `break` of an outer loop.
        code = self.compile([ast.While(ast.Constant(True), [node], [])])
        self.possible |= {
            instruction.argval for instruction, _ in instructions(code) if instruction.opname == "STORE_NAME"
        }
        return known - _unbound([node])

    def expression(self, node: ast.expr, known: frozenset[str]) -> frozenset[str]:
        return self.run(ast.Expr(node), known)

    def assignment(self, target: ast.expr, known: frozenset[str]) -> frozenset[str]:
        """Analyse the assignment to the target of a statement such as `for` or `with`."""
        return self.run(ast.Assign([target], ast.Constant(None)), known)

    def run(self, node: ast.stmt, known: frozenset[str], *, deferred: bool = False) -> frozenset[str]:
        """Compile a statement, and analyse its code."""
        return self.code(self.compile([node]), known, deferred=deferred)

    def compile(self, body: list[ast.stmt]) -> types.CodeType:
        module = ast.fix_missing_locations(ast.Module(body, []))
        code: types.CodeType = compile(module, CELL, "exec", flags=self.flags, dont_inherit=True)
        return code

    def code(
        self, code: types.CodeType, known: frozenset[str], *, deferred: bool, own: set[str] | None = None
    ) -> frozenset[str]:
        """Analyse instructions in order. `own` collects the names that a class body binds in its own scope."""
        jumps: list[int] = []
        ends: list[frozenset[str]] = []
        # The names whose bindings may be skipped by a jump. The values are the offsets where these jumps land.
        shaky: dict[str, int] = {}
        for instruction, line in instructions(code):
            known -= {name for name, end in shaky.items() if end <= instruction.offset}
            shaky = {name: end for name, end in shaky.items() if end > instruction.offset}
            name = instruction.argval
            if instruction.opcode in _JUMPS:
                jumps.append(name)
            elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME"):
                self.read(name, line, known | own if own else known)
                if instruction.opname == "DELETE_NAME" and own is None:
                    known -= {name}
                elif instruction.opname == "DELETE_NAME" and own is not None:
                    own.discard(name)
            elif instruction.opname == "STORE_NAME" and own is not None:
                own.add(name)
            elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
                self.possible.add(name)
                past = [end for end in jumps if end > instruction.offset]
                if name not in known and past:
                    shaky[name] = min(past)
                known |= {name}
            elif isinstance(name, types.CodeType):
                self.inner(name, known, deferred)
            elif instruction.opname in ("RETURN_VALUE", "RETURN_CONST"):
                # The code of an expression with branches may have a return instruction in each branch. After the
                # expression, only the names that are bound at every return are known.
                ends.append(known)
        return frozenset.intersection(*ends) if ends else known

    def inner(self, code: types.CodeType, known: frozenset[str], deferred: bool) -> None:
        """Analyse nested code. A class body or a comprehension runs immediately; a function runs when it is called."""
        if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<generic parameters"):  # a class body
            self.code(code, known, deferred=deferred, own=set())
        elif code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):  # inline from Python 3.12 on
            for name, line in global_names(code).reads.items():
                self.read(name, line, known)
        else:
            for name, line in global_names(code).reads.items():
                if name not in self.bound:
                    self.required.setdefault(name, line)
                elif not deferred or code.co_name.startswith("<"):  # a lambda or a generator may run at once
                    self.read_later(name, line, known, set())

    def read(self, name: str, line: int, known: frozenset[str]) -> None:
        """Record that `name` is read. If `name` is a function or class, also record the names that its code reads."""
        if name not in known and name in (self.bound if self.guards else self.possible):
            self.optional.setdefault(name, line)
        elif name not in known:
            self.required.setdefault(name, line)
            if not self.guards:
                self.immediate.setdefault(name, line)
        for inner, at in self.bodies.get(name, {}).items():
            self.read_later(inner, at, known, {name})

    def read_later(self, name: str, line: int, known: frozenset[str], seen: set[str]) -> None:
        """Record that `name` is read by a function that may be called at this point of the cell or later."""
        if name not in known:
            (self.optional if name in self.bound else self.required).setdefault(name, line)
        if name not in seen:
            seen.add(name)
            for inner, at in self.bodies.get(name, {}).items():
                self.read_later(inner, at, known, seen)


def _either(one: _Known, other: _Known) -> _Known:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _unbound(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements may unbind, with `del` or at the end of `except … as`."""
    names = set[str]()
    for statement in statements:
        for part in ast.walk(statement):
            match part:
                case ast.Name(name, ast.Del()) | ast.ExceptHandler(name=str(name)):
                    names.add(name)
    return names


def _in_commands(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield names in `!` and `%` commands, with their lines: in braces, after `$`, and in the code of `%time`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), method), [*arguments]):
                texts = [part.value for part in arguments if isinstance(part, ast.Constant)]
                whole = texts[1:] if texts[:1] == ["time"] and method == "run_line_magic" else []
                yield from ((name, node.lineno) for name in _in_texts(texts, whole))


def names_in_commands(code: types.CodeType) -> set[str]:
    """Return the names in the `!` and `%` commands of a function's code, or of any code inside it."""
    if "get_ipython" not in global_names(code).reads:
        return set()
    inner = (names_in_commands(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    return set(_in_texts(texts, texts[1:] if texts[:1] == ["time"] else [])).union(*inner)


def _in_texts(texts: Iterable[object], whole: Iterable[object]) -> Iterator[str]:
    """Yield the names in the parts of commands that IPython expands, and in texts that consist only of Python code."""
    places = _PLACE.findall("\n".join(map(str, texts)))
    for snippet in (*(name or code for name, code in places), *whole):
        with contextlib.suppress(SyntaxError):  # braces that belong to the shell command are not Python
            parts = ast.walk(ast.parse(str(snippet).strip()))
            yield from (part.id for part in parts if isinstance(part, ast.Name))


def _catches_name_error(handler: ast.ExceptHandler) -> bool:
    parts = ast.walk(handler.type) if handler.type else [ast.Name("Exception")]
    caught = {part.id for part in parts if isinstance(part, ast.Name)}
    return not caught.isdisjoint({"NameError", "Exception", "BaseException"})
