"""Items' results that are kept in a directory: how they are written, and which of them may be read again."""

from __future__ import annotations

import pickle
import stat
import uuid
from pathlib import Path

import numpy as np
import pytest

from sparkring.checkpointing.results import SMALL_BYTES, KeptResult, KeptResults, user_secret
from sparkring.errors import CheckpointError
from sparkring.runtime.storage import locate

SECRET = b"s" * 32


def packed(value) -> tuple:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return (payload, *(buffer.raw() for buffer in buffers))


def unpacked(result: KeptResult):
    return pickle.loads(result.parts[0], buffers=result.parts[1:])


@pytest.fixture(params=["file", "memory"])
def results(request, tmp_path):
    path = str(tmp_path / "new" / "folder") if request.param == "file" else f"memory://{uuid.uuid4()}/x"
    return KeptResults(locate(path), SECRET)


def test_what_is_written_is_read(results):
    """Small and large values come back unchanged, with name, metrics and seconds. Arrays are writable."""
    assert results.keys() == results.items() == set()
    array = np.arange(SMALL_BYTES, dtype=float)
    told = {"name": "shop='a'", "text": "3", "metrics": {"mape": 0.1, "nan": float("inf")}, "seconds": 2.5}
    results.write("small", KeptResult(packed({"a": 3}), **told))
    results.write("large", KeptResult(packed([array, array[:3].copy()])))
    results.write("small", KeptResult(packed({"a": 4}), **told))
    assert results.keys() == {"small", "large"}
    small, large = results.read("small"), results.read("large")
    assert unpacked(small) == {"a": 4}
    assert small._replace(parts=()) == KeptResult((), **told)
    first, second = unpacked(large)
    np.testing.assert_array_equal(first, array)
    second += 1
    assert results.read("none") is None


def test_damaged_results_run_again(tmp_path):
    """If any part of a result is missing or wrong, the result counts as missing."""
    results, folder = KeptResults(locate(tmp_path), SECRET), tmp_path / "results"
    results.write("large", KeptResult(packed(np.zeros(SMALL_BYTES))))
    whole, signed = (folder / "large.bin").read_bytes(), (folder / "large.json").read_bytes()
    for name, data in [("bin", whole[:-1]), ("bin", b"\1" + whole[1:]), ("json", signed[:-9]), ("json", b"")]:
        (folder / f"large.{name}").write_bytes(data)
        assert results.read("large") is None
        (folder / "large.bin").write_bytes(whole)
        (folder / "large.json").write_bytes(signed)
    assert results.read("large") is not None
    (folder / "large.bin").unlink()
    assert results.read("large") is None
    (folder / "other.json").write_bytes(signed)
    assert results.read("other") is None, "it is the result of another item"


def test_nobody_elses_results_are_read(tmp_path):
    """Results are pickles, which can run code. So a result that was signed with another secret is an error."""
    KeptResults(locate(tmp_path), SECRET).write("key", KeptResult(packed(1)))
    with pytest.raises(CheckpointError, match=r"kept .*another user"):
        KeptResults(locate(tmp_path), b"x" * 32).read("key")
    path = tmp_path / "results" / "key.json"
    path.write_bytes(path.read_bytes().replace(b'"seconds": 0.0', b'"seconds": 1.0'))
    with pytest.raises(CheckpointError, match=r"kept .*another user"):
        KeptResults(locate(tmp_path), SECRET).read("key")


def test_the_users_secret(tmp_path):
    """The secret is made once, and only the user can read it."""
    home = tmp_path / "home"
    found = user_secret(home)
    assert len(found) == 32
    assert user_secret(home) == found
    path = home / "results.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        user_secret(home)
    with pytest.raises(CheckpointError, match="Set SPARKRING_HOME"):
        user_secret(Path("/proc/none"))
