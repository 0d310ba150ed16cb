"""Where the time of real ranks goes, and whom the others wait for."""

from __future__ import annotations

import pytest

from sparkring.history.describe import verdict, verdict_words, verdicts

STEPS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")

def augment():
    if rank in slow:
        time.sleep(0.1)

def step():
    dist.all_reduce(torch.zeros(100))

until, over = time.time() + lasts_s, torch.zeros(1)
while not over:
    augment()
    step()
    over[0] = time.time() > until
    dist.all_reduce(over)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def few_looks(monkeypatch):
    """Some seconds are enough for what is tested here."""
    monkeypatch.setattr(verdicts, "ENOUGH_LOOKS", 25)


def test_a_slow_function_on_one_rank_is_named(pair):
    """Its time and its line arrive while the cell runs. The next cell starts at zero, and nobody is accused in it."""
    early = []
    pair.view.on_refresh = lambda record: early.append(record.ranks[1].spent)
    record = pair.run(STEPS, namespace={"slow": (1,), "lasts_s": 4.0}, framework="torch").record
    judged = verdict(record)
    assert (judged.kind, judged.ranks) == ("slow rank", (1,)), record.ranks
    assert "augment" in [call.function for call in judged.place.calls]
    assert any(early), "nothing was told before the end"
    spent = record.ranks[1].spent
    assert spent.phases["idle"] > spent.phases.get("collective", 0.0)
    record = pair.run(STEPS, namespace={"slow": (), "lasts_s": 3.0}, framework="torch").record
    assert 0 < record.ranks[1].spent.elapsed_s <= record.ended - record.started, "the cell before does not count"
    judged = verdict(record)
    assert judged is None or judged.kind != "slow rank", verdict_words(record)


def test_no_profile_and_quick_cells(pair):
    record = pair.run("import time\ntime.sleep(1.2)", profile=False).record
    assert [rank.spent for rank in record.ranks] == [None, None]
    record = pair.run("pass").record
    assert [rank.spent for rank in record.ranks] == [None, None]


def test_a_forked_child_tells_nothing(pair):
    record = pair.run("""
        import os, time
        child = os.fork()
        time.sleep(1.2)
        if child:
            os.waitpid(child, 0)
    """).record
    assert all(rank.spent.phases["idle"] > 0.9 for rank in record.ranks)
    assert all(rank.state == "finished" for rank in record.ranks)
