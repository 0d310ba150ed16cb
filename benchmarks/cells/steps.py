"""A training loop that saves every few steps, or not at all. The cell's value is the loop's duration in seconds."""

import os
import time

import numpy as np

steps, every = int(os.environ["BENCHMARK_STEPS"]), int(os.environ["BENCHMARK_EVERY"])
weights = np.random.default_rng(0).standard_normal((1_100, 1_100), np.float32)  # 5 MB
state = {"weights": weights, "moments": np.zeros_like(weights), "step": 0}
if every:
    from sparkring import checkpoints

    store = checkpoints(keep=2)
    store.restore(state)
    store.save(0, state)  # the first save allocates memory that the others use again
    store.wait()

part = weights[:400]
part @ weights
began = time.perf_counter()
for step in range(1, steps + 1):
    state["moments"][:400] = part @ weights
    if every and step % every == 0:
        store.save(step, state)
if every:
    store.wait()
time.perf_counter() - began
