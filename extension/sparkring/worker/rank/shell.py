"""Runs the `!` and `%` lines of a cell on a rank, with a small substitute for IPython's shell."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sparkring.errors import OptionsError
from sparkring.runtime import report
from sparkring.wire.messages import CommandFailed, Script
from sparkring.worker.rank.script import run_script

if TYPE_CHECKING:
    from sparkring.worker.rank.slist import SList

# The line magics that ranks accept. The driver refuses all others before it launches the ranks.
LINE_MAGICS = ("cd", "env", "set_env", "pwd", "run", "time", "pip", "sx", "system", "matplotlib", "config",
               "autoreload", "load_ext")  # fmt: skip
# The magics that a cell may begin with, below the line that launches the ranks. They run the cell in another program.
CELL_MAGICS = ("bash", "sh", "script")
COMMAND_CHARACTERS = 200  # a longer command is cut when its failure is reported
MOST_FAILURES = 20  # how many different failures of commands a rank reports for one request

scripts: dict[str, Script] = {}  # the scripts that came with cells; the key is the text after %run in the cell

# The cell's variables when it began, if it runs a script with parameters. Defaults that such a script has assigned are
# added to them.
_at_start: dict[str, Any] = {}
_told: set[str] = set()  # what _with_given() has said


def begin_cell(sent: Iterable[Script], namespace: Mapping[str, Any]) -> None:
    """Begin a cell with the scripts that came with it and with the variables in `namespace`."""
    scripts.update((script.line, script) for script in sent)
    _at_start.clear()
    if any(script.parameters for script in scripts.values()):
        _at_start.update(namespace)


_raises = False  # whether a command that fails raises an error
_failures: set[tuple[str, int]] = set()  # the commands that have failed in this request, with their exit codes


def begin(*, raises: bool) -> None:
    """Begin a request. `raises` says whether a command that fails raises an error."""
    global _raises
    _raises = raises
    _failures.clear()


def find_python_first() -> None:
    """Have commands such as `python` and `pip` found beside this Python, as in an activated virtual environment."""
    folder, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    for name in ("python", "python3", "pip"):
        beside = os.path.join(folder, name)
        if os.path.exists(beside) and shutil.which(name, path=path) != beside:
            os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
            return


class Shell:
    """Has the methods that a cell's `!` and `%` lines call: IPython turns `!ls` into get_ipython().system('ls')."""

    def system(self, command: str) -> None:
        """Run the command of a line `!command` in the system's shell. Its exit code is then in `_exit_code`.

        If it fails, the driver is told. As in IPython, the cell goes on, unless the notebook has set
        `system_raise_on_error`.
        """
        code = _run(self._expand(command), shell=True).returncode
        sys.modules["__main__"].__dict__["_exit_code"] = code
        _check(command, code)

    def getoutput(self, command: str) -> SList:
        """Run the command of a line `x = !command`, and return the lines that it printed."""
        from sparkring.worker.rank.slist import SList

        done = _run(self._expand(command), shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        _check(command, done.returncode)
        return SList(done.stdout.decode("utf-8", "replace").splitlines())

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Run `cell` with the program that the first line names. `name` is one of CELL_MAGICS.

        As in IPython, raise CalledProcessError if the program fails, unless the line has `--no-raise-error`.
        """
        words = shlex.split(self._expand(line))
        program = [word for word in words if word != "--no-raise-error"]
        others = {"--bg", "--out", "--err", "--proc"} & {word.partition("=")[0] for word in words}
        if others or (name == "script" and not program):
            raise OptionsError(
                f"%%{name} {line}: on ranks, %%{name} takes {'a program and ' if name == 'script' else ''}arguments of "
                "the program, and --no-raise-error."
            )
        program = program if name == "script" else [name, *program]
        try:
            code = _run(program, input=f"{cell.rstrip()}\n".encode()).returncode
        except FileNotFoundError:
            raise OptionsError(f"%%{name} {line}: there is no program {program[0]} on this rank.") from None
        if code and "--no-raise-error" not in words:
            raise subprocess.CalledProcessError(code, cell)
        _check(f"%%{name} {line}".strip(), code)

    def run_line_magic(self, name: str, line: str, **_: Any) -> Any:
        """Run the magic of a line `%name line`. `name` is one of LINE_MAGICS."""
        if name == "run":
            return self._run(line)
        if name in ("sx", "system"):
            return self.getoutput(line)
        line = self._expand(line).strip()
        if name == "cd":
            os.chdir(os.path.expanduser(line or "~"))
        elif name == "pwd":
            return os.getcwd()
        elif name in ("env", "set_env"):
            key, equals, value = line.partition("=") if "=" in line else line.partition(" ")
            if not key:
                return dict(os.environ)
            if not equals:
                return os.environ.get(key)
            os.environ[key.strip()] = value.strip()
        elif name == "time":
            return self._time(line)
        elif name == "pip":
            _check(f"%pip {line}", _run([sys.executable, "-m", "pip", *shlex.split(line)]).returncode)
        return None  # the other magics configure the notebook

    def _run(self, line: str) -> None:
        if line not in scripts:
            raise OptionsError(
                f"%run {line}: the script was not sent with the cell. Write the %run line in the cell itself."
            )
        from sparkring.capture.scripts import defaults_in, split_arguments

        script, variables = scripts[line], vars(sys.modules["__main__"])
        arguments = split_arguments(self._expand(script.arguments), patterns=script.patterns)
        defaults = set().union(*(defaults_in(script.parts[index][1]) for index in script.parameters))
        given = {name for name in defaults if name in variables and variables[name] is not _at_start.get(name, scripts)}
        run_script(_with_given(script, given) if given else script, arguments)
        _at_start.update((name, variables[name]) for name in defaults - given if name in variables)

    def _time(self, line: str) -> Any:
        namespace = sys.modules["__main__"].__dict__
        start, cpu = time.perf_counter(), time.process_time()
        try:
            try:
                code = compile(line, "<%time>", "eval", dont_inherit=True)
            except SyntaxError:
                code = compile(line, "<%time>", "exec", dont_inherit=True)
            return eval(code, namespace)
        finally:
            print(f"CPU time: {time.process_time() - cpu:.3g} s, wall time: {time.perf_counter() - start:.3g} s")

    def _expand(self, text: str) -> str:
        """Replace `{expression}` and `$name` with their values in the cell, and `$$` with a dollar sign."""
        from sparkring.worker.rank.expand import expand

        return expand(text, sys.modules["__main__"].__dict__)


def _run(command: str | list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command. If a signal has ended it, the exit code is the signal's number with a minus sign."""
    sys.stdout.flush()
    done: subprocess.CompletedProcess[bytes] = subprocess.run(command, check=False, **options)
    if done.returncode > 128:  # as shells write it
        done.returncode = 128 - done.returncode
    return done


def _check(command: str, code: int) -> None:
    """If a command has failed, raise an error or tell the driver, once for each command and exit code."""
    if not code:
        return
    if _raises:
        raise subprocess.CalledProcessError(code, command)
    failure = (" ".join(command.split())[:COMMAND_CHARACTERS], code)
    if failure not in _failures and len(_failures) < MOST_FAILURES:
        _failures.add(failure)
        report.tell(CommandFailed(*failure))


def _with_given(script: Script, given: Collection[str]) -> Script:
    """Return a script without the defaults of the parameters `given`, to which the cell has assigned values.

    The driver has left out the defaults of names that the cell certainly assigns. This is for the others, which the
    cell assigns in a branch or with globals(), for example.
    """
    from sparkring.capture.scripts import kept_words, without_defaults

    parts = list(script.parts)
    for index in script.parameters:
        name, code = parts[index]
        parts[index] = name, without_defaults(code, given)
    words = kept_words(script.written, given)
    if words not in _told:
        _told.add(words)
        print(f"sparkring: {words}", file=sys.stderr)
    return script._replace(parts=tuple(parts))


def get_ipython() -> Shell:
    """Return the rank's substitute for IPython's shell."""
    return Shell()
