"""Tests of how the process of a rank ends: nothing that Python's own exit does for the user's code may be missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A module of the user.
OWN = """
import io

kept_open = open("own", "w")
kept_open.write("own module")
"""
CODE = """
import atexit, concurrent.futures, ctypes, os, sys, tempfile, threading, time, weakref, zipfile
import own_module

class Deleted:
    def __del__(self):
        print("deleted")

def later():
    time.sleep(0.2)
    print("thread ended")

def endless():
    while True:
        needs_this()
        time.sleep(0.001)

def needs_this():
    pass

atexit.register(print, "atexit")
text = open("text", "w")
text.write("text")
os.kept_open = open("elsewhere", "wb")  # by a module that is not the user's
os.kept_open.write(b"elsewhere")
archive = zipfile.ZipFile("archive", "w")
archive.writestr("name", "content")
deleted = Deleted()
weakref.finalize(deleted, print, "finalized")
folder = tempfile.TemporaryDirectory(dir=".")
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(later)
threading.Thread(target=endless, daemon=True).start()
ctypes.CDLL(None).printf(b"from C\\n")

from sparkring.worker.rank.leaving import leave
sys.exit(leave(3))
"""


def test_what_the_users_code_has_begun_is_completed(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "main.py").write_text(CODE, encoding="utf-8")
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines.index("thread ended") < lines.index("atexit")
    assert {"finalized", "from C", "deleted"} <= {*lines}
    written = {name: (tmp_path / name).read_text(encoding="utf-8") for name in ("text", "elsewhere", "own")}
    assert written == {"text": "text", "elsewhere": "elsewhere", "own": "own module"}
    assert b"content" in (tmp_path / "archive").read_bytes()
    assert (tmp_path / "archive").read_bytes().startswith(b"PK")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) in ([], ["__pycache__"])


def test_summaries_of_tensorflow(tmp_path: Path) -> None:
    """TensorFlow keeps the default writer, so deleting the user's objects does not delete it."""
    pytest.importorskip("tensorflow")
    code = """
import sys, tensorflow as tf
tf.summary.create_file_writer("logs").set_as_default()
tf.summary.scalar("loss", 0.25, step=1)
from sparkring.worker.rank.leaving import leave
sys.exit(leave(0))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (events,) = tmp_path.glob("logs/*")
    assert b"loss" in events.read_bytes()
