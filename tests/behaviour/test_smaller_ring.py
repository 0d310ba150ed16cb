"""A ring that loses slots continues with fewer ranks, and with all of them when the slots are back."""

from __future__ import annotations

import os
import re
import signal

import pytest
from leaks import runs
from texts import mentions
from waiting import until

CELL = """
import time
from sparkring import checkpoints
store = checkpoints(keep=2)
state = {"sum": 0}
step = store.restore(state)
print(f"ranks {size} from step {step}", flush=True)
while step < 2000 and not done():
    time.sleep(0.02)
    step += 1
    state["sum"] += step
    if step % 25 == 0:
        store.save(step, state)
store.wait()
size, step, state["sum"]
"""


# Four items wait until the test has killed a worker. Each attempt to run an item writes a line.
ITEMS = """
import sparkring

def item(number):
    with open(RAN, "a") as file:
        print(number, os.getpid(), file=file)
    while number < 4 and not os.path.exists(GO):
        time.sleep(0.02)
    return number

result = sparkring.foreach(item, range(40), np=6, quiet=True)
print("ITEMS", result.values == list(range(40)), sorted(result.table.attempts)[-3:], flush=True)
"""


@pytest.mark.slow
def test_a_worker_is_killed_and_another_one_comes(driver, brittle_cluster, tmp_path):
    """Four ranks run on two workers. When one worker is killed, two ranks continue from the last checkpoint. When a
    new worker starts, four ranks continue from a later checkpoint. No step is lost or done twice.

    Then items run on four slots of the cluster. When a worker is killed, its two items are tried once more on the other
    worker. All other items run once.
    """
    ran, go = tmp_path / "ran", tmp_path / "go"
    script = driver(f"""
        import os
        os.environ["PYSPARK_PYTHON"] = {brittle_cluster.python!r}
        session = spark({brittle_cluster.url!r}, **{{"spark.executor.memory": "600m"}})
        while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:
            time.sleep(0.05)

        class Telling(View):
            def refresh(self, record):
                View.refresh(self, record)
                for saved in record.checkpoints[-1:]:
                    print("SAVED", saved.saved.step, "in attempt", saved.attempt, flush=True)
            close = refresh

        def done():
            return os.path.exists({str(tmp_path / "done")!r})

        options = Options(np=4, checkpoint_dir={str(tmp_path / "run")!r}, max_restarts=1, min_np=2)
        found = run_spec(RunSpec(Cell({CELL!r}, {{"done": done}}), options, "plain", "test"), Telling())
        for size, step, total in found.values:
            print("VALUE", size, total == step * (step + 1) // 2)
        for attempt in found.record.attempts:
            print("ATTEMPT", attempt.number, attempt.size, attempt.reason, flush=True)
        RAN, GO = {str(ran)!r}, {str(go)!r}
        exec({ITEMS!r})
        session.stop()
    """)
    script.until_said(r"ranks 4 from step 0$")
    script.until_said(r"^SAVED \d+ in attempt 1$")
    os.kill(brittle_cluster.workers[0].pid, signal.SIGKILL)
    smaller = int(script.until_said(r"ranks 2 from step (\d+)$")[1])
    assert smaller >= 25
    brittle_cluster.add()
    larger = int(script.until_said(r"(?s)ranks 2 from.*ranks 4 from step (\d+)$")[1])
    assert larger > smaller
    (tmp_path / "done").touch()
    script.until_said("ATTEMPT 3")
    until(lambda: ran.exists() and ran.read_text().count("\n") == 4, "four items run")
    attempts = [tuple(map(int, line.split())) for line in ran.read_text().splitlines()]
    assert sorted(number for number, _ in attempts) == [0, 1, 2, 3]
    os.kill(brittle_cluster.workers[1].pid, signal.SIGKILL)
    until(lambda: sum(not runs(pid) for _, pid in attempts) == 2, "the executor ends with its worker")
    go.touch()
    text = script.wait()
    assert "ITEMS True [1, 2, 2]" in text, text
    assert ran.read_text().count("\n") == 42
    assert text.count("VALUE 4 True") == 4, text
    assert re.search(r"ATTEMPT 1 4 (lost on|killed by SIGTERM)", text), "the executor may end first, or its ranks"
    assert mentions(text, "ATTEMPT 2 2", "slots", "more than 2 ranks")
    assert "ATTEMPT 3 4 \n" in text
