"""Estimates how much of a build's time has passed when make prints a percentage.

make's percentages count files, and the largest files are compiled last. In Horovod's build, a sixth of the time is
still left when make prints 99 %.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

# make's percentages, and the share of the build's time that has passed at each percentage. The shares are computed from
# how long Horovod's files take to compile with TensorFlow 2.15 and PyTorch 2.13, two files at a time.
_PERCENTAGES = (0, 14, 28, 46, 55, 63, 69, 77, 83, 88, 92, 97, 99)
_SHARES = (0.13, 0.18, 0.24, 0.30, 0.34, 0.39, 0.44, 0.52, 0.58, 0.65, 0.74, 0.81, 0.83)
_MEASURED = dict(zip(_PERCENTAGES, _SHARES, strict=True))
_STEP = re.compile(r"^\s*\[ *(\d+)%\]", re.MULTILINE)


class BuildPace:
    """Estimates the progress of a build from its output. It uses the times of this machine's last build, if any."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._shares, self._whole_s = _last(kept)
        self._seen: dict[int, float] = {}  # for each percentage, after how many seconds it was printed
        self._passed_s = 0.0

    def read(self, fresh: str, passed_s: float) -> float | None:
        """Return the estimated share of the build's time that has passed, from 0 to 1; None if it cannot be estimated.

        `fresh` is the output since the last call, and `passed_s` is how many seconds the build has taken so far.
        """
        self._passed_s = passed_s
        for step in _STEP.findall(fresh):
            self._seen.setdefault(int(step), passed_s)
        percent = max((step for step in self._seen if step < 100), default=None)
        if percent is None:  # cmake is still configuring
            first = min(self._shares.values())
            return min(passed_s / self._whole_s, first) if self._whole_s else None
        marks = sorted({**self._shares, 100: 1.0}.items())
        low, begun = max((mark for mark in marks if mark[0] <= percent), default=marks[0])
        high, ended = min((mark for mark in marks if mark[0] > percent), default=marks[-1])
        share = begun + (ended - begun) * max(0, percent - low) / max(1, high - low)
        # Assume that the build has kept its pace since the last percentage, but has not reached the next one.
        return min(share * passed_s / max(self._seen[percent], 0.1), ended)

    def keep(self) -> None:
        """Save the times of the finished build for the next one."""
        if self._passed_s and self._seen:
            shares = {percent: at / self._passed_s for percent, at in sorted(self._seen.items()) if percent < 100}
            self._kept.write_text(json.dumps({"seconds": self._passed_s, "shares": shares}), encoding="utf-8")


def _last(kept: Path) -> tuple[Mapping[int, float], float]:
    """Return the shares and the seconds of the last build on this machine; if there was none, _MEASURED and 0."""
    try:
        content = json.loads(kept.read_text(encoding="utf-8"))
        shares = {int(percent): float(share) for percent, share in content["shares"].items()}
        if shares and all(0 < share < 1 for share in shares.values()):
            return shares, float(content["seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # there is no file, or it was written by another version of this module
    return _MEASURED, 0.0
