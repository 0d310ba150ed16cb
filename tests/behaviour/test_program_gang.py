"""Tests of sparkring.gang(), which holds a warm gang in a program."""

from __future__ import annotations

import ast

CALLS = """
import os, threading, sparkring

def f(a):
    return a + x + rank

def bad():
    raise ValueError("no")

def binds():
    global z
    z = 7
    return os.environ["A"]

w, m = 1, [0]

def sets_w():
    global w
    w = 99

def both():
    return w, m

def told(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]

with sparkring.gang(np=-2, framework="plain", env={"A": "1"}, quiet=True) as gang:
    os.environ["A"] = "0"  # the gang's own value counts
    bound = gang.run(binds).by_rank
    gang.push(x=10, y=[1, 2])
    seen = [gang.run(f, 1).by_rank, gang.run(f, 1, ranks=[1]).by_rank, gang.pull("y"), gang.pull("x", rank=1)]
    seen += [bound, gang.pull("z")]
    gang.run(sets_w)
    gang.push(m=[7])
    theirs = [gang.pull("w"), gang.run(both).value, w, m]  # the ranks' values, until the program's change
    m.append(1)
    theirs.append(gang.run(both).value)
    wrong = [
        lambda: gang.run(bad), lambda: gang.pull("nope"), lambda: gang.push(rank=3), lambda: gang.run(f, 1, ranks=[5]),
        lambda: gang.run(f, 1, ranks=[]), lambda: gang.push(lock=threading.Lock()), lambda: sparkring.gang(np=-3),
    ]
    problems = [told(call) for call in wrong]
    values = []
    add = lambda number: values.append(gang.run(f, number).value)
    threads = [threading.Thread(target=add, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problems.append(told(lambda: gang.run(lambda: os.kill(os.getpid(), 9))))
    problems.append(told(lambda: gang.run(f, 1)))
gang.stop()
print("theirs", theirs)
print("seen", seen)
print("values", sorted(values))
print("problems", problems)
"""


def test_calls_pushed_variables_and_errors(driver):
    """Variables stay on the ranks. Calls from several threads run one after another. A rank's death ends the gang."""
    lines = driver(CALLS).wait().splitlines()
    found = {what: ast.literal_eval(rest) for what, _, rest in (line.partition(" ") for line in lines[-4:])}
    assert found["seen"] == [{0: 11, 1: 12}, {1: 12}, [1, 2], 10, {0: "1", 1: "1"}, 7]
    assert found["theirs"] == [99, (99, [7]), 1, [0, 1], (99, [0, 1])]
    assert found["values"] == [10, 11, 12, 13, 14]
    kinds = ["RunFailed", "ResultError", "OptionsError", "OptionsError", "OptionsError", "CaptureError", "OptionsError"]
    assert [kind for kind, _ in found["problems"]] == [*kinds, "RunFailed", "LaunchError"]
    said = [text for _, text in found["problems"]]
    for text, words in zip(said, ("no", "nope", "rank", "no rank 5", "no rank", "lock", "already up"), strict=False):
        assert words in text
    assert "killed by SIGKILL" in said[-2]
    assert "has ended" in said[-1]
