"""Turns a cell into Python for the ranks, finds the scripts that the cell runs, and chooses a title for its run."""

from __future__ import annotations
import __future__

import ast
import copy
import io
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from sparkring.capture.scripts import Script, find_script, is_for_ipython, kept_words, path_in
from sparkring.capture.source_lines import FUTURE_LINE
from sparkring.capture.syntax import parsed
from sparkring.errors import CaptureError, OptionsError
from sparkring.worker.rank.expand import expand, names_in
from sparkring.worker.rank.shell import CELL_MAGICS, LINE_MAGICS

TITLE_CHARACTERS = 60
# Advice for a statement that is only allowed in a function.
_OUTSIDE_A_FUNCTION = {
    "return": "The cell already runs as the body of a function that returns the value of its last expression. End the "
    "cell with the expression alone, without `return`.",
    "yield": "The cell is the body of a function that runs once on each rank. Collect the values in a list, and end "
    "the cell with the list.",
}
# The call at the end of a cell may be used as the run's title. A call to one of these functions is not used, because it
# does not show what the cell is for.
_UNTELLING_CALLS = {"barrier", "destroy_process_group", "display", "init", "init_process_group", "seed", "shutdown",
                    "dict", "float", "int", "item", "len", "list", "max", "min", "print", "round", "str", "sum",
                    "tolist", "tuple"}  # fmt: skip


def python_source(shell: Any, magic: str, cell: str) -> str:
    """Return the cell as Python. The lines have the same numbers as in the notebook, where the magic is on line 1.

    Raise CaptureError if the cell is not Python, or if it uses magics that do not work on ranks. Raise OptionsError if
    the cell is empty.
    """
    if not cell.strip():
        raise OptionsError(f"the cell is empty. The ranks run the lines below %%{magic}.")
    # IPython drops the empty lines at the top of a cell. Add them back, so that line numbers are right.
    empty = cell[: len(cell) - len(cell.lstrip())].count("\n")
    source: str = _future(shell) + "\n" * (1 + empty) + shell.transform_cell(cell)
    try:
        tree = parsed(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show the compiler's warnings
            compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise _syntax_error(error, cell) from None
    _refuse_magics(tree)
    return source


def _future(shell: Any) -> str:
    """Return a line in place of the magic's, which imports what earlier cells have imported from __future__.

    In a notebook, such an import applies to all later cells. Of those that Python 3.10 and later still have, only
    `annotations` changes code.
    """
    is_on = shell.compile.flags & __future__.annotations.compiler_flag
    return FUTURE_LINE if is_on else ""


def _syntax_error(error: SyntaxError, cell: str) -> CaptureError:
    """Return a CaptureError that shows the line with the mistake and, for some mistakes, gives advice."""
    line = error.lineno or 2
    text = ("\n" + cell).split("\n")[line - 1 : line]
    shown = f"\n    {text[0]}\n    {' ' * max(0, (error.offset or 1) - 1)}^" if text else ""
    statements = (word for word in _OUTSIDE_A_FUNCTION if error.msg.startswith(f"'{word}"))
    advice = "".join(f"\n{_OUTSIDE_A_FUNCTION[word]}" for word in statements)
    return CaptureError(f"cell line {line}: {error.msg} (SyntaxError){shown}{advice}", line=line)


def _magic_call(node: ast.AST) -> tuple[str, str, str] | None:
    """Return the parts of a call that IPython made from a magic: the method, the magic's name, the rest of the line.

    Return None if `node` is not such a call.
    """
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=kind),
            args=[ast.Constant(str(name)), ast.Constant(str(line)), *_],
        ):
            return kind, name, line
    return None


def _refuse_magics(tree: ast.AST, where: str = "cell") -> None:
    """Raise CaptureError if the code uses a magic that needs the notebook's own IPython."""
    for node in ast.walk(tree):
        kind, name, _ = _magic_call(node) or ("", "", "")
        known = {"run_line_magic": LINE_MAGICS, "run_cell_magic": CELL_MAGICS}.get(kind)
        if known is not None and name not in known:
            mark = "%" if kind == "run_line_magic" else "%%"
            raise _error_at(
                node,
                where,
                f"{mark}{name} needs the notebook's IPython, which ranks do not have. Run it in a separate cell. "
                f"Ranks have !commands, {', '.join('%' + magic for magic in LINE_MAGICS)}, and at the top of a cell "
                f"{', '.join('%%' + magic for magic in CELL_MAGICS)}.",
            )


def find_scripts(
    shell: Any, source: str, bound: Collection[str] = (), values: Mapping[str, Any] | None = None
) -> tuple[Script, ...]:
    """Return the scripts that a cell runs with `%run`.

    If such a script is itself a notebook or an .ipy file, the scripts that it runs with `%run` are included.
    If the cell runs once for each item, `bound` contains the names whose values differ from item to item, and `values`
    contains the values of these names for one item. If `values` is None, scripts whose path depends on the item are
    left out.
    """
    scripts: dict[str, Script] = {}
    namespace = {**shell.user_ns, **(values or {})}

    def look_through(tree: ast.Module, given: Collection[str], where: str = "cell") -> set[str]:
        """Look for scripts in the code, and return `given` together with the names that the code certainly assigns."""
        for node, assigned in _with_assigned(tree.body, set(given)):
            kind, name, line = _magic_call(node) or ("", "", "")
            if (kind, name) != ("run_line_magic", "run") or line in scripts:
                continue
            try:
                if values is None and not names_in(path_in(line)).isdisjoint(bound):
                    continue
                script = find_script(line, lambda text: expand(text, namespace), shell.transform_cell, assigned)
            except OptionsError as error:
                raise _error_at(node, where, f"{f'%run {line}'.strip()}: {error}.") from None
            scripts[line] = script
            inside = assigned
            for part, code in script.parts if is_for_ipython(script.path) else ():
                inner = parsed(code)
                _refuse_magics(inner, part)
                inside = look_through(inner, inside, part)
        return _assigned(tree.body, set(given))

    look_through(parsed(source), bound)
    return tuple(scripts.values())


def kept_parameters(scripts: Iterable[Script]) -> str:
    """Say which parameters of the scripts keep the values that the cell assigns, or return ''."""
    return ". ".join(kept_words(script.written, script.replaced) for script in scripts if script.replaced)


def _with_assigned(body: Iterable[ast.stmt], known: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield all nodes of some statements, each with `known` and the names that are certainly assigned before it."""
    known = set(known)
    for statement in body:
        match statement:
            case ast.For(target=target, body=inner, orelse=orelse):
                yield from ((node, known) for node in ast.walk(statement.iter))
                yield from _with_assigned(inner, known | _stored(target))
                yield from _with_assigned(orelse, known)
            case ast.With(body=inner):
                yield from ((node, known) for item in statement.items for node in ast.walk(item))
                yield from _with_assigned(inner, known)
            case ast.If(body=inner, orelse=orelse) | ast.While(body=inner, orelse=orelse):
                yield from ((node, known) for node in ast.walk(statement.test))
                yield from _with_assigned(inner, known)
                yield from _with_assigned(orelse, known)
            case _:
                yield from ((node, known) for node in ast.walk(statement))
        known = _assigned([statement], known)


def _assigned(body: Iterable[ast.stmt], known: set[str]) -> set[str]:
    """Return `known` together with the names that simple statements assign."""
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            known = known.union(*map(_stored, targets if statement.value else ()))
        elif isinstance(statement, ast.With):
            known = _assigned(statement.body, known)
    return known


def _stored(target: ast.AST) -> set[str]:
    """Return the names that an assignment to `target` binds."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def depends_on_items(source: str, bound: Collection[str]) -> bool:
    """Whether the path of a script that a cell runs with `%run` depends on the item."""
    calls = (_magic_call(node) or ("", "", "") for node in ast.walk(parsed(source)))
    lines = [line for kind, name, line in calls if (kind, name) == ("run_line_magic", "run")]
    return any(not names_in(path_in(line)).isdisjoint(bound) for line in lines)


def _error_at(node: ast.AST, where: str, message: str) -> CaptureError:
    line = getattr(node, "lineno", 0)
    return CaptureError(f"{where} line {line}: {message}", line=line if where == "cell" else None)


def ends_quietly(cell: str) -> bool:
    """Return whether a cell ends with a semicolon, so that, as in IPython, the value of its last line is not shown."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(cell).readline))
    except (SyntaxError, tokenize.TokenError):  # IPython's own syntax
        return False
    beside = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)
    return next((token.string == ";" for token in reversed(tokens) if token.type not in beside), False)


def title_of(source: str) -> str:
    """Return a title for a run that the user has not named, or '' if the cell has nothing that can be a title.

    The title is the first of these that the cell has: a comment or docstring at the top, a call to fit(), a call at the
    end, a function definition, a comment, an assignment, another expression at the end.
    """
    title = next(filter(None, _titles(source)), "")
    return title if len(title) <= TITLE_CHARACTERS else f"{title[: TITLE_CHARACTERS - 1]}…"


def _titles(source: str) -> Iterator[str]:
    lines = [stripped for line in source.splitlines() if (stripped := line.strip())]
    first = next((line for line in lines if not line.startswith(("import ", "from "))), "")
    tree = parsed(source)
    last = tree.body[-1].value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    yield _comment(first)
    yield (ast.get_docstring(tree) or "").partition("\n")[0]
    yield from (_as_written(node) for node in ast.walk(tree) if _called_name(node) == "fit")
    if last is not None and _called_name(last) not in {*_UNTELLING_CALLS, ""}:
        yield _as_written(last)
    yield from (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    yield from map(_comment, lines)
    yield from (_as_written(node) for node in tree.body if isinstance(node, ast.Assign))
    if last is not None and not isinstance(last, ast.Constant) and not _called_name(last):
        yield _as_written(last)


def _comment(line: str) -> str:
    return line.lstrip("#%! ") if line.startswith("#") else ""


def _as_written(node: ast.AST) -> str:
    """Return code in one line, with `%` and `!` lines as the user has written them."""
    text = ast.unparse(node)
    return ast.unparse(_Magics().visit(copy.deepcopy(node))) if "get_ipython()" in text else text


class _Magics(ast.NodeTransformer):
    """Replaces the calls that IPython has made from `%` and `!` lines with these lines."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr="system" | "getoutput"),
                args=[ast.Constant(str(command))],
            ):
                return ast.Name(f"!{command}")
        if (call := _magic_call(node)) is not None:
            return ast.Name(f"%{call[1]} {call[2]}".strip())
        return self.generic_visit(node)


def _called_name(node: ast.AST) -> str:
    """Return the name of the function or method that `node` calls; '' if `node` is not such a call."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""
