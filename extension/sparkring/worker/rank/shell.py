"""Runs the `!` and `%` lines of a cell on a rank, with a small substitute for IPython's shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from typing import Any

from sparkring.errors import OptionsError
from sparkring.wire.messages import Script
from sparkring.worker.rank.script import run_script

# The line magics that ranks accept. The driver refuses all others before it launches the ranks.
LINE_MAGICS = ("cd", "env", "set_env", "pwd", "run", "time", "pip", "matplotlib", "config", "autoreload", "load_ext")

scripts: dict[str, Script] = {}  # the scripts that came with cells; the key is the text after %run in the cell


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
        from sparkring.capture.scripts import split_arguments

        found = scripts[line]
        run_script(found, split_arguments(self._expand(found.arguments), patterns=found.patterns))

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


def get_ipython() -> Shell:
    """Return the rank's substitute for IPython's shell."""
    return Shell()
