"""A run with --checkpoint-dir continues from its checkpoint, after a lost rank and when its cell is run again."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from spares import prepared, ready
from texts import mentions
from waiting import until

from sparkring import shards
from sparkring.errors import CheckpointError, RunFailed

COUNT = """
import os, signal, time
from sparkring import checkpoints
store = checkpoints(keep=3)
state = {"sum": 0}
begun = step = store.restore(state)
while step < last:
    step += 1
    state["sum"] += step
    if step % 10 == 0:
        store.save(step, state, {"loss": 1 / step})
        store.wait()
    while rank == 0 and begun == 0 and dies_at and step > dies_at and step % 10 == 0:
        time.sleep(1)  # until rank 1 dies: how far rank 0 gets must not depend on the machine
    if rank == 1 and begun == 0 and step == dies_at:
        while store.latest() is None or store.latest().step < step - 9:
            pass  # rank 0 may not have got as far
        os.kill(os.getpid(), signal.SIGKILL)
begun, step, state["sum"]
"""


@pytest.fixture
def count(ring, tmp_path):
    """Runs COUNT, which sums up the steps, with the same directory each time."""

    def run(source=COUNT, last=40, dies_at=0, n=2, **options):
        resume = not options.get("fresh")  # even if `last` has changed
        options = {"checkpoint_dir": str(tmp_path / "run"), "max_restarts": 2, "resume": resume, **options}
        return ring.run(source, n, namespace={"last": last, "dies_at": dies_at}, **options)

    return run


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: name.partition(".")[2])


@pytest.mark.standalone("a stage that has failed is started again on executors")
def test_the_next_attempt_goes_on(count, tmp_path):
    """The second attempt continues from the last checkpoint. The record says so, and lists all checkpoints."""
    result = count(dies_at=25)
    assert [value[1:] for value in result.values] == [(40, 820)] * 2
    begun = {value[0] for value in result.values}
    assert len(begun & {20, 30, 40}) == 1, "rank 0 may have been ahead of rank 1, but both continue from the same step"
    first, second = result.record.attempts
    assert (first.step, first.failure.summary) == (0, "killed by SIGKILL")
    assert {second.step} == begun
    assert second.restored >= second.started
    saved = [(each.saved.step, each.state) for each in result.record.checkpoints]
    assert saved[-1] == (40, "committed")
    assert [step for step, _ in saved] == sorted({step for step, _ in saved})
    assert [name[:8] for name in names(tmp_path / "run")] == ["00000020", "00000030", "00000040"]


@pytest.mark.any_launcher
def test_the_cell_is_run_again(count, tmp_path):
    """The run continues from the checkpoint, and a notice says so. With --fresh, it starts over and deletes nothing."""
    count(last=20)
    before = names(tmp_path / "run")
    again = count(last=40)
    assert again.values == [(20, 40, 820)] * 2
    assert "continues from step 20, " in again.record.notices[0].text
    fresh = count(last=10, fresh=True)
    assert fresh.values == [(0, 10, 55)] * 2
    assert not fresh.record.notices
    assert set(before[-1:]) < set(names(tmp_path / "run"))
    assert count(last=20).values == [(10, 20, 210)] * 2, "the newest training run counts, not the longest"


@pytest.mark.any_launcher
def test_a_changed_cell_is_asked_about(count):
    """The error shows what has changed and what to do; with --resume, the run continues anyway."""
    count(last=20)
    changed = COUNT.replace('state["sum"] += step', 'state["sum"] += 2 * step')
    with pytest.raises(CheckpointError) as caught:
        count(changed, last=20, resume=False)
    told = str(caught.value)
    assert mentions(told, "a checkpoint", "step 20, ")
    assert '-    state["sum"] += step\n' in told
    assert '+    state["sum"] += 2 * step\n' in told
    assert "--resume" in told
    assert "--fresh" in told
    assert count(changed, resume=True).values == [(20, 40, 210 + 2 * 610)] * 2
    commented = "# another comment" + COUNT.replace("+= step", "+= 2 * step")
    assert count(commented, last=40, resume=False).values[0][0] == 40


USES = """
from sparkring import checkpoints
store = checkpoints()
state = {"model": model, "sum": 0.0}
begun = store.restore(state)
state["sum"] += float(X.sum()) + helper(1)
store.save(begun + 1, state)
begun, state["sum"]
"""


@pytest.mark.forked("torch")
def test_changed_values_and_helpers_are_asked_about(local, tmp_path):
    """Arrays, helper functions and what these use count as well as the cell's text. Weights of models do not."""
    options = {"checkpoint_dir": str(tmp_path / "run")}
    notebook = "def helper(x): return scale * x\nscale = 2\nmake = lambda: 1\nmodel = torch.nn.Linear({width}, 1)"

    def namespace(text: str = notebook, **values: Any) -> dict[str, Any]:
        found = {"__name__": "__main__", "torch": torch, "X": np.zeros(3)}
        exec(text.replace("{width}", "2"), found)
        found.update(values)
        return found

    assert local.run(USES, 1, namespace=namespace(), **options).value == (0, 2.0)
    changes = [("X", namespace(X=np.ones(3) * 7)), ("helper", namespace(notebook.replace("* x", "* 2 * x"))),
               ("scale", namespace(notebook.replace("= 2", "= 3"))),
               ("model", namespace(notebook.replace("{width}", "3")))]  # fmt: skip
    for name, changed in changes:
        with pytest.raises(CheckpointError, match=rf"(?s)`{name}` has changed since.*--resume.*--fresh"):
            local.run(USES, 1, namespace=changed, **options)
    with pytest.raises(RunFailed, match=r"(?s)start over with --fresh.*run .*cell .* --fresh") as caught:
        local.run(USES, 1, namespace=changed, resume=True, max_restarts=0, **options)
    assert "the cell again" not in str(caught.value)
    assert local.run(USES, 1, namespace=namespace(), **options).value == (1, 4.0), "the model has other weights"
    values = local.run(USES, 1, namespace=namespace(X=np.ones(3)), resume=True, **options).value
    assert values == (2, 9.0)


@pytest.mark.any_launcher
def test_changed_data_are_asked_about(ring, tmp_path):
    """If the data has changed, an error is raised, because the checkpoint's position in the data is no longer valid."""

    def write(rows: int) -> object:
        pq.write_table(pa.table({"x": np.arange(rows)}), tmp_path / "data.parquet")
        return shards(tmp_path / "data.parquet", 4)

    cell = """
from sparkring import checkpoints
store = checkpoints()
state = {"data": data}
begun = store.restore(state)
store.save(begun + 1, state)
begun
"""
    options = {"checkpoint_dir": str(tmp_path / "run")}
    assert ring.run(cell, namespace={"data": write(64)}, **options).values == [0, 0]
    assert ring.run(cell, namespace={"data": write(64)}, **options).values == [1, 1]
    with pytest.raises(CheckpointError, match=r"the data of .*data\.parquet .*changed since"):
        ring.run(cell, namespace={"data": write(65)}, **options)


@pytest.mark.any_launcher
def test_the_damaged_one_is_passed_over(count, tmp_path):
    """All ranks continue from the checkpoint before the damaged one.

    The damage is found only when the arrays are read, but this does not count as a restart.
    """
    count(last=40)
    file = tmp_path / "run" / names(tmp_path / "run")[-1] / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = count(last=40, max_restarts=0)
    assert result.values == [(30, 40, 820)] * 2
    damaged = [each for each in result.record.checkpoints if each.state == "damaged"]
    assert [(each.saved.step, each.attempt) for each in damaged] == [(40, 0)]
    assert "digest" in damaged[0].reason
    assert [attempt.step for attempt in result.record.attempts] == [40, 30]


@pytest.mark.any_launcher
def test_another_number_of_ranks(count):
    """Any number of ranks can restore what rank 0 saved."""
    count(last=20, n=3)
    assert count(last=40, n=2).values == [(20, 40, 820)] * 2


ASK = """
from pathlib import Path
from sparkring import checkpoints
store = checkpoints(best="loss")
state = {"x": 1}

def seen():
    latest, best = store.latest(), store.best()
    return latest and (latest.step, latest.commit.metrics), best and best.step, [entry.step for entry in store.list()]

def until_rank_0_has_saved():
    while len(list(Path(store.directory).glob("*/commit.json"))) <= before:
        pass

if rank == 1:
    until_rank_0_has_saved()
first = seen()
step = store.restore(state) + 1
store.save(step, state, {"loss": 1 / step})
store.wait()
until_rank_0_has_saved()
first, seen()
"""


def test_ranks_that_ask_at_different_times_get_one_answer(local, tmp_path):
    """Rank 1 restores the same step as rank 0, although rank 0 has saved a checkpoint. Then both see the new one."""
    none, one, two = (None, None, []), ((1, {"loss": 1.0}), 1, [1]), ((2, {"loss": 0.5}), 2, [2, 1])
    for before, answers in enumerate([(none, one), (one, two)]):
        found = local.run(ASK, namespace={"before": before}, checkpoint_dir=str(tmp_path / "run"), resume=True)
        assert found.values == [answers] * 2


@pytest.mark.any_launcher
def test_it_says_how_to_go_on(count):
    """When no restarts are left, the error says which step is saved, and where."""
    with pytest.raises(RunFailed, match=r"(?s)killed by SIGKILL.*Step \d0 is saved in .*run .*cell again"):
        count(dies_at=25, max_restarts=0)


def test_no_checkpoint_yet(local, tmp_path):
    """A notice says that the cell runs again. It may load what it has saved itself, so it need not start over."""
    cell = """
import os
if rank == 0 and not os.path.exists(mark):
    open(mark, "w").close()
    os._exit(3)
"""
    result = local.run(
        cell, namespace={"mark": str(tmp_path / "mark")}, checkpoint_dir=str(tmp_path / "run"), max_restarts=1
    )
    (notice,) = [notice.text for notice in result.record.notices if "runs again" in notice.text]
    assert mentions(notice, "checkpoints()", "saved nothing")
    assert "starts over" not in notice


def test_a_save_that_fails_in_the_background_fails_the_run(local, tmp_path):
    """The run fails at the end of the cell, if not before: without its last checkpoint, the cell has not succeeded."""
    cell = """
import os, shutil
from sparkring import checkpoints
store = checkpoints()
shutil.rmtree(folder, ignore_errors=True)
open(folder, "w").close()
store.save(1, {"x": 1})
"""
    folder = str(tmp_path / "run")
    with pytest.raises(RunFailed, match=r"CheckpointStorageError: .*checkpoint .*step 1 .*not .*saved") as caught:
        local.run(cell, namespace={"folder": folder}, checkpoint_dir=folder, max_restarts=0)
    assert any("not be saved" in notice.text for notice in caught.value.record.notices)


def test_a_directory_that_cannot_be_used(local, tmp_path):
    """The error comes before any rank is started."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"/file/x"):
        local.run("1", checkpoint_dir=str(tmp_path / "file" / "x"))
    with pytest.raises(CheckpointError, match=r"memory://x .*memory .*single process"):
        local.run("1", checkpoint_dir="memory://x")


def test_the_kernel_is_killed(driver, tmp_path):
    """When the cell is run again in a new kernel, it continues from the last checkpoint."""
    cell = """
        import os, time
        from sparkring import checkpoints
        store = checkpoints()
        state = {"sum": 0}
        begun = step = store.restore(state)
        print("begins at", begun, flush=True)
        while step < 300 and not (step > begun + 20 and os.path.exists("../done")):
            time.sleep(0.02)
            step += 1
            state["sum"] += step
            if step % 10 == 0:
                store.save(step, state)
        state["sum"] == step * (step + 1) // 2
    """
    script = f"""
        found = run({cell!r}, -2, checkpoint_dir={str(tmp_path / "run")!r})
        print("ALL", found.values, found.record.notices[0].text if found.record.notices else "")
    """
    first = driver(script)
    first.until_said("begins at 0")
    until(lambda: list(tmp_path.glob("run/*/commit.json")), "a checkpoint has been committed")
    first.process.kill()
    first.process.wait()
    (tmp_path / "done").touch()
    text = driver(script).wait()
    assert re.search(r"begins at [1-9]\d*", text), text
    assert re.search(r"ALL \[True, True\] continues from step \d+, .*saved", text), text


# ── Kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

ALONE = """
import time
import numpy as np
from sparkring import checkpoints
np.random.seed(rank)
weights, velocity = np.zeros(4, np.float32), np.zeros(4, np.float32)
state = {"weights": weights, "velocity": velocity, "data": data, "step": 0, "read": []}
store = checkpoints(keep=2, sharded=True)
begun = store.restore(state)
for epoch in range(data.epoch, 4):
    for batch in data.as_numpy():
        time.sleep(0.005)
        x = batch["x"] * (np.random.random(4) > 0.3)
        error = x @ state["weights"] - batch["y"]
        state["velocity"] = 0.9 * state["velocity"] + error @ x / len(x)
        state["weights"] = state["weights"] - 0.01 * state["velocity"]
        state["step"] += 1
        state["read"].append((epoch, batch["id"].tolist()))
        if state["step"] % 3 == 0:
            store.save(state["step"], state)
        while state["step"] == begun + 15 and not enough.exists():
            time.sleep(0.01)  # until it is killed, however slow the machine is
[state["weights"].tobytes(), state["velocity"].tobytes()], state["step"], state["read"]
"""
TOGETHER = """
import time
import torch, torch.distributed as dist
from sparkring import checkpoints
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1))
for weight in model.parameters():
    dist.broadcast(weight.data, 0)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
state = {"model": model, "optimizer": optimizer, "data": data, "step": 0, "read": []}
store = checkpoints(keep=2, sharded=True)
begun = store.restore(state)
for epoch in range(data.epoch, 4):
    for batch in data.as_torch():
        loss = ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        state["step"] += 1
        state["read"].append((epoch, batch["id"].tolist()))
        if state["step"] % 3 == 0:
            store.save(state["step"], state)
        while state["step"] == begun + 15 and not enough.exists():
            time.sleep(0.01)
[weight.detach().numpy().tobytes() for weight in model.parameters()], state["step"], state["read"]
"""
ROWS, BATCH = 960, 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "cell", "kills", "imports"),
    [
        pytest.param("plain", ALONE, 3, ("pandas", "pyarrow.dataset"), id="alone"),
        pytest.param(
            "torch",
            TOGETHER,
            10,
            ("torch", "torch._dynamo", "pandas", "pyarrow.dataset"),
            id="in a ring of torch",
            marks=pytest.mark.extended("repetition", "each rank alone; test_the_next_attempt_goes_on"),
        ),
    ],
)
def test_kills(local, spares, tmp_path, framework, cell, kills, imports):
    """Whenever ranks are killed, the weights equal those of an undisturbed run bit for bit, even with dropout.

    In each epoch, every row is read exactly once. Modules are imported only once for all attempts.
    """
    draw = np.random.default_rng(0)
    columns = {"x": list(draw.random((ROWS, 4), np.float32)), "y": draw.random(ROWS, np.float32), "id": np.arange(ROWS)}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=100)
    enough = tmp_path / "enough"

    def train(name: str) -> object:
        values = {"data": shards(tmp_path / "data.parquet", BATCH), "enough": enough}
        options = {"checkpoint_dir": str(tmp_path / name), "max_restarts": kills}
        return local.run(cell, namespace=values, framework=framework, **options)

    enough.touch()
    found = prepared(spares, 2, *imports, "pandas", "pyarrow.dataset")
    undisturbed = train("undisturbed")
    assert ready(spares) is found, "it serves all attempts: their imports would take most of the test's time"
    enough.unlink()
    chance, killed = random.Random(0), 0

    def kill(record) -> None:
        """Kill a random rank at some moment after the attempt's first checkpoints."""
        nonlocal killed
        saved = [each for each in record.checkpoints if each.attempt == len(record.attempts)]
        ready = len(saved) >= chance.randint(1, 3) and all(rank.state == "running" for rank in record.ranks)
        if killed < kills and len(record.attempts) == killed + 1 and ready:
            killed += 1
            os.kill(chance.choice(record.ranks).pid, signal.SIGKILL)
            if killed == kills:
                enough.touch()

    local.view.on_refresh = kill
    disturbed = train("disturbed")
    local.view.on_refresh = lambda record: None
    assert len(disturbed.record.attempts) == kills + 1
    steps = 3 * (ROWS // 2 // BATCH)
    for calm, rough in zip(undisturbed.values, disturbed.values, strict=True):
        assert rough[1] == steps
        assert rough[2] == calm[2]
        assert rough[0] == calm[0]
    for epoch in (1, 2, 3):
        read = [row for value in disturbed.values for at, rows in value[2] if at == epoch for row in rows]
        assert sorted(read) == list(range(ROWS))
