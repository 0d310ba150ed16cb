"""The progress of a build, estimated from make's percentages and from earlier builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkring.tools.pace import BuildPace

# The times, in seconds, when a build of 300 s printed each percentage. Its last file takes a third of the time.
PRINTED = {20: 0, 40: 30, 60: 60, 80: 90, 120: 97, 200: 99}
WHOLE_S = 300


def estimates(pace: BuildPace, slower: float = 1.0, printed: dict[int, int] = PRINTED) -> dict[int, float | None]:
    """Return the share that is estimated at each second of that build, if the build takes `slower` times as long."""
    told = {}
    for second in range(0, WHOLE_S, 10):
        fresh = f"  [{printed[second]:3}%] Building CXX object a.cc.o\n" if second in printed else "g++ -c a.cc\n"
        told[second] = pace.read(fresh, second * slower)
    return told


def test_the_second_build_knows_its_pace(tmp_path: Path) -> None:
    """The share is a share of the time, even on a machine that is twice as slow, and 99 % does not mean almost done."""
    first = BuildPace(tmp_path / "pace.json")
    estimates(first)
    first.read("[100%] Built target pytorch\n", WHOLE_S)
    first.keep()
    for slower in (1.0, 2.0):
        told = estimates(BuildPace(tmp_path / "pace.json"), slower)
        for second, share in told.items():
            if second >= 20:  # before that, the machine's speed is not known
                assert share == pytest.approx(second / WHOLE_S, abs=0.001)
    # If a step takes longer than it did before, the share waits for it, and the estimated time left grows.
    late = BuildPace(tmp_path / "pace.json")
    shares = [late.read("[ 60%] a\n" if second == 60 else "", second) for second in (20, 60, 70, 100, 400)]
    assert shares == pytest.approx([20 / WHOLE_S, 60 / WHOLE_S, 70 / WHOLE_S, 80 / WHOLE_S, 80 / WHOLE_S])


def test_the_first_build_says_what_was_measured(tmp_path: Path) -> None:
    told = estimates(BuildPace(tmp_path / "pace.json"))
    assert told[0] is None
    assert told[20] is not None
    assert all(0 < share <= 1 for share in told.values() if share is not None)
    assert told[200] is not None
    assert told[200] < 0.9  # where make says 99 %
    assert BuildPace(tmp_path / "pace.json").read("cmake looks around\n", 10.0) is None
    assert not (tmp_path / "pace.json").exists()


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"seconds": 1}', '{"seconds": 1, "shares": {"a": 2}}'])
def test_what_was_kept_badly_is_passed_over(kept: str, tmp_path: Path) -> None:
    (tmp_path / "pace.json").write_text(kept)
    assert BuildPace(tmp_path / "pace.json").read("[ 50%] a\n", 10.0)
    assert json.dumps(estimates(BuildPace(tmp_path / "pace.json"))) == json.dumps(
        estimates(BuildPace(tmp_path / "none"))
    )
