"""A process that saves all the time is killed again and again. No checkpoint that it reported as saved is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from waiting import PACE

import sparkring

KILLS = settings().max_examples  # make test-all has more

# A process that has imported all modules, and forks the processes to be killed.
NURSERY = '''
import json, os, random, signal, sys, time
import numpy as np
from sparkring.checkpointing import folder, tensors
from sparkring.checkpointing.store import checkpoints

tensors.CHUNK_BYTES = 20_000
tensors.sync = lambda descriptor: None  # a killed process loses nothing that it has written: only a power cut would

folders, kills = sys.argv[1], int(sys.argv[2])
A_FOLDER = 25  # kills in one directory

def state_of(step):
    return {"weights": np.arange(60_000) * (step + 0.5), "bias": np.full(500, step), "step": step}

def restored():
    folder._remembered.clear()
    state = state_of(0)
    step = checkpoints(directory, keep=3).restore(state)
    wanted = state_of(step)
    whole = all(np.asarray(state[key]).tobytes() == np.asarray(wanted[key]).tobytes() for key in wanted)
    return step, whole

def train(told):
    """Save until this process is killed, and report each step that is saved."""
    state = state_of(0)
    store = checkpoints(directory, keep=3)
    step = store.restore(state)
    os.write(told, b"begun\\n")
    while True:
        step += 1
        store.save(step, state_of(step))
        if step % 2:  # the other saves are still unfinished when the next one begins
            store.wait()
            os.write(told, b"%d\\n" % step)

rng = random.Random(7)
found = {"corrupt": 0, "lost": 0, "saved": 0, "in_a_save": 0, "kinds": {}}
usual_s = 0.01  # the usual time from one reported step to the next
for number in range(kills):
    if number % A_FOLDER == 0:
        directory, last = f"{folders}/{number}", 0
    hear, told = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(hear)
        try:
            train(told)
        finally:
            os._exit(3)
    os.close(told)
    heard, began, told_steps = b"", None, rng.randrange(3)
    while heard.count(b"\\n") <= told_steps:
        piece = os.read(hear, 100)
        assert piece, "the training ended by itself"
        heard += piece
        now = time.monotonic()
        if began is None:  # the first lines may arrive together
            began = now
    if told_steps:
        usual_s = 0.8 * usual_s + 0.2 * (now - began) / told_steps
    time.sleep(rng.random() * usual_s)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "the training ended by itself"
    while piece := os.read(hear, 10_000):
        heard += piece
    os.close(hear)
    lines = heard.split(b"\\n")[:-1]
    last = max([last, *(int(line) for line in lines if line != b"begun")])
    try:
        step, whole = restored()
    except Exception as error:
        print(error, file=sys.stderr)
        found["corrupt"] += 1
        continue
    found["corrupt"] += not whole
    found["lost"] += step < last
    found["saved"] += len(lines) - 1
    kinds = [entry.state for entry in checkpoints(directory).list()]
    found["in_a_save"] += bool(kinds) and kinds[0] != "committed"
    last = step
found["last"] = last
print(json.dumps(found))
'''


@pytest.mark.slow
def test_nothing_is_lost_whenever_it_is_killed(tmp_path, capsys):
    """The restored state is a saved one, and is not older than the last state that was reported as saved."""
    done = subprocess.run(
        [sys.executable, "-c", NURSERY, str(tmp_path / "run1"), str(KILLS)],
        env={**os.environ, "PYTHONPATH": str(Path(sparkring.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300 * PACE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n{KILLS} kills, {found['in_a_save']} of them within a save: {found['saved']} steps reported, "
              f"{found['corrupt']} corrupt, {found['lost']} lost")  # fmt: skip
    assert (found["corrupt"], found["lost"]) == (0, 0), done.stderr
    assert found["saved"] > KILLS // 4, "hardly anything was saved between the kills"
    assert found["in_a_save"] > KILLS // 20, "too few kills happened during a save"
