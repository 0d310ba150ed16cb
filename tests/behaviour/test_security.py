"""Tests of what other users of the machine could reach or read during a run."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import psutil

from sparkring.gangs import gang

SECRET = bytes(range(100, 132))


def test_a_local_run_is_reachable_on_loopback_only_and_keeps_its_secret(local, monkeypatch, tmp_path):
    """All listening sockets are on loopback; the secret is in no command line, environment or saved file."""
    monkeypatch.setattr(gang.secrets, "token_bytes", lambda size: SECRET[:size])
    listening: set[str] = set()
    exposed: list[str] = []
    seen: set[int] = set()
    looked = tmp_path / "looked"

    def look(record):
        if not all(rank.state == "running" for rank in record.ranks) or seen:
            return
        members = [psutil.Process(rank.pid).parent() for rank in record.ranks]
        below = [process for member in members for process in (member, *member.children(recursive=True))]
        for process in (psutil.Process(), *below):
            found = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            listening.update(c.laddr.ip for c in found)
            if process.pid != os.getpid():
                seen.add(process.pid)
                for name in ("cmdline", "environ"):
                    data = Path(f"/proc/{process.pid}/{name}").read_bytes()
                    if SECRET in data or SECRET.hex().encode() in data:
                        exposed.append(f"{process.pid}/{name}")
        looked.touch()

    local.view.on_refresh = look
    cell = "import time\nwhile not looked.exists():\n    time.sleep(0.02)"
    result = local.run(cell, framework="horovod", namespace={"looked": looked})
    assert len(seen) == 4, "two members and two ranks"
    assert listening, "the driver listens"
    assert all(ipaddress.ip_address(address).is_loopback for address in listening), listening
    assert not exposed
    folder = Path(result.record.log_folder)
    assert folder.stat().st_mode & 0o077 == 0
    for path in folder.iterdir():
        data = path.read_bytes()
        assert SECRET not in data
        assert SECRET.hex().encode() not in data
