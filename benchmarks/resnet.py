"""A network of the size of ResNet-18 with random weights. Spark's workers import it by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

SHAPE = (3, 64, 64)
SLOTS = 2


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(convolution(inputs, outputs, stride), nn.ReLU(), convolution(outputs, outputs))
        self.shortcut = nn.Identity() if stride == 1 else convolution(inputs, outputs, stride, size=1)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, stride: int = 1, *, size: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


def net() -> nn.Module:
    """Return a net with 11 million parameters in eight blocks. As usual for small images, layer 1 keeps their size."""
    torch.manual_seed(0)
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(*pair) for pair in itertools.pairwise(widths)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1)
    return nn.Sequential(convolution(3, 64), nn.ReLU(), *blocks, *ends).eval()


def as_floats(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the images of a batch as floats, and set the threads of the process that will score them."""
    torch.set_num_threads(SLOTS)
    return {"x": batch["x"].astype("float32")}


def make_predict() -> Callable[[Any], Any]:
    """Return the function that predict_batch_udf() calls with an array of bytes. Each task uses one thread."""
    torch.set_num_threads(1)
    model = net()

    def predict(images: Any) -> Any:
        x = numpy.frombuffer(b"".join(images), "uint8").reshape(-1, *SHAPE).astype("float32")
        with torch.inference_mode():
            return model(torch.from_numpy(x)).numpy()[:, 0]

    return predict
