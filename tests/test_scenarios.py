"""Tests with about 300 small notebooks: a cell gives the same result on a rank, or is refused before the launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparkring

FOLDER = Path(__file__).parent / "scenarios"
START = "import sys; files = sys.argv[1:]; del sys; import scenarios; scenarios.main(files)"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_ranks_give_what_the_notebook_gives(path, tmp_path):
    """Each scenario of the file ends as the file says."""
    paths = os.pathsep.join([str(Path(sparkring.__file__).parents[1]), str(FOLDER)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"title"')]
    assert len(outcomes) == path.read_text().count("### ")
    assert [each for each in outcomes if each["outcome"] != each["expected"]] == []
