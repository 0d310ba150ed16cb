"""Save arrays and read them back with one contestant, in a process of its own, and print the figures as JSON.

python checkpoints.py CONTESTANT FOLDER MEGABYTES
"""

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ARRAYS = 16
CHUNK_BYTES = 4 << 20

contestant, folder, megabytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
target, scratch = folder / "target", folder / "scratch"


def new_state(number):
    """Return the arrays, filled with numbers that depend on `number`."""
    size = megabytes * 1_000_000 // 4 // ARRAYS
    return {f"layer {index}": np.full(size, number + index, np.float32) for index in range(ARRAYS)}


def sparkring():
    from sparkring import checkpoints

    checkpoints(scratch).save(0, {"x": np.zeros(10)})  # so that imports are not measured
    store = checkpoints(target, background=False)
    return lambda: store.save(1, state), lambda: store.restore(empty)


def disk():
    def save():
        with open(target / "data", "wb", 0) as file:
            for array in state.values():
                data = memoryview(array).cast("B")
                for begin in range(0, len(data), CHUNK_BYTES):
                    file.write(data[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())

    def restore():
        with open(target / "data", "rb", 0) as file:
            for name in empty:
                empty[name] = np.fromfile(file, np.float32, len(empty[name]))

    return save, restore


def numpy():
    def save():
        for name, array in state.items():
            np.save(scratch / f"{name}.npy", array)
        copied()

    def restore():
        for name in empty:
            empty[name] = np.load(target / f"{name}.npy")

    return save, restore


def torch():
    import torch

    def save():
        torch.save({name: torch.from_numpy(array) for name, array in state.items()}, scratch / "state.pt")
        copied()

    def restore():
        for name, tensor in torch.load(target / "state.pt").items():
            empty[name] = tensor.numpy()

    return save, restore


def copied():
    """Copy the files to the target, as notebooks do if they cannot write there directly."""
    for file in list(scratch.iterdir()):
        with open(file, "rb") as source, open(target / file.name, "wb") as out:
            shutil.copyfileobj(source, out, CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())


def seconds(do, *what):
    began = time.perf_counter()
    do(*what)
    return time.perf_counter() - began


def blocking():
    """Measure how long a save holds up training: in the background, and in the foreground."""
    from sparkring import checkpoints

    background, serial = checkpoints(target, keep=1), checkpoints(scratch, keep=1, background=False)
    held_up, whole = [], []
    for number in range(6):
        state = new_state(number)
        held_up.append(seconds(background.save, number, state))
        background.wait()
        whole.append(seconds(serial.save, number, state))
    # The first save is left out: it allocates memory that the others use again.
    found = statistics.median(held_up[1:]), statistics.median(whole[1:])
    return {"blocked": found[0] * 1e3, "share": 100 * found[0] / found[1]}


target.mkdir(parents=True)
scratch.mkdir()
if contestant == "blocking":
    print(json.dumps(blocking()))
else:
    state, empty = new_state(1), new_state(-100)
    save, restore = globals()[contestant]()
    os.sync()
    saved_s = seconds(save)
    restored_s = seconds(restore)
    assert all((empty[name] == state[name]).all() for name in state)
    print(json.dumps({"save": megabytes / saved_s, "restore": megabytes / restored_s}))
