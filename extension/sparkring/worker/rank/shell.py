"""Runs the `!` and `%` lines of a cell on a rank, with a small substitute for IPython's shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sparkring.errors import OptionsError
from sparkring.wire.messages import Script
from sparkring.worker.rank.script import run_script

# The line magics that ranks accept. The driver refuses all others before it launches the ranks.
LINE_MAGICS = ("cd", "env", "set_env", "pwd", "run", "time", "pip", "matplotlib", "config", "autoreload", "load_ext")

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


class Shell:
    """Has the methods that a cell's `!` and `%` lines call: IPython turns `!ls` into get_ipython().system('ls')."""

    def system(self, command: str) -> None:
        """Run the command of a line `!command` in the system's shell, and ignore its exit code."""
        sys.stdout.flush()
        subprocess.run(self._expand(command), shell=True, check=False)

    def getoutput(self, command: str) -> list[str]:
        """Run the command of a line `x = !command`, and return the lines that it printed."""
        done = subprocess.run(
            self._expand(command), shell=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout.decode("utf-8", "replace").splitlines()

    def run_line_magic(self, name: str, line: str, **_: Any) -> Any:
        """Run the magic of a line `%name line`. `name` is one of LINE_MAGICS."""
        if name == "run":
            return self._run(line)
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
            subprocess.run([sys.executable, "-m", "pip", *shlex.split(line)], check=False)
        return None  # the other magics configure the notebook

    def _run(self, line: str) -> None:
        if line not in scripts:
            raise OptionsError(
                f"%run {line}: the script was not sent with the cell. Write the %run line in the cell itself."
            )
        from sparkring.capture.scripts import defaults_in, split_arguments

        found, variables = scripts[line], vars(sys.modules["__main__"])
        arguments = split_arguments(self._expand(found.arguments), patterns=found.patterns)
        defaults = set().union(*(defaults_in(found.parts[index][1]) for index in found.parameters))
        given = {name for name in defaults if name in variables and variables[name] is not _at_start.get(name, scripts)}
        run_script(_with_given(found, given) if given else found, arguments)
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
