"""Tests that the live panel's bundle was made from its current sources, and runs the unit tests of the sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from sparkring.views import page_constants, panel
from sparkring.views.markup import RANK_COLOURS

HERE = Path(panel.__file__).parent


@pytest.mark.parametrize("bundle", ["panel.bundle.js", "panel.bundle.css"])
def test_the_bundle_was_made_of_these_sources(bundle):
    """The bundle has the digest that build.js computes. If npm is installed, `make check` compares the whole bundle."""
    digest = hashlib.sha256()
    for name in ("../style.css", "build.js", "package-lock.json", *sorted(f"src/{p.name}" for p in HERE.glob("src/*"))):
        digest.update(f"{name}\n{(HERE / name).read_text(encoding='utf-8')}".encode())
    [told] = re.findall(r"^/\* Made by build\.js from src/ \(sha256 (\w+)\)", (HERE / bundle).read_text("utf-8"))
    assert told == digest.hexdigest(), "run `make panel`, and commit what it writes"


def test_the_page_knows_the_descriptions_of_python():
    text = page_constants.PATH.read_text("utf-8")
    assert text == page_constants.script(), "run `make panel`, and commit what it writes"


def test_a_rank_has_one_colour_everywhere():
    written = re.findall(r"\.sr-c(\d) \{ --sr-c: (#\w+); \}", (HERE / "src" / "panel.css").read_text("utf-8"))
    assert written == [(str(at), colour) for at, colour in enumerate(RANK_COLOURS)]


def test_nothing_names_a_registry():
    for name in ("package.json", "package-lock.json", ".npmrc"):
        assert "://" not in (HERE / name).read_text("utf-8")


def test_the_sources_in_node():
    """The unit tests of the sources pass."""
    node = shutil.which("node")
    if node is None:
        if os.environ.get("CI"):
            pytest.fail("node is not on PATH; in CI these tests must run")
        pytest.skip("node is not on PATH")
    tests = sorted(map(str, (Path(__file__).parent / "panel").glob("*.test.mjs")))
    ran = subprocess.run([node, "--test", *tests], capture_output=True, text=True, timeout=DEADLINE_S)
    assert tests
    assert ran.returncode == 0, ran.stdout + ran.stderr
