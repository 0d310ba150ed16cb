"""What a gang does with frames, without ranks."""

from __future__ import annotations

import queue

from sparkring import events, gang
from sparkring.channel import Frame
from sparkring.place import World


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
