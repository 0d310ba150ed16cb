"""Tests of `make demo`: its first ring, which needs neither Horovod nor a notebook, its steps and its table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.extended("notebook", "the quickstart runs in make test")
def test_the_first_ring_trains_without_horovod(tmp_path: Path) -> None:
    """The script runs even if Horovod, TensorFlow, Spark and Jupyter's notebooks are not installed yet."""
    absent = ("horovod", "tensorflow", "pyspark", "nbclient", "ipykernel", "petastorm")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "extension")])
    script = [sys.executable, str(ROOT / "notebooks" / "first_ring.py")]
    answer = subprocess.run(
        script, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    assert re.findall(r"^\[0\] epoch (\d) of 8: held-out accuracy [01]\.\d{3}$", answer.stdout, re.MULTILINE) == list(
        "12345678"
    )
    assert re.search(r"Trained in [\d.]+ s; both ranks reach (0\.9[5-9]|1\.0)", answer.stdout)


def test_make_installs_one_thing_at_a_time() -> None:
    """make installs one thing at a time, even with -j, and the first ring runs before the slow steps."""
    dry = ["make", "--dry-run", "--always-make", "-j4", "demo", "PYTHON=python3"]
    answer = subprocess.run(dry, capture_output=True, text=True, check=True, cwd=ROOT)
    steps = (
        "venv .venv",
        "'.[torch]'",
        "first_ring.py",
        "'.[demo]'",
        "run_demo.py",
        "sparkring-build-horovod",
        "--tag",
    )
    places = [answer.stdout.index(step) for step in steps]
    assert places == sorted(places)
    assert "'.[all,dev]'" not in answer.stdout


def test_the_table_after_horovod_has_all_ways_of_running_the_net(run_demo: Any, tmp_path: Path) -> None:
    """When only the section on Horovod has run, its row follows the rows of the whole notebook."""
    (tmp_path / "outcome.json").write_text(
        '[{"step": "one net", "where": "the kernel", "seconds": 20.0, "speedup": 1.0},'
        ' {"step": "one net", "where": "Horovod", "seconds": 20.0, "speedup": 1.0}]'
    )
    rows = [{"step": "one net", "where": "Horovod", "seconds": 10.0, "speedup": 1.0}]
    found = run_demo.after(tmp_path / "outcome.json", rows)
    assert [(row["where"], row["speedup"]) for row in found] == [("the kernel", 1.0), ("Horovod", 2.0)]
    assert run_demo.after(tmp_path / "missing.json", rows) == rows
