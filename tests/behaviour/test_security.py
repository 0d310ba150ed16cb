"""Tests of what other users of the machine could reach or read during a run."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import psutil

from sparkring.gangs import gang
from sparkring.worker.member.network import free_port

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


LISTENING = """
import psutil

def listening():
    sockets = psutil.Process().net_connections("inet")
    return sorted({each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN})
"""
TORCH = """
import datetime
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier(dist.new_group([0, 1]))
create = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
one, two = (create("localhost", port, 0, 1, datetime.timedelta(seconds=60)) for port in 2 * [ports[rank]])
one.set("key", "value")
found = listening(), two.get("key")
dist.destroy_process_group()
found
"""


def test_the_store_of_torch_listens_on_the_address_of_the_ring(pair):
    """torch itself would have it listen on all interfaces. Gloo, too, listens on the ring's interface only."""
    pair.notebook = {"ports": [free_port("127.0.0.1") for _ in range(2)]}
    assert pair.values(LISTENING + TORCH, framework="torch") == [(["127.0.0.1"], b"value")] * 2
