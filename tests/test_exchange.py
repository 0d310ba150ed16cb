"""What a rank watches to find out whether it trains alone."""

from __future__ import annotations

import types
from typing import Any

import pytest

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
