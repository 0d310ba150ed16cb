"""What stands on the line of a magic: one table for each, for parsing, for the help and for Tab."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from sparkring.engine.options import LOGS, GangOptions, Options, checked, restarts, timeline
from sparkring.errors import OptionsError

Remainder = Literal["drop", "pad", "join"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "join")
Mode = Literal["min", "max"]
MODES: tuple[Mode, ...] = ("min", "max")
MOST_RANKS = 1_024


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"{self.prog}: {message}. See {self.prog}? for the options.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise OptionsError((message or "").strip())


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of ranks (-2: two processes here, 2: two Spark tasks)"
        ) from None
    if abs(number) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{number} is beyond the limit of {MOST_RANKS} ranks")
    return number


def _seconds(text: str, unit: str = "seconds") -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in {unit} above 0")
    return number


def _minutes(text: str) -> float:
    return _seconds(text, "minutes")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return tuple(_name(name) for name in names)


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a variable's name")
    return text


def _variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _columns(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no column")
    return found


_LAUNCH: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (
        ("-n", "--np"),
        {"type": _whole, "metavar": "NP"},
        "ranks: -2 two processes here, 2 two Spark barrier tasks; default -1, or the warm gang",
    ),
    (
        ("--timeout",),
        {"type": _seconds, "metavar": "S", "dest": "timeout_s"},
        "end the run after S seconds, and say where each rank was",
    ),
    (
        ("--push",),
        {"type": _names, "metavar": "NAME,…", "action": "append"},
        "notebook variables to take along although the cell does not name them",
    ),
    (
        ("--pull",),
        {"type": _names, "metavar": "NAME,…", "action": "append"},
        "variables of rank 0 to bring back into the notebook",
    ),
    (
        ("--env",),
        {"type": _variable, "metavar": "K=V", "action": "append"},
        "an environment variable for the ranks; may be repeated",
    ),
    (
        ("--gpus",),
        {"type": _count, "metavar": "K"},
        "GPUs for each rank, which sees those of all ranks on its node by local rank; 0 hides them",
    ),
    (
        ("--logs",),
        {"choices": LOGS, "default": "all"},
        "what to show: every rank's output, rank 0's, or only what callbacks send",
    ),
    (
        ("--stall-after",),
        {"type": _seconds, "metavar": "S", "dest": "stall_s", "default": Options.stall_s},
        "say where every rank is when some have long been elsewhere; default 30",
    ),
    (
        ("--checkpoint-dir",),
        {"default": "", "metavar": "PATH"},
        "where checkpoints() saves on the ranks; the run goes on from the last one that is there (dbfs:, any URL)",
    ),
    (
        ("--max-restarts",),
        {"type": _count, "metavar": "K"},
        "start all ranks again, up to K times, when one is lost; default 3 with --checkpoint-dir, else 0",
    ),
    (
        ("--min-np",),
        {"type": _positive, "metavar": "K", "dest": "least"},
        "go on with as few as K ranks when Spark has no slots for more, and with all again when it has",
    ),
    (("--fresh",), {"action": "store_true"}, "begin anew; the checkpoints that are there stay"),
    (("--resume",), {"action": "store_true"}, "go on from a checkpoint although the cell or its data have changed"),
    (
        ("--timeline",),
        {"action": "store_true"},
        "have Horovod record where its time goes, and which ranks the others wait for; kept with the run",
    ),
    (("--no-autolog",), {"action": "store_false", "dest": "autolog"}, "do not add a metrics callback to Keras' fit"),
    (("--name",), {"default": "", "metavar": "NAME"}, "what to call the run in %%runs"),
    (
        ("--background",),
        {"action": "store_true"},
        "leave the notebook free: the cell returns at once, with a BackgroundRun; never on the warm gang",
    ),
    (("--dry-run",), {"action": "store_true"}, "show what would travel to the ranks, and start nothing"),
    (("--quiet",), {"action": "store_true"}, "show nothing but errors"),
)

_BARRIER: dict[tuple[str, ...], tuple[dict[str, Any], str]] = {
    ("-n", "--np"): (
        {"type": _whole, "metavar": "N"},
        "ranks, each a Spark barrier task; default: as many as the DataFrame has partitions",
    ),
    ("--data",): (
        {"type": _name, "metavar": "DF"},
        "the notebook's Spark DataFrame of which each rank gets one partition, as `rows`",
    ),
}


def asks_for_help(line: str) -> bool:
    """Whether the line of a magic asks for its help."""
    try:
        return not {"-h", "--help"}.isdisjoint(shlex.split(line, comments=True))
    except ValueError:  # the magic's own parser says what is wrong
        return False


def _words(magic: str, line: str) -> list[str]:
    """The line as a shell would take it apart; `#` begins a comment."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise OptionsError(f"{magic}: {error} in {line!r}") from None


@functools.cache
def launch_parser(magic: str) -> argparse.ArgumentParser:
    """The parser of a launch magic's line; kept, since making one takes longer than a warm cell's whole way."""
    parser = _Parser(prog=f"%%{magic}", add_help=False, allow_abbrev=False)
    options = {names: (settings, text) for names, settings, text in _LAUNCH}
    for names, (settings, text) in (options | _BARRIER if magic == "barrier" else options).items():
        parser.add_argument(*names, help=text, **settings)
    return parser


def parse(magic: str, line: str, default: Options | None = None) -> Options:
    """The Options that a launch magic's line asks for. OptionsError says what is wrong with it."""
    default = default or Options()
    found = vars(launch_parser(magic).parse_args(_joined(_words(f"%%{magic}", line))))
    if magic == "barrier":
        default = _barrier_default(found["np"], found["data"], default)
    return checked(
        f"%%{magic}",
        Options(
            np=default.np if found["np"] is None else found["np"],
            timeout_s=found["timeout_s"],
            push=_flat(found["push"]),
            pull=_flat(found["pull"]),
            env=tuple(found["env"] or ()),
            gpus=found["gpus"],
            logs=found["logs"],
            autolog=found["autolog"],
            name=found["name"],
            dry_run=found["dry_run"],
            quiet=found["quiet"],
            stall_s=found["stall_s"],
            data=found.get("data") or "",
            checkpoint_dir=found["checkpoint_dir"],
            max_restarts=restarts(found["max_restarts"], found["checkpoint_dir"]),
            least=found["least"] or 0,
            fresh=found["fresh"],
            resume=found["resume"],
            background=found["background"],
            timeline=timeline(f"%%{magic}", magic == "horovod", found["timeline"]),
        ),
    )


def _barrier_default(np: int | None, data: str, default: Options) -> Options:
    """What counts where %%barrier is not told a number of ranks: the DataFrame's partitions, or Spark's warm gang."""
    if np is not None and np < 1:
        raise OptionsError(
            f"%%barrier runs in tasks of a Spark barrier stage, so -n cannot be {np}: use -n {abs(np) or 4}."
        )
    if np is None and not data and default.np < 1:
        raise OptionsError(
            "%%barrier needs a number of ranks (-n 4), or a DataFrame (--data DF), a rank per partition."
        )
    return Options(np=0) if data else default


@dataclass(frozen=True)
class GangWanted:
    """What `%gang` is asked for: to `start` one, `stop` those `where` ('' for all), `show` them, or their `stacks`."""

    action: Literal["start", "stop", "show", "stacks"]
    start: GangOptions | None = None
    where: str = ""


def parse_gang(line: str, frameworks: tuple[str, ...]) -> GangWanted:
    """What a `%gang` line asks for; `frameworks` are those that a gang can carry. OptionsError says what is wrong."""
    words = _words("%gang", line)
    if words[:1] == ["start"]:
        found = vars(gang_parser(frameworks).parse_args(_joined(words[1:])))
        if not found["np"]:
            raise OptionsError("%gang start takes a number of ranks: -n -4 for processes here, -n 4 for Spark tasks.")
        env = tuple(found["env"] or ())
        return GangWanted("start", GangOptions(found["np"], found["framework"], 60 * found["idle"], env, found["gpus"]))
    if words[:1] == ["stop"] and words[1:] in ([], ["local"], ["spark"]):
        return GangWanted("stop", where="".join(words[1:]))
    if words in ([], ["--stacks"]):
        return GangWanted("stacks" if words else "show")
    raise OptionsError(
        f"%gang does not take {line.strip()!r}: `%gang start -n -4`, `%gang` (what is up), `%gang --stacks`, "
        "`%gang stop` (or `stop local`, `stop spark`)."
    )


@functools.cache
def gang_parser(frameworks: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser of what follows `%gang start`."""
    parser = _Parser(prog="%gang start", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--np", type=_whole, metavar="NP", help="ranks: -4 processes here, 4 Spark barrier tasks")
    parser.add_argument(
        "--framework",
        choices=frameworks,
        default="horovod",
        help="what %%ranks cells are given (default horovod); cells of other magics bring their own",
    )
    parser.add_argument(
        "--idle", type=_minutes, metavar="MIN", default=60.0, help="end it after that many minutes without a cell"
    )
    parser.add_argument("--env", type=_variable, metavar="K=V", action="append", help="a variable for the ranks")
    parser.add_argument("--gpus", type=_count, metavar="K", help="GPUs for each rank; 0 hides them")
    return parser


def parse_ranks(line: str, size: int) -> tuple[tuple[int, ...], str]:
    """The ranks that a `%%ranks` line names, and the rest of the line. OptionsError if there is no such rank."""
    first, _, rest = line.strip().partition(" ")
    found: set[int] = set()
    for part in first.split(","):
        low, dash, high = part.partition("-")
        if part == "all":
            found |= set(range(size))
        elif low.isdecimal() and (high.isdecimal() if dash else True):
            # One beyond the last is enough to be told.
            found |= set(range(int(low), min(int(high or low), size) + 1)) or {size}
        else:
            raise OptionsError(f"%%ranks takes the ranks first, as in `%%ranks 0,2-3` or `%%ranks all`, not {first!r}.")
    if not found or max(found) >= size:
        raise OptionsError(f"%%ranks {first}: the gang has ranks 0 to {size - 1}.")
    return tuple(sorted(found)), rest


@dataclass(frozen=True)
class LogsWanted:
    """What `%logs` is asked for; run '' is the last one, rank None all of them, tail None everything."""

    run: str
    rank: int | None
    tail: int | None


def parse_logs(line: str) -> LogsWanted:
    """What a `%logs` line asks for. OptionsError says what is wrong with it."""
    parser = _Parser(prog="%logs", add_help=False, allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="")
    parser.add_argument("--rank", type=_count)
    parser.add_argument("--tail", type=_count)
    return LogsWanted(**vars(parser.parse_args(_words("%logs", line))))


@dataclass(frozen=True)
class RunsWanted:
    """The line of `%runs`: list the last `count` runs, or show `run`, open it in TensorBoard, or stop it."""

    count: int = 20
    run: str = ""
    tensorboard: bool = False
    stop: bool = False


def parse_runs(line: str) -> RunsWanted:
    """What a `%runs` line asks for. OptionsError says what is wrong with it."""
    found = vars(runs_parser().parse_args(_words("%runs", line)))
    run, tensorboard, stop = found["run"], found["tensorboard"], found["stop"]
    if stop and (tensorboard or not run):
        raise OptionsError("%runs --stop takes one run that goes on in the background, by its id or its name.")
    if run.startswith("-"):
        raise OptionsError(
            f"%runs takes a number of runs to list or the name of a run, not {run!r}: for example %runs 50"
        )
    if run.isdecimal() and not (tensorboard or stop):
        return RunsWanted(int(run))
    return RunsWanted(run=run, tensorboard=tensorboard, stop=stop)


@functools.cache
def runs_parser() -> argparse.ArgumentParser:
    """The parser of what follows `%runs`."""
    parser = _Parser(prog="%runs", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "run", nargs="?", default="", metavar="N|RUN", help="how many to list (default 20), or which run to show"
    )
    parser.add_argument("--tensorboard", action="store_true", help="show the metrics of RUN (the last) in TensorBoard")
    parser.add_argument("--stop", action="store_true", help="end RUN, which goes on in the background of this notebook")
    return parser


def runs_completions(line: str, names: Sequence[str]) -> list[str]:
    """What can stand at the end of `line`, a `%runs` line up to the cursor; `names` are runs that can be stopped."""
    words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    if words[:1] != ["--stop"]:
        return completions(runs_parser(), line)
    return [shlex.quote(name) for name in names if name.startswith(current)] if len(words) == 1 else []


@dataclass(frozen=True)
class ShardsWanted:
    """What `%shards` is asked for; `source` is a path or a variable's name, size 0 the warm gang's or one rank.

    `columns` None are all; of `batch_size` and `remainder`, None is what the source has, or a default.
    """

    source: str
    size: int = 0
    batch_size: int | None = None
    columns: tuple[str, ...] | None = None
    where: str = ""
    remainder: Remainder | None = None
    epochs: int = 1


def parse_shards(line: str) -> ShardsWanted:
    """What a `%shards` line asks for. OptionsError says what is wrong with it."""
    found = vars(shards_parser().parse_args(_joined(_words("%shards", line))))
    return ShardsWanted(**{**found, "size": abs(found["size"])})


@functools.cache
def shards_parser() -> argparse.ArgumentParser:
    """The parser of what follows `%shards`."""
    parser = _Parser(prog="%shards", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "source",
        metavar="PATH|DF",
        help="Parquet files: a path, a folder, a glob, a URL; or a variable of the notebook",
    )
    parser.add_argument(
        "-n", "--np", type=_whole, metavar="NP", dest="size", default=0, help="ranks; default: the warm gang's, or one"
    )
    parser.add_argument("--batch-size", type=_positive, metavar="B", help="rows in a rank's batch; default 32")
    parser.add_argument("--columns", type=_columns, metavar="A,B,…", help="the columns that will be read; default: all")
    parser.add_argument("--where", default="", metavar="FILTER", help='the rows that will be read: --where "x > 3"')
    parser.add_argument(
        "--remainder",
        choices=REMAINDERS,
        help="rows that fill no batch on every rank: left out (drop), padded, or in smaller batches (join)",
    )
    parser.add_argument(
        "--epochs", type=_positive, metavar="E", default=1, help="for the price of an object store's requests"
    )
    return parser


def shards_completions(line: str) -> list[str]:
    """What can stand at the end of `line`, a `%shards` line up to the cursor: options, once there is a source."""
    words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    return completions(shards_parser(), line) if words or current.startswith("-") else []


@dataclass(frozen=True)
class CheckpointsWanted:
    """What `%checkpoints` is asked for; `source` is a directory or a variable's name, '' the last run's directory.

    `check`: read every byte. `metric` and `mode` say which one is the best; '' and None leave that to the source.
    """

    source: str = ""
    check: bool = False
    metric: str = ""
    mode: Mode | None = None


def parse_checkpoints(line: str) -> CheckpointsWanted:
    """What a `%checkpoints` line asks for. OptionsError says what is wrong with it."""
    found = CheckpointsWanted(**vars(checkpoints_parser().parse_args(_words("%checkpoints", line))))
    if found.mode and not found.metric:
        raise OptionsError(
            f"%checkpoints: --mode {found.mode} says which value is the best one; of what, says --metric: "
            f"--metric val_loss --mode {found.mode}."
        )
    return found


@functools.cache
def checkpoints_parser() -> argparse.ArgumentParser:
    """The parser of what follows `%checkpoints`."""
    parser = _Parser(prog="%checkpoints", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "source",
        nargs="?",
        default="",
        metavar="DIR",
        help="a path, a URL, or a variable with one or with checkpoints(…); default: the last run's --checkpoint-dir",
    )
    parser.add_argument("--check", action="store_true", help="read every byte and compare it with what was saved")
    parser.add_argument("--metric", default="", metavar="NAME", help="mark the one with the best value of this metric")
    parser.add_argument("--mode", choices=MODES, help="which value is the best: the least (default) or the greatest")
    return parser


def _joined(words: Sequence[str]) -> list[str]:
    """The words as argparse needs them: `--np=-2` for `-n -2` and `-np -2`, which it would take for two options."""
    found: list[str] = []
    for word in words:
        if word.startswith("-np"):
            value = word[3:].removeprefix("=")
            word = f"--np={value}" if value else "--np"
        if found and found[-1] in ("-n", "--np") and word.startswith("-"):
            found[-1] = f"--np={word}"
        else:
            found.append(word)
    return found


def _flat(groups: Sequence[tuple[str, ...]] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups or () for name in group))


def completions(parser: argparse.ArgumentParser, line: str) -> list[str]:
    """What can stand at the end of `line`, which `parser` is to read, up to the cursor."""
    words = line.split()
    current = "" if line[-1:].isspace() or not words else words[-1]
    before = words[-1] if not current and words else (words[-2] if len(words) > 1 else "")
    actions = [action for action in parser._actions if action.option_strings]
    for action in actions:
        if before in action.option_strings and action.choices:
            return [str(choice) for choice in action.choices if str(choice).startswith(current)]
    if current and not current.startswith("-"):
        return []
    given = {word.partition("=")[0] for word in _joined(words[:-1] if current else words)}
    return [
        word
        for action in actions
        if not given & set(action.option_strings) or action.dest == "env"
        for word in action.option_strings
        if word.startswith(current)
    ]


def gang_completions(line: str, frameworks: tuple[str, ...]) -> list[str]:
    """What can stand at the end of `line`, a `%gang` line up to the cursor."""
    words = line.split()
    if words[:1] == ["start"] and (len(words) > 1 or line[-1:].isspace()):
        return completions(gang_parser(frameworks), line.partition("start")[2])
    choices = ("local", "spark") if words[:1] == ["stop"] and line != " stop" else ("start", "stop", "--stacks")
    current = "" if line[-1:].isspace() else words[-1]
    return [word for word in choices if word.startswith(current)]


def help_table(parser: argparse.ArgumentParser) -> str:
    """The options as text, for a magic's help."""
    rows: list[tuple[str, str]] = []
    for action in parser._actions:
        value: Any = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        names = "/".join(action.option_strings)
        rows.append((f"{names} {value}".strip() if action.nargs != 0 else names, action.help or ""))
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left.ljust(width)}  {right.replace('%%', '%')}" for left, right in rows)
