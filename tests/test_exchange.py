"""What a rank watches to find out whether it trains alone."""

from __future__ import annotations

import types
from typing import Any

import pytest
from texts import mentions

from sparkring.history import describe
from sparkring.wire.messages import ModelWeights
from sparkring.worker.rank import exchange


@pytest.mark.parametrize(("name", "step"), exchange._KERAS.items())
def test_a_step_of_keras_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, name: str, step: tuple[str, str]) -> None:
    """The watched method is called as before, with keyword arguments, too: Keras 2 calls it with `name=`."""
    calls: list[tuple[Any, ...]] = []
    kind, method = step

    def apply(self: object, gradients: object, name: object = None) -> str:
        calls.append((gradients, name))
        return "applied"

    module = types.ModuleType(name)
    setattr(module, kind, type(kind, (), {method: apply}))
    monkeypatch.setattr(exchange, "_trained", [])
    exchange._watch_keras_steps(module)
    optimizer = getattr(module, kind)()
    assert getattr(optimizer, method)([1], name="Adam") == "applied"
    assert getattr(optimizer, method)([2]) == "applied"
    assert (calls, exchange._trained) == ([([1], "Adam"), ([2], None)], ["keras"])


def test_unlike_weights() -> None:
    """Ranks whose weights differ are named, unless they have different models on purpose."""
    first = ModelWeights("Net", "torch", 6, 0.5, 3.0)
    advice = {"torch": "call `broadcast()`"}
    assert not describe.unlike_weights({0: first, 1: first._replace(total=0.5 + 1e-9)}, advice)
    assert not describe.unlike_weights({0: first, 1: first._replace(parameters=7, total=9.0)}, advice)
    words = describe.unlike_weights({2: first._replace(total=0.6), 0: first, 1: first}, advice)
    assert mentions(words, "`Net`", "rank 2", "rank 0")
    assert "call `broadcast()`" in words
