"""Messages are encoded as headers and parts, and decoded unchanged; anything else is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from fake_launcher import CELL, FakeRank, events_until, received, running
from hypothesis import given
from hypothesis import strategies as st
from waiting import DEADLINE_S

from sparkring.capture import notebook_state
from sparkring.capture.packing import pack_call
from sparkring.executor.orders import Ticket
from sparkring.gangs.execution import Execution, Request
from sparkring.gangs.gang import Gang
from sparkring.gangs.reports import as_event
from sparkring.launchers.local import LocalLauncher
from sparkring.runtime.resume_point import Here
from sparkring.runtime.world import World
from sparkring.wire import messages
from sparkring.wire.channel import Connection, pair
from sparkring.wire.messages import MalformedMessage, Message, RankNews, decode, encode
from sparkring.worker.member.member import Member
from sparkring.worker.member.rank_process import RankProcess

NEWS = RankNews(("x", "y"), True, 40_000, 1 << 30, seconds=0.5)
FAILURE = messages.Failure(
    "code",
    "TypeError: no",
    (messages.CodeFrame("<cell>", 2, "f", True, (messages.SourceLine(2, "raise TypeError('no')"),)),),
    "Traceback …",
    "",
    "builtins.TypeError",
)
NOTEBOOK = messages.NotebookState(
    "/usr",
    "/home/u",
    [("", ""), ("/usr/lib/python3.11", "stdlib")],
    {"A": "1", "GONE": None},
    {
        "": messages.Logger(20, True, [messages.Handler("stderr", 0, ("%(message)s", None, "%"))]),
        "theirs": messages.Logger(10, False, None),
        "plain": messages.Logger(10, True, [messages.Handler("stdout", 10, None)]),
    },
    10,
)
SCRIPT = messages.Script("-i a.py x", "a.py", "/home/u/a.py", (("/home/u/a.py", "y = x"),), "x", inside=True)
HERE = Here("checkpoints", 17, "00000001.1-0", "abc", "code", "run-1", ["00000001.1-0"], {"step": 1, "files": []})

EXAMPLES: list[Message] = [
    messages.Stop(15, 0.5),
    messages.Interrupt(),
    messages.TakeStack(),
    messages.RecordTimeline("HOROVOD_TIMELINE", True),
    messages.EnterWorld(World(1, 2, 1, 2, gpus=("0", "1")), "10.0.0.1", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    messages.Run(messages.CellCode("x + 1", (SCRIPT,)), ("x",), True, False, {"A": "1"}, {}, NOTEBOOK, HERE,
                 (b"payload", b"", b"b")),
    messages.Run(messages.FunctionCall(), notebook=NOTEBOOK, checkpoints=HERE, parts=(b"call",)),
    messages.Run(messages.NextItem((SCRIPT,), 2**32 - 1, True), notebook=NOTEBOOK, checkpoints=HERE, parts=(b"item",)),
    messages.Run(messages.NextBatch(17), notebook=NOTEBOOK, checkpoints=HERE, parts=(b"batch",)),
    messages.ModuleFiles(("features",), zlib.compress(pickle.dumps({"features.py": b"x = 1"}))),
    messages.LackingPackages(("tomli",), {"sklearn": "scikit-learn==1.5.0"}, (),
                             zlib.compress(pickle.dumps({"tomli.py": b"x = 1"}))),
    messages.Work(messages.CellCode("x + 1", (SCRIPT,)), False, {"A": "1"}, NOTEBOOK, (b"payload", b"b")),
    messages.Work(messages.FunctionCall(), False, {"A": "1"}, NOTEBOOK, (b"payload", b"b")),
    messages.Work(messages.StreamCode("x + 1", (SCRIPT,)), notebook=NOTEBOOK, parts=(b"payload", b"b")),
    messages.Release(),
    messages.Gathered(("a", ""), True),
    messages.EndItem(),
    messages.SaveSoon(),
    messages.SaveSoon(19),
    messages.GoNow(),
    messages.GiveBack(),
    messages.Answer(1, "Ann"),
    messages.Answer(2, None),
    messages.Leave(),
    messages.SetEnvironment({"HOROVOD_TIMELINE": "/tmp/t.json"}),
    messages.Hello(0, 4711, "höst", "10.0.0.1", "eth0", 40_000, "/usr/bin/python3", ("0",), {"numpy": "1.26"}),
    messages.Hello(1, 4712, "host", "::1", "", 1, "", (), None),
    messages.Beat(),
    messages.Output("stderr", b"bytes \xff\n"),
    messages.GpuUsed("0", "NVIDIA", 5, 9, None),
    messages.GpuTrouble("0", "NVIDIA", 79, True),
    messages.RankUsed(97, 1 << 30, 8, 1 << 36),
    messages.Stack("running", "File …"),
    messages.GivenBack(3),
    messages.TimelinePart(b"zlib", True, 7),
    messages.Exited(None, 9, True, 1 << 40),
    messages.Exited(3, None, False, 0),
    messages.Done((messages.PackedValue("", "int", 2, ""), messages.PackedValue("x", "lock", 0, "no")), ("y",), "1",
                  NEWS, (b"1", b"2")),
    messages.Failed(FAILURE, NEWS),
    messages.Importing(),
    messages.TrainsAlone("torch", True, False),
    messages.HostGoing(30.0),
    messages.ModelWeights("Linear", "torch", 6, -0.5, 2.5),
    messages.SavePoint(18),
    messages.SavePoint(19, saved=True),
    messages.StoredKey("global", "0", b"address"),
    messages.Gather("allGather", "text"),
    messages.CollectivesEnded(),
    messages.TrainsAlone("torch", connected=True, ended=False),
    messages.UserMessage("text"),
    messages.CommandFailed("python train.py", 1),
    messages.InputRequested(1, "name? ", True),
    messages.InputEnded(1),
    messages.Metrics({"loss": 0.5, "nan": float("inf")}, step=3, epoch=None, steps=10, iterations=(1, 8)),
    messages.Displayed(1, "image/png", b"png", "<Figure>", 3, item=7),
    messages.ItemMeasured(1.5, 0.5, 1.0, 10, 20, 30, 40, 2, 50, 60, 240, 32),
    messages.DataOpened(0, "data", "parquet", ("a", "b"), "a > 1", "v1", 2, 4, 100, 1000, 32),
    messages.DataPlanned(0, 1, (messages.Piece(0, -1, 10), messages.Piece(1, 3, 5, 2)), ((0, "a"),), 3, 9),
    messages.DataRead(0, 1, 10, 2, 1000, None, 5, 0.1, 2.0, "part-0, row group 1 of 2", False),
    messages.CheckpointSaved("dir", "00000001", 1, 10, 0.5, 0.1, {"loss": 1.0}, True, "keras"),
    messages.CheckpointFailed("dir", 1, "disk full"),
    messages.CheckpointDamaged("dir", "00000001", 1, "cut"),
    messages.CheckpointRestored("dir", "00000001", 1, 0.5),
    messages.CheckpointRemoved("dir", "00000001"),
    messages.AtLine(3, ("<cell>:3 <module>",), (1, 8)),
    messages.TracePart(b"trace", 1, True, 5),
    messages.TimeSpent(
        120, 9.6, {"data": 0.6}, (messages.SpentAt("data", "DataLoader", (messages.UserCall("load", 8),), 0.6),)
    ),
    messages.ModelUsed("1f2e", "host", 4711, None, ()),
    messages.ModelUsed("1f2e", "host", 4711, 0.5, (messages.TaskScored(3, 17, "5", 2, 9, 99, 1, 0.5, "failed", "no"),)),
    messages.ModelUsed("1f2e", "host", 4711, 0.5, (), messages.CheckpointUsed(137, 0.2, 1, 99, 1, "damaged", "5c1d")),
]  # fmt: skip


EXAMPLES_BY_KIND = {type(each): [example for example in EXAMPLES if type(example) is type(each)] for each in EXAMPLES}


def name_of(message: Message) -> str:
    return type(message).__name__


def header(message: Message) -> dict[str, Any]:
    """Return the message's fields as they are read from the frame."""
    found: dict[str, Any] = json.loads(json.dumps(encode(message)[0]))
    return found


def test_there_is_an_example_of_each():
    assert {type(example) for example in EXAMPLES} == set(messages.KINDS.values()) == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_a_message_comes_back_the_same(message):
    """Nested values keep their types, and parts their order."""
    again = decode(type(message), header(message), encode(message)[1])
    assert again == message
    assert type(again) is type(message)


def test_every_message_passes_through_a_connection():
    """No message has a field that the frame's own header overwrites."""
    left, right = pair()
    with contextlib.closing(left), contextlib.closing(right):
        for message in EXAMPLES:
            left.send(message)
            assert right.receive() == message


def examples_of(union: object) -> list[Message]:
    """Return the examples of all classes of a union. A class without an example is an error."""
    return [example for kind in get_args(union) for example in EXAMPLES_BY_KIND[kind]]


BOTH_WAYS = set(get_args(messages.Report)) & set(get_args(messages.PassedOn))


class Between:
    """A member of this process, between a driver and a rank, whose process only sleeps."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            home = socket.create_connection(server.getsockname())
            self.driver = Connection(server.accept()[0])
        self.sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
        ours, self.rank = pair()
        (out, self.out), (err, self.err), (stacks, self.stacks) = os.pipe(), os.pipe(), os.pipe()
        os.set_blocking(stacks, False)
        self.open = [out, err, stacks, self.out, self.err, self.stacks]
        ticket = Ticket(0, "127.0.0.1", 1, "", [], [], sys.prefix)
        process = RankProcess(self.sleeper.pid, ours, out, err, stacks)
        self.member = Member(ticket, process, lambda: False, Connection(home))
        selectors = self.member.control, self.member.output.selector
        self.ends = [ours, self.rank, self.driver, self.member.home, *selectors]
        assert isinstance(self.driver.receive(), messages.Hello)

    def close(self) -> None:
        self.sleeper.kill()
        self.sleeper.wait()
        for end in self.ends:
            end.close()
        for fd in self.open:
            os.close(fd)


@pytest.fixture
def between() -> Iterator[Between]:
    with contextlib.closing(Between()) as found:
        yield found


@pytest.mark.parametrize("order", examples_of(messages.PassedOn | messages.EnterWorld), ids=name_of)
def test_a_member_passes_an_order_on(between, order):
    """What is in the union arrives at the rank unchanged."""
    between.driver.send(order)
    between.member.from_home()
    assert between.rank.receive() == order


@pytest.mark.parametrize("order", examples_of(messages.MemberOrder), ids=name_of)
def test_a_member_obeys_an_order(between, order):
    """Each order has an effect: on the rank's process, or an answer to the driver or a message to the rank."""
    between.driver.send(order)
    between.member.from_home()
    match order:
        case messages.Stop():
            assert between.sleeper.wait(DEADLINE_S) == -order.signal
            assert between.member.rank.kill_at is not None
        case messages.Interrupt():
            assert between.sleeper.wait(DEADLINE_S) == -signal.SIGINT
        case messages.GiveBack():
            assert between.driver.receive() == messages.GivenBack(0)
        case messages.TakeStack():
            assert isinstance(between.driver.receive(), messages.Stack)
        case messages.RecordTimeline():
            (variable,) = between.rank.receive().variables
            assert variable == order.variable
            between.member.timeline.remove()
        case messages.EnterWorld():
            assert between.member.world == order.world
        case _:
            messages.never(order)


@pytest.mark.parametrize("report", examples_of(messages.RankReport), ids=name_of)
def test_a_member_passes_a_report_on(between, report):
    between.rank.send(report)
    between.member.from_rank()
    assert between.driver.receive() == report


@pytest.mark.parametrize(
    "message",
    [message for message in examples_of(messages.Report | messages.ModelUsed) if type(message) not in BOTH_WAYS],
    ids=name_of,
)
def test_a_member_refuses_what_is_not_an_order(between, message):
    between.driver.send(message)
    with pytest.raises(SystemExit):  # the member ends
        between.member.from_home()


def test_a_gang_takes_every_report():
    """What the record keeps arrives as an event; the other reports do not end the connection."""
    sent = [each for each in examples_of(messages.Report) if not isinstance(each, messages.Hello | messages.Exited)]
    sent = [each for each in sent if not isinstance(each, messages.RequestEnd)]  # the fake rank sends one

    def cell(rank: FakeRank) -> None:
        for report in sent:
            rank.tell(report)

    with running(cell, 1) as gang:
        execution = gang.submit(CELL)
        found = events_until(lambda: execution.done, gang)
        assert not gang.deaths
    kept = [each for each in sent if isinstance(each, messages.Kept)]
    arrived = [event._replace(time=0.0, rank=0) for event in found if isinstance(event, messages.Kept)]
    assert arrived == kept


def test_a_rank_takes_every_order():
    """A real rank still runs calls after any order for a rank, and leaves when it is told to."""
    packed = pack_call(len, {}, None, ("four",))
    call = messages.Run(messages.FunctionCall(), parts=(packed.payload, *packed.buffers))
    orders = [each for each in examples_of(messages.PassedOn) if not isinstance(each, messages.Leave)]
    orders.sort(key=lambda order: isinstance(order, messages.Run))  # they need the Work

    with contextlib.closing(Gang(LocalLauncher({}, 1, 0), 1)) as gang:

        def submit() -> Execution:
            execution = gang.submit(Request(call, "plain"))
            events_until(lambda: execution.done or execution.failures, gang)
            assert execution.done, execution.failures
            return execution

        gang.start()  # the rank gets EnterWorld
        for order in [messages.RecordTimeline("VARIABLE", wanted=False), *orders]:  # the rank gets SetEnvironment
            before = submit()
            gang._outbox.send(0, order)
            if isinstance(order, messages.Run):  # its parts are no pickles
                events_until(lambda failures=before.failures: failures, gang)
        submit()
        gang.leave()
        events_until(lambda: gang.gone, gang)
        assert not gang.deaths


@pytest.mark.parametrize("message", [each for each in EXAMPLES if each], ids=name_of)
def test_a_field_too_few_or_too_many(message):
    fields, parts = header(message), encode(message)[1]
    for name in fields:
        with pytest.raises(MalformedMessage, match=name):
            decode(type(message), {key: value for key, value in fields.items() if key != name}, parts)
    with pytest.raises(MalformedMessage, match="surplus"):
        decode(type(message), {**fields, "surplus": 1}, parts)


@pytest.mark.parametrize("message", EXAMPLES, ids=name_of)
def test_a_part_too_many_or_too_few(message):
    """A wrong number of parts is refused. Only a request may have any number of parts, if it has at least one."""
    fields, parts = header(message), encode(message)[1]
    wrong = [[*parts, b""], *([parts[:-1]] if parts else [])]
    if isinstance(message, messages.Run | messages.Work):
        wrong = [[]]
    for each in wrong:
        with pytest.raises(MalformedMessage, match=r"part|payload"):
            decode(type(message), fields, each)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in the JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


@pytest.mark.parametrize("message", [each for each in EXAMPLES if encode(each)[0]], ids=name_of)
def test_a_value_of_another_type(message):
    """A wrong type is refused anywhere except in a checkpoint's commit, which is passed on as it is."""
    for path in places(header(message))[1:]:
        if "checkpoints" in path and 7 in path:
            continue
        fields = header(message)
        holder = fields
        for key in path[:-1]:
            holder = holder[key]
        for wrong in ({"no": 1}, ["no", 1, None], "\0", 1 << 70, -1, True):
            right = holder[path[-1]]
            if type(right) is type(wrong) or (right is None and type(wrong) in (str, int)):
                continue
            holder[path[-1]] = copy.deepcopy(wrong)
            if type(wrong) is int and type(right) is float:
                decode(type(message), fields, encode(message)[1])  # an int is accepted as a float
            else:
                with pytest.raises(MalformedMessage):
                    decode(type(message), fields, encode(message)[1])
            holder[path[-1]] = right


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (messages.Hello, {"member": -1}),
        (messages.Hello, {"port": 0}),
        (messages.Hello, {"port": 1 << 16}),
        (messages.Hello, {"pid": 1 << 63}),
        (messages.Stop, {"signal": 0}),
        (messages.Stop, {"signal": 65}),
        (messages.Stop, {"grace_s": 10**400}),
        (messages.Output, {"stream": "stdin"}),
        (messages.Displayed, {"mime_type": "text/javascript"}),
        (messages.Displayed, {"number": -1}),
        (messages.Run, {"what": ["Stop", 15, 0.5]}),
        (messages.Run, {"what": []}),
        (messages.Run, {"what": ["FunctionCall", 1]}),
        (messages.Run, {"what": ["NextBatch", 1 << 32]}),
        (messages.Work, {"what": ["NextItem", [], 0, False]}),
        (messages.Exited, {"signal": -9}),
        (messages.DataOpened, {"kind": "csv"}),
        (messages.DataPlanned, {"pieces": [[0, -2, 1, 1]]}),
        (messages.DataPlanned, {"pieces": [[0, 1, 1]]}),
        (messages.CheckpointSaved, {"kind": "pickle"}),
        (messages.Done, {"values": [["", "int", 1, ""]]}),
        (messages.Done, {"news": [["x"], True, 0]}),
    ],
)
def test_a_value_out_of_range(kind, change):
    example = next(each for each in EXAMPLES if type(each) is kind)
    with pytest.raises(MalformedMessage):
        decode(kind, {**header(example), **change}, encode(example)[1])


def test_whatever_a_notebook_has_set_up_can_be_sent(monkeypatch):
    """The state can be sent even if loggers' attributes have types that logging itself would not give them."""
    odd = logging.getLogger("odd")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.formatter._fmt = handler.formatter.datefmt = handler.level = object()
    for name, value in {"propagate": 0, "level": "INFO", "handlers": [handler]}.items():
        monkeypatch.setattr(odd, name, value)
    monkeypatch.setenv("AN_OWN_VARIABLE", "1")
    request = next(example for example in EXAMPLES if isinstance(example, messages.Run))
    found = received(request._replace(notebook=notebook_state.gather()))
    assert found.notebook.loggers["odd"] == (0, False, [("stdout", 0, (None, None, "%"))])
    assert found.notebook.environment["AN_OWN_VARIABLE"] == "1"


TEXT = st.sampled_from(["", "x", "stdout", "cell", "\x00", "ü"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_whatever_comes_is_a_message_or_refused(message, data):
    """decode() raises only MalformedMessage; a message that it accepts is encoded to the same fields again."""
    fields = header(message)
    for name in data.draw(st.sets(st.sampled_from(sorted(fields)))) if fields else ():
        fields[name] = data.draw(JSON)
    parts = data.draw(st.lists(st.binary(max_size=3), max_size=3))
    try:
        found = decode(type(message), fields, parts)
    except MalformedMessage:
        return
    again = json.loads(json.dumps(encode(found)[0]))
    assert json.dumps(again, sort_keys=True) == json.dumps(header(found), sort_keys=True)
    assert encode(found)[1] == parts


@pytest.mark.parametrize(
    "message", [each for each in EXAMPLES if isinstance(each, messages.Kept | messages.Stack)], ids=name_of
)
def test_what_is_told_becomes_an_event(message):
    """Each field of the message becomes the event's field of the same name, and the event is saved."""
    event = as_event(5.0, 3, message)
    assert (event.time, event.rank) == (5.0, 3)
    for name, value in message._asdict().items():
        assert name in ("time", "rank") or getattr(event, name) == value
    assert list not in map(type, event), "events are frozen"
