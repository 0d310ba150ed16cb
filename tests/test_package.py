"""The package itself: what it offers by name."""

from __future__ import annotations

import pkgutil

import sparkring


def test_no_package_hides_a_public_name():
    """A package called `run` would replace the function sparkring.run() as soon as something imports it."""
    packages = {module.name for module in pkgutil.iter_modules(sparkring.__path__)}
    assert {"engine", "errors", "notebook"} <= packages
    assert not packages & {*sparkring.__all__, *sparkring._HOMES}
