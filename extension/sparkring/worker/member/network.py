"""Finds a free port and a network interface, through which the ranks of some frameworks connect to each other."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

_ON_MACOS = sys.platform == "darwin"
_SIOCGIFADDR = 0xC0206921 if _ON_MACOS else 0x8915
_LOOPBACK = "lo0" if _ON_MACOS else "lo"


def free_port(address: str) -> int:
    """Return a port that is free on `address`. For a while, the system does not choose the same port again."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address; '' if that is not known."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        try:
            with open("/proc/net/if_inet6") as file:
                return next((fields[5] for fields in map(str.split, file) if fields[0] == packed), "")
        except OSError:  # macOS has no /proc
            return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return _LOOPBACK if address.startswith("127.") else ""
