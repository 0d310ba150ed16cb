"""Installs a wheel of Horovod into this environment."""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.proof import Proof, prove
from sparkring.tools.horovod_build.target import Target
from sparkring.tools.horovod_build.wheel import PIP
from sparkring.tools.watch import StepProgress, telling_lines


def install(wheel: Path, target: Target, progress: StepProgress) -> list[Proof]:
    """Install the wheel and its dependencies, load Horovod, and return what its parts say about themselves."""
    pip = [*PIP, "install", "--quiet"]
    if not _is_installed(wheel):
        progress.step("Installing the wheel")
        # Install the wheel first, and then its dependencies. A single call would either skip the wheel, if a Horovod of
        # the same version is installed, or reinstall everything.
        for options in (["--force-reinstall", "--no-deps"], []):
            answer = subprocess.run([*pip, *options, str(wheel)], capture_output=True, text=True, check=False)
            if answer.returncode:
                progress.close()
                raise BuildError("\n  ".join([f"pip could not install {wheel}:", *telling_lines(answer.stderr)]))
        progress.done()
    return prove(target, progress)


def _is_installed(wheel: Path) -> bool:
    """Return whether the installed Horovod came from this wheel. pip records the digest of each wheel it installs."""
    try:
        noted = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return noted is not None and hashlib.sha256(wheel.read_bytes()).hexdigest() in noted
