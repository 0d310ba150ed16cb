"""The losses that searches are measured with: test functions that are approached step by step, and a small network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

STEPS, STEP_S = 30, 0.012  # each trial of a test function approaches the function's value in this many steps


def branin(x: float, y: float) -> float:
    bend = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return bend**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def hartmann(x: float, y: float, z: float) -> float:
    scales = ((3, 10, 30), (0.1, 10, 35), (3, 10, 30), (0.1, 10, 35))
    places = ((0.3689, 0.117, 0.2673), (0.4699, 0.4387, 0.747), (0.1091, 0.8732, 0.5547), (0.0382, 0.5743, 0.8828))
    distances = [
        sum(a * (v - p) ** 2 for a, p, v in zip(*both, (x, y, z), strict=True))
        for both in zip(scales, places, strict=True)
    ]
    return -sum(weight * math.exp(-far) for weight, far in zip((1, 1.2, 3, 3.2), distances, strict=True))


def ackley(x: float, y: float) -> float:
    far, waves = math.sqrt((x * x + y * y) / 2), (math.cos(2 * math.pi * x) + math.cos(2 * math.pi * y)) / 2
    return -20 * math.exp(-0.2 * far) - math.exp(waves) + 20 + math.e


def rate(lr: float, decay: float) -> float:
    return (math.log10(lr) + 3) ** 2 + (math.log10(decay) + 4) ** 2 / 4


def approached(function: Callable[..., float], height: float, **values: float) -> Iterator[float]:
    for step in range(1, STEPS + 1):
        time.sleep(STEP_S)
        yield function(**values) + height * math.exp(-step / 4)


def net(lr: float, width: float, alpha: float) -> Iterator[float]:
    """Train a small network on shifted digits, and yield the loss on held-out digits after each epoch.

    All 60 epochs take about a second, so that the start of a process does not dominate the time of a search.
    """
    import warnings

    import numpy
    from sklearn.datasets import load_digits
    from sklearn.metrics import log_loss
    from sklearn.neural_network import MLPClassifier

    warnings.simplefilter("ignore")
    images, y = load_digits().images / 16, load_digits().target
    shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    x = numpy.concatenate([numpy.roll(images[:1200], shift, axis=(1, 2)).reshape(-1, 64) for shift in shifts])
    model = MLPClassifier((round(width),), learning_rate_init=lr, alpha=alpha, solver="sgd", random_state=0)
    for _ in range(60):
        model.partial_fit(x, numpy.tile(y[:1200], len(shifts)), classes=range(10))
        yield float(log_loss(y[1200:], model.predict_proba(images[1200:].reshape(-1, 64))))
