"""Tests of the summary of Horovod's timeline, from files with known operations, and from other files."""

from __future__ import annotations

import io
import json
import random
import zlib

import pytest

from sparkring.history import horovod_timeline
from sparkring.history.horovod_timeline import Arriving, Scanner


def event(kind: str, at: float, name: str = "", pid: int = 1) -> str:
    return json.dumps({"ph": kind, "ts": at, "pid": pid} | ({"name": name} if name else {}))


def named(name: str, pid: int = 1) -> str:
    """Return the event that names a tensor, as Horovod writes it, without escaping the name."""
    return f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{name}"}}}}'


def operation(begin: float, *, pid: int = 1, late: int = 1, ready: dict[int, float] | None = None) -> list[str]:
    """Return the events of an allreduce: 100 µs negotiating, 10 waiting, 5 copying, 20 reducing, 1 idle, 5 copying."""
    ready = ready or {0: 1, late: 99}
    ticks = [event("X", begin + at, str(rank), pid) for rank, at in ready.items()]
    begin_end = begin + 100
    steps: list[str] = []
    for name, begun, ended in (
        ("WAIT_FOR_DATA", 0, 10),
        ("MEMCPY_IN_FUSION_BUFFER", 10, 15),
        ("GLOO_ALLREDUCE", 15, 35),
        ("MEMCPY_OUT_FUSION_BUFFER", 36, 41),
    ):
        steps += [event("B", begin_end + begun, name, pid), event("E", begin_end + ended, pid=pid)]
    return [
        event("B", begin, "NEGOTIATE_ALLREDUCE", pid),
        *ticks,
        event("E", begin_end, pid=pid),
        event("B", begin_end, "ALLREDUCE", pid),
        *steps,
        event("E", begin_end + 41, pid=pid),
    ]


def written(events: list[str], *, ended: bool = True) -> bytes:
    return ("[\n" + ",\n".join(events) + ("]" if ended else "")).encode()


def brought(data: bytes, *, piece: int = 10_000, cut: int = 0, whole: bool = True):
    """Return the summary of a timeline that arrives in pieces, as at the driver, and the content of the saved file."""
    packer = zlib.compressobj(1)
    packed = packer.compress(data) + packer.flush()

    class Kept(io.StringIO):
        def close(self) -> None:
            kept.append(self.getvalue())
            super().close()

    kept: list[str] = []
    arriving = Arriving(Kept())
    for at in range(0, len(packed), piece):
        arriving.add(packed[at : at + piece])
    found = arriving.end(5.0, "timeline.json", 1, whole=whole, cut=cut)
    return found, kept[0]


def summary(data: bytes):
    return brought(data)[0]


def test_where_the_time_went():
    """Each phase of an operation counts. The time between operations counts as time elsewhere."""
    found = summary(written([named("grad"), *operation(0), *operation(1000)]))
    assert (found.operations, found.tensors, found.problem) == (2, 1, "")
    assert found.wall_s == pytest.approx(1141e-6)
    parts = (found.negotiating_s, found.waiting_s, found.copying_s, found.reducing_s, found.elsewhere_s)
    assert parts == pytest.approx((200e-6, 20e-6, 20e-6, 42e-6, 859e-6))
    (tensor,) = found.slowest
    assert (tensor.name, tensor.count) == ("grad", 2)
    assert tensor.total_s == pytest.approx(282e-6)


def test_what_happens_at_once_counts_once_in_the_whole_and_apart_by_tensor():
    """If two tensors are being processed, the total counts the more advanced one. The parts add up to the wall time."""
    apart = operation(0) + operation(50, pid=2)
    events = sorted(apart, key=lambda text: json.loads(text)["ts"])
    found = summary(written([named("a"), named("b", 2), *events]))
    assert found.wall_s == pytest.approx(191e-6)
    parts = (found.negotiating_s, found.waiting_s, found.copying_s, found.reducing_s, found.elsewhere_s)
    assert sum(parts) == pytest.approx(found.wall_s)
    assert found.negotiating_s == pytest.approx(109e-6)  # 100 µs before the first tensor is ready, 9 after its end
    assert [tensor.negotiating_s for tensor in found.slowest] == pytest.approx([100e-6, 100e-6])


def test_who_was_late():
    """The wait for the last rank begins when the second-to-last rank is ready. Overlapping waits count once."""
    one = operation(0, ready={0: 10, 2: 40, 1: 90})
    other = operation(0, pid=2, ready={2: 5, 0: 60, 1: 95})
    third = operation(1000, ready={0: 10, 1: 20, 2: 80})
    both = sorted(one + other, key=lambda text: json.loads(text)["ts"])
    found = summary(written([*both, *third]))
    # Others waited for rank 1 from 40 to 90 and from 60 to 95, and for rank 2 from 20 to 80.
    assert [(each.rank, each.times) for each in found.late] == [(2, 1), (1, 2)]
    assert [each.waited_s for each in found.late] == pytest.approx([60e-6, 55e-6])


@pytest.mark.parametrize("piece", [1, 7, 100, 100_000])
def test_pieces_make_no_difference(piece):
    """Wherever the data is split into pieces, the summary and the saved file are the same."""
    data = written([named("grä\\u00fc"), *operation(0), *operation(500, pid=2)])
    found, text = brought(data, piece=piece)
    assert found == summary(data)
    assert len(json.loads(text)) == 1 + 2 * 14
    assert found.operations == 2


def test_a_cut_file_is_made_whole():
    """A file that is cut off at any byte is kept as valid JSON, with every complete event."""
    data = written([named("a"), *operation(0)])
    for end in range(2, len(data)):
        found, text = brought(data[:end])
        events = json.loads(text)
        assert [json.dumps(each) for each in events] == [
            json.dumps(json.loads(each)) for each in ([named("a"), *operation(0)][: len(events)])
        ]
        assert found.size_bytes == len(text)
    assert len(events) == 15
    assert "no completed operation" in brought(data[:200])[0].problem


def test_names_that_horovod_does_not_escape():
    """A quotation mark in a tensor's name breaks Horovod's JSON, but the saved file is valid."""
    found, text = brought(written([named('w"<b>{"ph": "B"}'), *operation(0)]))
    assert found.problem == ""
    assert found.slowest[0].name == 'w"<b>{"ph": "B"}'
    assert len(json.loads(text)) == 15


HOSTILE = {
    "nothing": b"",
    "an end alone": b"]",
    "text": b"hello " * 1000,
    "bytes": random.Random(1).randbytes(300_000),
    "deep": b'[{"ph":' + b"[" * 200_000,
    "deeper": b'{"a":' * 100_000,
    "braces": b"{" * 500_000,
    "no number": written([named("a"), '{"ph": "B", "ts": NaN, "pid": 1}', '{"ph": "B", "ts": 1e999, "pid": 1}']),
    "a long number": b'[{"ph": "B", "ts": ' + b"9" * 10_000 + b"}]",
    "other types": json.dumps(
        [
            {"ph": "B", "ts": "x", "pid": 1},
            {"ph": "B", "ts": True, "pid": [1]},
            {"ph": ["B"], "ts": 1, "pid": 1},
            {"ph": "M", "pid": 1, "name": "process_name", "args": "x"},
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": {}}},
            {"ph": "E", "ts": 5, "pid": 1},
            {"ph": "X", "ts": 5, "pid": 1, "name": "99999999999"},
            {"ph": "X", "ts": 5, "pid": 1, "name": 7},
            {"ph": "B", "ts": -5, "pid": 1, "name": None},
            17,
            None,
            "text",
        ]
    ).encode(),
    "never ended": written([event("B", at, "NEGOTIATE_ALLREDUCE") for at in range(1000)]),
    "backwards": written([event("B", 9, "ALLREDUCE"), event("E", 3), event("E", 1)]),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_timeline(data):
    """No error is raised. The summary says what is wrong, and the file is valid JSON."""
    found, text = brought(data)
    assert isinstance(json.loads(text), list)
    assert found.wall_s >= 0
    assert found.problem or found.operations


def test_broken_places_are_counted_and_passed_over():
    """Operations before and after broken parts are read."""
    garbage = "}{ not JSON" + " " * horovod_timeline.EVENT_CHARACTERS
    found, text = brought(written([*operation(0), garbage, garbage, *operation(1000)]))
    assert found.operations == 2
    assert "cannot be read" in found.problem
    assert len(json.loads(text)) == 28


def test_memory_is_bounded(monkeypatch):
    """Tensors beyond the limit are ignored, a zip bomb is not unpacked whole, and an endless event is not kept."""
    monkeypatch.setattr(horovod_timeline, "TENSORS", 10)
    monkeypatch.setattr(horovod_timeline, "MOST_BYTES", 100_000)
    many = [each for pid in range(100) for each in operation(pid * 1000, pid=pid)]
    found = summary(written(many))
    assert (found.tensors, found.operations) == (10, 10)
    assert len(found.slowest) <= horovod_timeline.SLOWEST
    bomb, text = brought(b"[" + b" " * 50_000_000)
    assert len(text) < 100
    assert "no completed operation" in bomb.problem
    scanner = Scanner()
    list(scanner.feed(b'[{"ph": "' + b"x" * 10_000_000))
    assert len(scanner._rest) <= horovod_timeline.EVENT_CHARACTERS


def test_what_is_missing_is_said():
    """A lost connection, a file that was too large to keep, and a damaged stream are reported."""
    data = written(operation(0))
    assert brought(data)[0].problem == ""
    assert "was lost" in brought(data, whole=False)[0].problem
    assert "too large" in brought(data, cut=5 * 2**20)[0].problem
    arriving = Arriving(io.StringIO())
    arriving.add(b"this is no zlib stream")
    assert "was lost" in arriving.end(0.0, "t", 1, whole=True, cut=0).problem
