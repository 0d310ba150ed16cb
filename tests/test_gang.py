"""What a gang does with frames, without ranks."""

from __future__ import annotations

import math
import queue
from dataclasses import replace

from sparkring.gangs import gang
from sparkring.gangs.execution import Request
from sparkring.history import events
from sparkring.launchers.local import LocalLauncher
from sparkring.runtime.world import World
from sparkring.wire.channel import Frame


def test_no_frame_is_lost_however_many_wait(monkeypatch):
    """One poll takes a bounded number of frames, and leaves the others where they are."""
    found = gang.Gang(None, 1)
    found.worlds, found._rank_of = [World()], {0: 0}
    found._inbox = queue.Queue()
    sent = [f"line {number}\n".encode() for number in range(5 * gang.QUEUE_FRAMES)]
    for line in sent:
        found._inbox.put((0, Frame("output", {"stream": "stdout"}, [line])))
    polls = [found.poll(0.0) for _ in range(6)]
    assert [event.data for poll in polls for event in poll if isinstance(event, events.Output)] == sent
    assert len(polls[0]) <= gang.QUEUE_FRAMES + 1


class Home:
    """A connection that takes what is sent and keeps nothing."""

    heard_at = math.inf

    def send(self, kind, fields=None, parts=()):
        pass


def test_each_turn_begins_with_how_the_gpus_were_used():
    """Members tell changes only: what was told during one cell is there in the record of the next."""
    found = gang.Gang(LocalLauncher({}, 1, None), 1)
    found.worlds, found._rank_of, found._member_of = [World()], {0: 0}, {0: 0}
    found._hellos, found._connections = {0: {"pid": 1, "packages": None}}, {0: Home()}
    used = {"address": "0", "name": "NVIDIA", "used_bytes": 5, "total_bytes": 9, "busy_percent": 40}
    found._inbox.put((0, Frame("gpu", used, [])))
    (heard,) = found.poll(0.0)
    found.submit(Request("cell", b"", "plain"))
    again = [event for event in found.poll(0.0) if isinstance(event, events.GpuUsed)]
    assert again == [replace(heard, time=again[0].time)]
