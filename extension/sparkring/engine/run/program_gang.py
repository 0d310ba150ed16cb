"""Warm gangs for programs: the same gangs that %gang starts, as an object with methods."""

from __future__ import annotations

import keyword
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparkring.engine.run import warm_gang
from sparkring.engine.run.api import run_spec
from sparkring.engine.run.options import GangOptions, Options, check_framework
from sparkring.engine.run.result import RunResult
from sparkring.engine.run.spec import Call, Cell, RunSpec
from sparkring.engine.run.warm_gang import WarmGang
from sparkring.errors import OptionsError
from sparkring.runtime.kernel import tell

_RANKS_OWN = ("rank", "size", "local_rank")


class ProgramGang:
    """A warm gang of ranks that stay up between calls. `sparkring.gang()` starts it, and `%gang` lists it.

    Any thread may call the methods. The calls run one after another, and each is a run with a record of its own, which
    `%runs` lists. Used as a context manager, the gang is stopped at the end of the block.
    """

    def __init__(self, gang: WarmGang, *, quiet: bool) -> None:
        self._gang = gang
        self._quiet = quiet
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"{self._gang.describe()}: {f'ended, {self._gang.ended}' if self._gang.ended else 'up'}"

    def __enter__(self) -> ProgramGang:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._gang.gang.size

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> RunResult:
        """Call `function(*args, **kwargs)` on all ranks, or only on `ranks`. Return the result.

        A function that is defined in the notebook sees the variables that push() and earlier cells have put on the
        ranks. Raises RunFailed if a rank fails; the gang stays up, unless a rank has died. Raises RunTimeout after
        `timeout_s` seconds, LaunchError if the gang has ended, and OptionsError if `ranks` has other numbers than those
        of the gang's ranks.
        """
        return self._run(Call(function, args, kwargs), ranks, timeout_s=timeout_s)

    def push(self, **values: Any) -> None:
        """Put variables on all ranks: `gang.push(model=model, lr=0.1)`.

        Raises CaptureError if a value cannot be sent, and OptionsError if ranks cannot have a variable with this name.
        """
        for name in values:
            if name in _RANKS_OWN or not name.isidentifier() or keyword.iskeyword(name):
                raise OptionsError(f"push({name}=…): ranks cannot have a variable with this name. Use another name.")
        if values:
            self._run(Cell("\n".join([*values, "None"]), values, apart=True), None, push=tuple(values))

    def pull(self, name: str, rank: int = 0) -> Any:
        """Return the value of a variable of one rank. Raises ResultError if the rank does not have the variable."""
        namespace: dict[str, Any] = {}
        self._run(Cell("None", namespace, apart=True), (rank,), pull=(name,))
        return namespace[name]

    def stop(self) -> None:
        """End the ranks. A second call does nothing."""
        with self._turn:
            warm_gang.stop_gang(self._gang)

    def _run(self, work: Call | Cell, ranks: Iterable[int] | None, **options: Any) -> RunResult:
        chosen = self._checked(ranks)
        wanted = self._gang.wanted
        # Another thread has no cell in which it could show a run.
        quiet = self._quiet or threading.current_thread() is not threading.main_thread()
        choices = Options(wanted.np, quiet=quiet, **options)
        with self._turn:
            return run_spec(RunSpec(work, choices, wanted.framework, gang=self._gang, ranks=chosen))

    def _checked(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        if ranks is None:
            return ()
        chosen = tuple(sorted({operator.index(rank) for rank in ranks}))
        wrong = [rank for rank in chosen if not 0 <= rank < self.size]
        if wrong or not chosen:
            what = f"there is no rank {wrong[0]}" if wrong else "it names no rank"
            raise OptionsError(f"ranks={list(chosen)}: {what}. The ranks of the {self._gang.describe()} begin at 0.")
        return chosen


def gang(
    *,
    np: int,
    framework: str = "horovod",
    gpus: int | None = None,
    env: Mapping[str, str] | None = None,
    idle_s: float = 3600.0,
    env_pack: bool = False,
    quiet: bool = False,
) -> ProgramGang:
    """Start a warm gang: ranks that stay up between calls, as `%gang start` does.

        with sparkring.gang(np=-2, framework="torch") as gang:
            gang.push(x=x)
            losses = gang.run(train, 0.1).by_rank
            weights = gang.pull("weights")

    `np`, `framework` and `gpus` have the same meanings as in sparkring.run(). `env` is a dict of environment variables
    for the ranks, and `env_pack` sends the notebook's packages to executors. The gang ends after `idle_s` seconds
    without a call. With `quiet`, calls show nothing; their runs are recorded all the same. There is at most one gang on
    this machine, and at most one on Spark.

    Raises OptionsError if an argument is invalid or the place already has a gang, and LaunchError if the ranks cannot
    be started.
    """
    if not operator.index(np):
        raise OptionsError("gang(np=0): give the number of ranks, -4 for processes here or 4 for Spark tasks.")
    check_framework("gang", framework)
    variables = tuple((name, os.fspath(value)) for name, value in (env or {}).items())
    wanted = GangOptions(operator.index(np), framework, idle_s, variables, gpus, env_pack)
    return ProgramGang(warm_gang.start(wanted, tell, tell), quiet=quiet)
