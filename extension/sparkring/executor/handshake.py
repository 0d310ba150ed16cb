"""The handshake with which a member and the driver prove to each other that they know the gang's secret.

    driver                                   member
      ── greeting + nonce D ──────────────▶
      ◀─ nonce M + HMAC(secret, "member", D, M) ──
      ── HMAC(secret, "driver", M, D) ────▶
      ◀──────────── frames, both ways ─────────▶

The driver's half is in wire/channel.py. The member's half is here, so that a Spark task can use it, too.
"""

from __future__ import annotations

import hmac
import os
import socket

GREETING = b"sparkring/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32


def prove(sock: socket.socket, secret: bytes) -> None:
    """Do the member's half of the handshake. Raise ConnectionError, whose text says what the peer is, if it fails."""
    hello = read_exactly(sock, len(GREETING) + NONCE_BYTES)
    if not hello.startswith(GREETING):
        raise ConnectionError("is not a sparkring driver of this version")
    # Both nonces and the role are part of a proof, so a proof can be neither replayed nor sent back to its sender.
    theirs, ours = hello[len(GREETING) :], os.urandom(NONCE_BYTES)
    sock.sendall(ours + proof_of(secret, b"member", theirs, ours))
    if not hmac.compare_digest(read_exactly(sock, PROOF_BYTES), proof_of(secret, b"driver", ours, theirs)):
        raise ConnectionError("does not know this gang's secret")


def proof_of(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof for a peer with the nonce `first`, by the process in this role with the nonce `second`."""
    return hmac.digest(secret, role + first + second, "sha256")


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raise ConnectionError if the connection ends before."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("closed the connection during the handshake")
        data += more
    return data
