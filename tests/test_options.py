"""Tests of the lines of magics: which options they take, what these mean, and the errors for invalid lines."""

from __future__ import annotations
import __future__

import re
import types
import warnings

import pytest

import sparkring
from sparkring.engine.foreach.options import ForeachOptions
from sparkring.engine.run import api, gang_selection
from sparkring.engine.run.options import GangOptions, Options
from sparkring.engine.run.prepare import capture_cell
from sparkring.engine.run.spec import Cell, RunSpec
from sparkring.errors import OptionsError
from sparkring.notebook import checkpoints, data, foreach, gang, history
from sparkring.notebook.cell import depends_on_items, ends_quietly, find_scripts, python_source, title_of
from sparkring.notebook.extension import MAGICS
from sparkring.notebook.gang import GangRequest
from sparkring.notebook.history import RunsRequest, parse_runs
from sparkring.notebook.launch import options_table, parse, parse_ranks


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Options()),
        ("-n 2", Options(np=2)),
        ("-n -2", Options(np=-2)),
        ("-n=-2", Options(np=-2)),
        ("-n-2", Options(np=-2)),
        ("--np -3", Options(np=-3)),
        ("--np=4", Options(np=4)),
        ("-n 0", Options(np=0)),
        ("-np 2", Options(np=2)),
        ("-np=-2 --timeout 3", Options(np=-2, timeout_s=3.0)),
        ("--timeout 3 -np -2", Options(np=-2, timeout_s=3.0)),
        ("-np-2", Options(np=-2)),
        ("--timeout 2.5", Options(timeout_s=2.5)),
        ("--push a,b --push c,a", Options(push=("a", "b", "c"))),
        ("--pull model", Options(pull=("model",))),
        ("--pull 'a, b'", Options(pull=("a", "b"))),
        ("--env A=1 --env B='x y=z'", Options(env=(("A", "1"), ("B", "x y=z")))),
        ("--env EMPTY=", Options(env=(("EMPTY", ""),))),
        ("--gpus 2", Options(gpus=2)),
        ("--gpus 0", Options(gpus=0)),
        ("--logs rank0", Options(logs="rank0")),
        ("--no-autolog --dry-run --quiet", Options(autolog=False, dry_run=True, quiet=True)),
        ("--name 'first try'", Options(name="first try")),
        ("-n 2  # two tasks", Options(np=2)),
    ],
)
def test_lines(line, expected):
    """Each option means what the help says."""
    assert parse("horovod", line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--checkpoint-dir dbfs:/x", Options(checkpoint_dir="dbfs:/x", max_restarts=3)),
        ("--checkpoint-dir '/a b' --max-restarts 0", Options(checkpoint_dir="/a b")),
        ("--max-restarts 5", Options(max_restarts=5)),
        ("-n 4 --min-np 2 --max-restarts 1", Options(np=4, min_np=2, max_restarts=1)),
        ("--checkpoint-dir /x --fresh", Options(checkpoint_dir="/x", max_restarts=3, fresh=True)),
        ("--checkpoint-dir /x --resume", Options(checkpoint_dir="/x", max_restarts=3, resume=True)),
    ],
)
def test_lines_of_runs_that_survive(line, expected):
    """With --checkpoint-dir, restarts are on by default."""
    assert parse("horovod", line) == expected
    assert expected.survives


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--fresh", "--fresh needs a --checkpoint-dir"),
        ("--resume", "--resume needs a --checkpoint-dir"),
        ("--checkpoint-dir /x --fresh --resume", "choose one"),
        ("-n 4 --min-np 2", "add --max-restarts 3"),
        ("-n -4 --min-np 2 --max-restarts 1", "is for Spark.* Leave --min-np out"),
        ("-n 4 --min-np 5 --max-restarts 1", "more than the 4 ranks of -n 4"),
        ("-n 4 --min-np 0 --max-restarts 1", "at least 1"),
        ("--max-restarts -1", "at least 0"),
    ],
)
def test_what_does_not_go_together(line, words):
    """The message names the options, and what to add or leave out."""
    with pytest.raises(OptionsError, match=words):
        parse("horovod", line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "-n 4 -H a:4,b:4",
            r"there is no -H\. Ranks start on this machine \(-n -4\) or in Spark tasks .* Spark cluster",
        ),
        ("--hosts=a:4,b:4 -n 4", "there is no --hosts.*Spark cluster"),
        ("--hostfile hosts", "Spark cluster"),
        ("--nproc_per_node=2 --nnodes 2", "-n gives the number of all ranks"),
        ("--num-proc 2", "-n or -np"),
        ("-np 2 --gloo", "there is no --gloo. Leave it out"),
        ("--verbose", "%logs"),
        ("-n -3 --ps 1", "parameter server.*MultiWorkerMirroredStrategy"),
        ("--min-np 2 --max-np 4 -n 4", "-n is the largest"),
    ],
)
def test_options_of_other_launchers(line, words):
    """The error says what there is instead, whichever magic starts the ranks."""
    for magic in ("horovod", "torchrun", "barrier"):
        with pytest.raises(OptionsError, match=rf"^%%{magic}: .*{words}"):
            parse(magic, line)


def test_the_default_number_of_ranks():
    """Without -n, the given default is used."""
    assert parse("horovod", "", -4).np == -4
    assert parse("horovod", "-n 2", -4).np == 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("-n two", "'two' is not a whole number"),
        ("-n 1.5", "'1.5' is not a whole number"),
        ("-n", "expected one argument"),
        ("-np", "expected one argument"),
        ("-np two", "'two' is not a whole number"),
        ("-n 5000", "limit of 1024"),
        ("-n -5000", "limit of 1024"),
        ("--timeout soon", "'soon' is not a number of seconds"),
        ("--timeout 0", "greater than 0"),
        ("--timeout -1", ""),
        ("--timeout inf", "greater than 0"),
        ("--timeout nan", "greater than 0"),
        ("--push 2x", "'2x' is not a variable's name"),
        ("--pull a.b", "'a.b' is not a variable's name"),
        ("--env A", "KEY=VALUE"),
        ("--env =1", "KEY=VALUE"),
        ("--gpus -1", "'-1' is not a whole number of at least 0"),
        ("--gpus 0.5", "'0.5' is not a whole number of at least 0"),
        ("--logs some", "invalid choice: 'some'"),
        ("--unknown", "unrecognized arguments: --unknown. See"),
        ("--restarts=3", "unrecognized arguments: --restarts=3 (did you mean --max-restarts?). See"),
        ("--time 3", "unrecognized arguments: --time 3 (did you mean --timeout?). See"),
        ("extra", "unrecognized arguments: extra"),
        ("--name 'open", "No closing quotation"),
        ("--fresh \\", "cannot continue on the next line"),
        ("--no-autolog=1", "explicit argument"),
    ],
)
def test_bad_lines(line, word):
    """The error is an OptionsError of one line that starts with the magic and names what cannot be used."""
    with pytest.raises(OptionsError) as caught:
        parse("horovod", line)
    text = str(caught.value)
    assert text.startswith("%%horovod: ")
    assert word in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"run": "", "rank": None, "item": None, "tail": None}),
        ("2026-11 --rank 1 --tail 20", {"run": "2026-11", "rank": 1, "item": None, "tail": 20}),
    ],
)
def test_logs_lines(line, expected):
    """%logs takes a run, a rank, and the number of lines to print."""
    assert history.LOGS.parse(line) == expected


@pytest.mark.parametrize("line", ["--rank one", "--tail x", "a b", "'open", "--tail -3", "--rank -1"])
def test_bad_logs_lines(line):
    """A line that %logs cannot use raises an OptionsError."""
    with pytest.raises(OptionsError):
        history.LOGS.parse(line)


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        (" --p", {"--push", "--pull"}, {"--env", "-n"}),
        (" ", {"-n", "--np", "--timeout", "--gpus", "--logs"}, set()),
        (" --logs ", {"all", "rank0", "callbacks"}, {"--pull"}),
        (" --logs r", {"rank0"}, {"all"}),
        (" -n -2 --", {"--timeout"}, {"--np", "-n"}),
        (" -np -2 -", {"--timeout"}, {"--np", "-n"}),
        (" --timeout=3 -n", {"-n"}, {"-np", "--timeout"}),
        (" --env A=1 --e", {"--env"}, set()),
        (" --name x", set(), {"--name"}),
        (" --checkpoint-dir ", set(), {"--name"}),
        (" --push x --pu", {"--push", "--pull"}, set()),
    ],
)
def test_completions(line, some, none):
    """Tab offers options that can still be given, and the values of options that have fixed choices."""
    found = set(MAGICS["horovod"].complete(line))
    assert some <= found
    assert not none & found


def test_the_help_has_every_option():
    """The help has each option, with its description."""
    text = MAGICS["horovod"].help
    for option in options_table("horovod").options:
        assert option.help in text
        assert option.names[-1] in text
    assert "%runs" in text
    assert "%%runs" not in text


@pytest.mark.parametrize(
    ("line", "np", "data"),
    [
        ("-n 4", 4, ""),
        ("--data digits", 0, "digits"),
        ("-n 2 --data=digits --timeout 9", 2, "digits"),
        ("--data df.where('x > 1').limit(n - 1) -n 2", 2, "df.where('x > 1').limit(n - 1)"),
        ("--quiet --data frames[0]", 0, "frames[0]"),
        ("--data frames['a'] if big else df  # the rows", 0, "frames['a'] if big else df"),
    ],
)
def test_barrier(line, np, data):
    """%%barrier takes -n, --data or both; np 0 means as many ranks as partitions."""
    found = parse("barrier", line)
    assert (found.np, found.data) == (np, data)


@pytest.mark.parametrize("line", ["", "-n 0", "-n -2", "-n -2 --data digits", "--data", "--data 2x", "--data a,b"])
def test_barrier_lines_that_are_refused(line):
    """Barrier tasks run on Spark, so local ranks are refused; so is a line with neither a number of ranks nor data."""
    with pytest.raises(OptionsError, match="%%barrier"):
        parse("barrier", line)


def test_only_barrier_takes_data():
    """Other magics refuse --data, since their ranks would get no rows."""
    with pytest.raises(OptionsError, match="--data"):
        parse("horovod", "-n 2 --data digits")
    assert MAGICS["barrier"].complete(" --da") == ["--data"]
    assert MAGICS["barrier"].complete(" --data df --qu") == ["--quiet"]
    assert "gets one partition" in MAGICS["barrier"].help


# ── Warm gangs ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", GangRequest("show")),
        ("--stacks", GangRequest("stacks")),
        ("stop", GangRequest("stop")),
        (" stop spark ", GangRequest("stop", where="spark")),
        ("start -n -4", GangRequest("start", GangOptions(-4, "horovod", 3600.0, ()))),
        ("start -np -4", GangRequest("start", GangOptions(-4, "horovod", 3600.0, ()))),
        (
            "start --np 2 --idle 0.5 --framework torch --env A=1 --gpus 0  # and a comment",
            GangRequest("start", GangOptions(2, "torch", 30.0, (("A", "1"),), 0)),
        ),
    ],
)
def test_gang_lines(line, expected):
    """%gang starts, stops and lists gangs, and shows the ranks' stacks."""
    assert gang.parse(line) == expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("start", "needs a number of ranks"),
        ("start -n 0", "needs a number of ranks"),
        ("start -n two", "'two' is not a whole number"),
        ("start -n -2 --idle 0", "greater than 0"),
        ("start -n -2 --idle never", "not a number of minutes"),
        ("start -n -2 --framework mpi", "invalid choice: 'mpi'"),
        ("start -n -2 --gpus some", "not a whole number of at least 0"),
        ("start -n -2 extra", "unrecognized arguments: extra. See %gang? for the options"),
        ("nonsense", "does not take 'nonsense'"),
        ("stop here", "does not take 'stop here'"),
        ("--stacks now", "does not take"),
        ("'open", "No closing quotation"),
    ],
)
def test_bad_gang_lines(line, word):
    """The error is an OptionsError of one line that names what %gang cannot use."""
    with pytest.raises(OptionsError) as caught:
        gang.parse(line)
    assert str(caught.value).startswith("%gang")
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0", ((0,), "")),
        ("0,2-3", ((0, 2, 3), "")),
        ("3,1,1", ((1, 3), "")),
        ("all", ((0, 1, 2, 3), "")),
        ("1-2 --pull x", ((1, 2), "--pull x")),
        (" 0-3  --quiet", ((0, 1, 2, 3), " --quiet")),
    ],
)
def test_ranks_lines(line, expected):
    """%%ranks takes the ranks, then options."""
    assert parse_ranks(line, 4) == expected


def test_the_ranks_are_in_the_code(monkeypatch):
    """A saved run shows the line as the user has written it, not the number of all ranks of the gang."""
    warm = types.SimpleNamespace(
        gang=types.SimpleNamespace(size=4), wanted=types.SimpleNamespace(framework="horovod", np=-4)
    )
    monkeypatch.setattr(gang_selection, "latest_gang", lambda magic: warm)
    monkeypatch.setattr(gang_selection, "default_np", lambda: -4)
    monkeypatch.setattr(gang_selection, "gang_for", lambda options: warm.gang)
    monkeypatch.setattr(api, "run_spec", lambda spec: spec)
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(flags=0), transform_cell=str, user_ns={})
    spec = MAGICS["ranks"].run(shell, "0,2-3 --quiet", "x = 1\n")
    assert (spec.title, spec.code, spec.ranks) == ("x = 1", "%%ranks 0,2-3 --quiet\nx = 1\n", (0, 2, 3))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "takes the ranks first"),
        ("x", "takes the ranks first"),
        ("--pull x", "takes the ranks first"),
        ("0,,1", "takes the ranks first"),
        ("-1", "takes the ranks first"),
        ("1-", "takes the ranks first"),
        ("²", "takes the ranks first"),
        ("4", "the gang has ranks 0 to 3"),
        ("7", "the gang has ranks 0 to 3"),
        ("3-1", "the gang has ranks 0 to 3"),
        ("5-9", "the gang has ranks 0 to 3"),
        ("0-99999999999999", "the gang has ranks 0 to 3"),
    ],
)
def test_bad_ranks_lines(line, word):
    """Words that are not ranks, and ranks that the gang does not have, raise an OptionsError."""
    with pytest.raises(OptionsError, match=word):
        parse_ranks(line, 4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (" ", {"start", "stop", "--stacks"}),
        (" st", {"start", "stop"}),
        (" start", {"start"}),
        (" start ", {"-n", "--np", "--framework", "--idle", "--env", "--env-pack", "--gpus"}),
        (" start --id", {"--idle"}),
        (" start -n -2 --framework t", {"torch", "tensorflow"}),
        (" stop", {"stop"}),
        (" stop ", {"local", "spark"}),
        (" stop l", {"local"}),
        (" --s", {"--stacks"}),
        (" nonsense", set()),
    ],
)
def test_gang_completions(line, expected):
    """Tab on a %gang line offers what can come next."""
    assert set(gang.complete(line)) == expected


# ── Items ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "targets", "items", "expected"),
    [
        (" x in items -n -4", "x", "items", ForeachOptions(-4)),
        (" (a, (b, *c)), d in zip(x, [1, -2]) --np=-2", "(a, (b, *c)), d", "zip(x, [1, -2])", ForeachOptions(-2)),
        (" x in f(a, -n ) -np -2 --retries 2", "x", "f(a, -n )", ForeachOptions(-2, retries=2)),
        (" x in range(5)  # five -n -9", "x", "range(5)", ForeachOptions(-3)),
        (" x in ' -n -2'.split() --quiet", "x", "' -n -2'.split()", ForeachOptions(-3, quiet=True)),
        (" x in (a -n) -n-2", "x", "a -n", ForeachOptions(-2)),
        (" x in a, b, c", "x", "a, b, c", ForeachOptions(-3)),
        (" x in (y for y in z if y in w)", "x", "(y for y in z if y in w)", ForeachOptions(-3)),
        (" x in y --fresh-process", "x", "y", ForeachOptions(-3, fresh_after=1)),
        (" x in y --fresh-after 20 --fail-fast", "x", "y", ForeachOptions(-3, fresh_after=20, fail_fast=True)),
        (" x in y -n -3 --timeout-each 1.5 --gpus .5", "x", "y", ForeachOptions(-3, timeout_each_s=1.5, gpus=0.5)),
        (
            " x in y --np-each 2 --framework torch --env A=1 --push a,b --name 'my run' --background",
            "x",
            "y",
            ForeachOptions(
                -1, np_each=2, framework="torch", env=(("A", "1"),), push=("a", "b"), name="my run", background=True
            ),
        ),
    ],
)
def test_foreach_lines(line, targets, items, expected, monkeypatch):
    """The clause has Python's syntax. After a whole clause, options begin at the first word that can be one."""
    monkeypatch.setattr("sparkring.launchers.local.limits.cores", lambda: 3)
    clause, options = foreach.parse(line)
    assert (clause.targets, clause.items) == (targets, items)
    assert options == expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "begins with `TARGETS in ITEMS`"),
        ("-n -4", "begins with"),
        ("x", "begins with"),
        ("x in", "begins with"),
        ("x in y: pass", "begins with"),
        ("x in y -n 0", "number of items that run at once"),
        ("x in y --retires 3", "unrecognized arguments: --retires"),
        ("x in y --fresh-process --fresh-after 2", "choose one"),
        ("x in y --np-each 2", "needs a --framework"),
        ("x in y --np-each 2 --framework barrier", "invalid choice"),
        ("x in y --timeout-each 0", "greater than 0"),
        ("x in y --gpus some", "not a number of GPUs"),
        ("x in y --gpus nan", "--gpus nan is neither a number of GPUs nor a fraction"),
        ("x in y --gpus inf", "--gpus inf is neither a number of GPUs nor a fraction"),
        ("x in y --gpus 1.5", "neither a number of GPUs nor a fraction"),
        ("x in y --gpus 0.5 --np-each 2 --framework torch", "cannot share a GPU"),
        ("x in y -n 2 --gpus 0.5", "set spark.task.resource.gpu.amount=0.5"),
        ("x in y --plan --background", "leave --background out"),
    ],
)
def test_bad_foreach_lines(line, word):
    with pytest.raises(OptionsError, match=re.escape(word)):
        foreach.parse(line)


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        (" x in y ", {"-n", "--retries", "--fail-fast"}, {"--timeout"}),
        (" x in y --r", {"--retries"}, {"-n"}),
        (" x in y -n -2 --f", {"--fail-fast", "--fresh-process", "--fresh-after", "--framework"}, {"-n"}),
        (" x in y --np-each 2 --framework t", {"torch", "tensorflow"}, {"horovod"}),
        (" x in y -n ", set(), {"--retries"}),
        (" x i", set(), {"-n"}),
        (" ", set(), {"-n"}),
    ],
)
def test_foreach_completions(line, some, none):
    """Options are offered after a whole clause."""
    found = set(foreach.complete(line))
    assert some <= found
    assert not none & found


def test_foreach_teaches():
    for option in foreach.TABLE.options:
        assert option.help in MAGICS["foreach"].help
        assert option.names[-1] in MAGICS["foreach"].help


# ── Shards ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("data", {"source": "data"}),
        ("data -n 4 --batch-size 256", {"source": "data", "size": 4, "batch_size": 256}),
        ("-n -4 'my data/*.parquet'", {"source": "my data/*.parquet", "size": -4}),
        ("-n-2 s3://bucket/x", {"source": "s3://bucket/x", "size": -2}),
        ("x -np 4", {"source": "x", "size": 4}),
        (
            "--columns a,b,a 'x' --where \"x > 3 and y == 'Ulm'\"",
            {"source": "x", "columns": ("a", "b"), "where": "x > 3 and y == 'Ulm'"},
        ),
        ("x --columns 'a b, c'", {"source": "x", "columns": ("a b", "c")}),
        ("x --remainder pad --epochs 1000  # what it costs", {"source": "x", "remainder": "pad", "epochs": 1000}),
    ],
)
def test_shards_lines(line, expected):
    """%shards takes a path or a name, and options that say how it will be read."""
    assert data.OPTIONS.parse(line) == data.OPTIONS.parse("?") | expected


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "required: PATH|DF"),
        ("-n 4", "required: PATH|DF"),
        ("a b", "unrecognized arguments: b"),
        ("x -n many", "'many' is not a whole number"),
        ("x -n 5000", "limit of 1024"),
        ("x --batch-size 0", "'0' is not a whole number of at least 1"),
        ("x --batch-size -5", "'-5' is not a whole number of at least 1"),
        ("x --epochs 1.5", "'1.5' is not a whole number of at least 1"),
        ("x --columns ,", "',' names no column"),
        ("x --remainder keep", "invalid choice: 'keep'"),
        ("x --batch 3", "unrecognized arguments: --batch 3"),
        ("'open", "No closing quotation"),
    ],
)
def test_bad_shards_lines(line, word):
    """The error is an OptionsError of one line that names what %shards cannot use."""
    with pytest.raises(OptionsError) as caught:
        data.OPTIONS.parse(line)
    assert str(caught.value).startswith("%shards: ")
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        (" ", set(), {"-n"}),
        (" da", set(), {"-n"}),
        (" -", {"-n", "--np", "--batch-size", "--columns", "--where", "--remainder", "--epochs"}, set()),
        (" data ", {"-n", "--batch-size"}, set()),
        (" data -n 4 --", {"--batch-size"}, {"-n", "--np"}),
        (" data --remainder ", {"drop", "pad", "join"}, {"-n"}),
        (" data --remainder p", {"pad"}, {"drop"}),
        (" -n ", set(), {"-n", "--where"}),
        (" -n 4 --where x=1 ", set(), {"--epochs"}),
        (" data --where x ", {"--epochs"}, {"--where"}),
    ],
)
def test_shards_completions(line, some, none):
    """Tab offers options once there is a source or a dash, and none where a value is expected."""
    found = set(MAGICS["shards"].complete(line))
    assert some <= found
    assert not none & found


def test_the_remainders_are_those_of_the_plan():
    """The choices of --remainder are those that the reader supports."""
    from sparkring.data import plan

    (remainder,) = (option for option in data.OPTIONS.options if option.names == ("--remainder",))
    assert remainder.settings["choices"] == plan.REMAINDERS


# ── Checkpoints ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("dbfs:/ml/run1", {"source": "dbfs:/ml/run1"}),
        ("'my runs/1' --check  # all of it", {"source": "my runs/1", "check": True}),
        ("x --metric val_loss", {"source": "x", "metric": "val_loss"}),
        ("--metric acc --mode max x", {"source": "x", "metric": "acc", "mode": "max"}),
    ],
)
def test_checkpoints_lines(line, expected):
    """%checkpoints takes a directory or none, and options."""
    assert checkpoints.parse(line) == {"source": "", "check": False, "metric": "", "mode": None} | expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a b", "unrecognized arguments: b"),
        ("a --mode max", "--metric val_loss --mode max"),
        ("a --metric x --mode best", "invalid choice: 'best'"),
        ("a --metric", "expected one argument"),
    ],
)
def test_bad_checkpoints_lines(line, words):
    """One OptionsError says what is wrong with the line."""
    with pytest.raises(OptionsError) as caught:
        checkpoints.parse(line)
    assert str(caught.value).startswith("%checkpoints: ")
    assert words in str(caught.value)


# ── %runs, --timeline ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", RunsRequest()),
        ("50", RunsRequest(50)),
        ("--delete 03-22_a1b2", RunsRequest(run="03-22_a1b2", delete=True)),
        ("--delete-older 30d", RunsRequest(older_s=30 * 86400.0)),
        ("--delete-older 1.5h", RunsRequest(older_s=5400.0)),
        ("03-22_a1b2 --tensorboard", RunsRequest(run="03-22_a1b2", tensorboard=True)),
        ("--tensorboard 'my run'", RunsRequest(run="my run", tensorboard=True)),
        ("--tensorboard", RunsRequest(tensorboard=True)),
        ("50 --tensorboard", RunsRequest(run="50", tensorboard=True)),
        ("482913", RunsRequest(run="482913")),
        ("a1b2 'my run'", RunsRequest(run="a1b2", others=("my run",))),
        ("a b c", RunsRequest(run="a", others=("b", "c"))),
        ("5 --sort loss --reverse", RunsRequest(5, sort="loss", reverse=True)),
        ("--where 'loss < 0.1'", RunsRequest(where="loss < 0.1")),
    ],
)
def test_runs_lines(line, expected):
    """A number alone says how many runs to list. With an option, or with six digits, even a number names a run."""
    assert parse_runs(line) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--board", "--board"),
        ("a b c d e f g h i", "2 to 8 runs to compare"),
        ("a b --stop", "2 to 8 runs"),
        ("a --sort loss", "name no run"),
        ("--tensorboard --where 'loss < 1'", "name no run"),
        ("a b --delete", "takes one argument"),
        ("--delete", "takes one argument"),
        ("--delete-older 30", "'30' is not an age"),
        ("--delete-older 0d", "is not an age"),
        ("--delete-older nand", "is not an age"),
        ("--delete-older 30d a", "takes no run"),
        ("-1", "a number of runs to list"),
        ("0", "a number of runs to list"),
    ],
)
def test_bad_runs_lines(line, words):
    with pytest.raises(OptionsError, match=words):
        parse_runs(line)


@pytest.mark.parametrize(
    ("start", "name", "value"),
    [
        (sparkring.foreach, "np_each", 0),
        (sparkring.foreach, "fresh_after", 0),
        (sparkring.foreach, "retries", -1),
        (sparkring.foreach, "timeout_each_s", -1),
        (sparkring.run, "timeout_s", -0.5),
        (sparkring.run, "gpus", -1),
        (sparkring.run, "max_restarts", -1),
    ],
)
def test_numbers_that_are_too_small(start, name, value):
    """The functions refuse the same values as the options of the magics."""
    option = name.removesuffix("_s").replace("_", "-")
    with pytest.raises(OptionsError, match=f"--{option} {value} is too small"):
        start(print, *([[1]] if start is sparkring.foreach else []), **{name: value})


def test_only_horovod_records_a_timeline():
    """Other frameworks record no timeline, and the ranks of a warm gang were started without one."""
    assert parse("horovod", "--timeline").timeline
    for magic in ("torchrun", "tensorflow", "barrier", "ranks"):
        with pytest.raises(OptionsError, match="%%horovod --timeline"):
            parse(magic, "-n 2 --timeline")
    with pytest.raises(OptionsError, match="--timeline"):
        sparkring.run(print, framework="torch", timeline=True)


@pytest.mark.parametrize(
    ("cell", "title"),
    [
        ("# Train the net\nimport torch\ntorch.ones(3)", "Train the net"),
        ("import torch\n\n# %% The ring\ni = 0", "The ring"),
        ('"""Adds up.\n\nAll of it."""\nx = 1', "Adds up."),
        ("hvd.init()\nhistory = model.fit(\n    x, y,\n    epochs=3)\nhistory.history", "model.fit(x, y, epochs=3)"),
        ("hvd.init()\ndef train():\n    pass\ntrain()", "train()"),
        ("def train():\n    pass\nprint(train())", "train"),
        ("rank * 2", "rank * 2"),
        ("i = 0\nwhile i < 3:\n    i += 1", "i = 0"),
        ("model = Net()\nfloat(loss)", "model = Net()"),
        ("import torch\nx = 1\n# step by step\nloss.item()", "step by step"),
        ("get_ipython().run_line_magic('run', 'a.ipynb --lr 1')", "%run a.ipynb --lr 1"),
        ("files = get_ipython().getoutput('ls')\nrank", "files = !ls"),
        ("get_ipython().run_line_magic('time', 'model.fit(x)')", "%time model.fit(x)"),
        ("hvd.init()", ""),
        ("1", ""),
        (f"call({'x' * 80})", f"call({'x' * 54}…"),
    ],
)
def test_what_a_cell_says_of_itself(cell, title):
    """The title of a run without a name is taken from the cell. If the cell has no suitable text, it is empty."""
    assert title_of(f"\n{cell}") == title


@pytest.mark.parametrize(
    ("cell", "quiet"),
    [
        ("x = 1\nrank;", True),
        ("rank ;  # a comment\n\n", True),
        ("rank", False),
        ("print(';')", False),
        ("rank; size", False),
    ],
)
def test_cells_that_end_with_a_semicolon(cell, quiet):
    """Such a cell shows no value, as in IPython."""
    assert ends_quietly(cell) == quiet


def test_an_earlier_future_import_applies_to_the_cell():
    """It is on the magic's line, so line numbers stay. Without such an import, that line is empty."""
    flags = types.SimpleNamespace(flags=__future__.annotations.compiler_flag)
    shell = types.SimpleNamespace(compile=flags, transform_cell=lambda cell: cell)
    assert python_source(shell, "horovod", "x: T = 1\n") == "from __future__ import annotations\nx: T = 1\n"
    flags.flags = 0
    assert python_source(shell, "horovod", "x: T = 1\n") == "\nx: T = 1\n"


def test_the_ranks_show_the_warnings_of_the_compiler():
    """Preparing a cell shows none of these warnings, although the cell is parsed again and again."""
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(flags=0), transform_cell=lambda cell: cell, user_ns={"text": "1"}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = python_source(shell, "foreach", "import re\nre.findall('\\d', f'{text}')\n")
        scripts = find_scripts(shell, source)
        assert not depends_on_items(source, {"item"})
        assert title_of(source).startswith("re.findall")
        work = Cell(source, shell.user_ns, scripts)
        found = capture_cell(RunSpec(work, Options(), "plain", "", "", None, ()), work)
    assert [name.name for name in found.table] == ["text"]
