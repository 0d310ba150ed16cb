"""Sends the driver's messages to the members, and keeps those that cannot be sent yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

from sparkring.wire.channel import ChannelClosed, Connection
from sparkring.wire.messages import Message, Run, Work

SMALL_BYTES = 64 * 1024  # a payload of this size fits into the system's buffers, so sending it needs no thread


class Outbox:
    """Sends messages to members, in order, without waiting for a member that is slow to take them.

    A large request is sent by a thread of its own, so that the driver can go on, and so that several members receive
    requests at the same time. Later messages to the same member wait until the request is sent.
    """

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = connections
        self._waiting: dict[int, list[Message]] = {}  # by member, the messages that its thread has to send
        self._senders: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def sends_to(self, member: int) -> bool:
        """Whether a large message is still being sent to the member."""
        sender = self._senders.get(member)
        return sender is not None and sender.is_alive()

    def send(self, member: int, message: Message, *, hold: bool = False) -> None:
        """Send a message to a member. If the connection has ended, the thread that reads from it reports this.

        With `hold`, a small message may wait until the next message to the member, or until send_held() is called.
        """
        with self._lock:
            if member in self._waiting:  # the member's thread sends the message later, or never if the rank is frozen
                self._waiting[member].append(message)
                return
            if isinstance(message, Work | Run) and sum(map(len, message.parts)) > SMALL_BYTES:
                self._waiting[member] = [message]
                sender = threading.Thread(target=self._empty, args=(member,), name="sparkring-send", daemon=True)
                self._senders[member] = sender
                sender.start()
                return
        self._post(member, message, hold=hold)

    def send_held(self) -> None:
        """Send the messages that are waiting because of `hold`."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(ChannelClosed):
                connection.send_held()

    def send_all(self, message: Message) -> None:
        for member in list(self._connections):
            self.send(member, message)

    def join(self) -> None:
        """Wait for the threads to end, once the connections are closed."""
        for sender in self._senders.values():
            sender.join()

    def _empty(self, member: int) -> None:
        """Send the messages that are waiting for a member, until none are left. This runs in a thread of its own."""
        while True:
            with self._lock:
                if not self._waiting[member]:
                    del self._waiting[member]
                    return
                message = self._waiting[member].pop(0)
            self._post(member, message)  # without the lock, so that other members get their messages meanwhile

    def _post(self, member: int, message: Message, *, hold: bool = False) -> None:
        with contextlib.suppress(ChannelClosed):
            self._connections[member].send(message, hold=hold)
