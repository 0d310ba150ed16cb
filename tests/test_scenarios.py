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
LIBRARIES = {
    "keras": pytest.mark.extended("library", "torch, and test_keras_models_and_what_tensorflow_has_traced"),
}
START = "import sys; files = sys.argv[1:]; del sys; import scenarios; scenarios.main(files)"


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Run the scenarios of all files whose tests are selected in one process, and return their outcomes by file."""
    names = [item.callspec.params["path"] for item in request.session.items if "outcomes" in item.fixturenames]
    paths = os.pathsep.join([str(Path(sparkring.__file__).parents[1]), str(FOLDER)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, *map(str, names)],
        cwd=tmp_path_factory.mktemp("scenarios"),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file"')]
    return {name: [each for each in outcomes if each["file"] == name.stem] for name in names}


@pytest.mark.slow
@pytest.mark.xdist_group("scenarios")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=LIBRARIES.get(path.stem, ())) for path in sorted(FOLDER.glob("*.txt"))],
)
def test_ranks_give_what_the_notebook_gives(path, outcomes):
    """Each scenario of the file ends as the file says."""
    outcomes = outcomes[path]
    assert len(outcomes) == path.read_text().count("### ")
    assert [each for each in outcomes if each["outcome"] != each["expected"]] == []
