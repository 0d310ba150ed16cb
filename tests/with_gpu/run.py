"""Sets up an environment, builds Horovod with NCCL, and runs the checks of this folder: `make test-gpu`.

The Python that runs this script provides PyTorch: the new environment, .venv-gpu, also sees the packages of that
Python. PyTorch itself is never downloaded. The script imports only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# sparkring itself cannot be imported before its requirements are installed, but this module of it is a script, too.
sys.path[:0] = [str(ROOT / "tests" / "plugins"), str(ROOT / "extension" / "sparkring" / "tools")]

import gpu_machine  # noqa: E402
from watch import StepProgress, watch, why_failed  # noqa: E402

VENV = ROOT / ".venv-gpu"
LOG = ROOT / ".venv-gpu.log"  # the output of the step that runs, or that has failed
# The build of Horovod must leave this much time for the checks, and no check begins later than this before the end.
CHECKS_S, LAST_CHECK_S = 150.0, 60.0
AGAIN = "then run make test-gpu again"


class CannotRun(Exception):
    """The checks cannot run here. The message is one sentence that says why, and what to do."""


class Setup:
    """Makes the environment. Every step ends at the deadline (Unix seconds)."""

    def __init__(self, environ: Mapping[str, str], deadline: float) -> None:
        self.deadline = deadline
        self.python = VENV / "bin" / "python"
        self.progress = StepProgress(sys.stderr)
        self._wheels = environ.get(gpu_machine.WHEELS, "")
        self._has_torch = False
        # The variables of pip also reach the pip that sparkring-build-horovod starts.
        of_pip = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if self._wheels:
            of_pip |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": Path(self._wheels).resolve().as_uri()}
        inherited = {name: value for name, value in environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        self.env = {**inherited, **of_pip}

    def check(self) -> None:
        """Raise CannotRun if this machine or this Python cannot run the checks."""
        if not gpu_machine.on_cpu() and not gpu_machine.gpu_count():
            raise CannotRun(gpu_machine.NO_GPU)
        if sys.version_info < (3, 10):  # noqa: UP036 (any Python can run this script)
            raise CannotRun(
                f"{sys.executable} is Python {sys.version.split()[0]}, but sparkring needs 3.10 or newer: run "
                "make test-gpu PYTHON=/path/to/python."
            )
        if self._wheels and not Path(self._wheels).is_dir():
            raise CannotRun(f"{gpu_machine.WHEELS} is {self._wheels!r}, which is not a folder: correct it, {AGAIN}.")
        self._check_torch()
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError:
            raise CannotRun(
                f"{sys.executable} comes without venv: install it (Debian and Ubuntu: apt-get install python3-venv), "
                f"{AGAIN}."
            ) from None

    def _check_torch(self) -> None:
        asked = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, env=self.env)
        self._has_torch = answer.returncode == 0
        if not self._has_torch:
            if self._wheels and any(Path(self._wheels).glob("torch-*.whl")):
                return
            reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
            raise CannotRun(
                f"{sys.executable} has no PyTorch ({reason}): run `{sys.executable} -m pip install torch` (about 2.7 "
                "GB with CUDA), or name a Python that has it with make test-gpu PYTHON=/path/to/python, or put its "
                f"wheels into the folder {gpu_machine.WHEELS}, {AGAIN}."
            )
        if not answer.stdout.strip() and not gpu_machine.on_cpu():
            raise CannotRun(
                f"The PyTorch of {sys.executable} is a build without CUDA: run `{sys.executable} -m pip install "
                "--force-reinstall torch` (about 2.7 GB), or name a Python that has a build with CUDA with "
                f"make test-gpu PYTHON=/path/to/python, {AGAIN}."
            )

    def make(self) -> None:
        """Make the environment, and install sparkring and the checks' packages."""
        made, for_what = VENV / ".made-for", f"{sys.executable} {sys.version}"
        if not made.is_file() or made.read_text(encoding="utf-8") != for_what:
            self._step("Making .venv-gpu", [sys.executable, "-m", "venv", "--clear", str(VENV)])
            self._add_packages_of_this_python()
            made.write_text(for_what, encoding="utf-8")
        torch = [] if self._has_torch else ["torch"]  # check() has found it in the folder of wheels
        pip = [str(self.python), "-m", "pip", "install"]
        # Newer versions of pyarrow need NumPy 2 at run time, but do not say so to pip.
        arrow = ["pyarrow<20"] if _numpy_major() == 1 else []
        self._step("Installing what builds need", [*pip, "setuptools>=69.5", "wheel"])
        here = ["--no-build-isolation", "--editable", f"{ROOT}[horovod,test-gpu]"]
        self._step("Installing sparkring and what the checks need", [*pip, *torch, *arrow, *here])

    def _add_packages_of_this_python(self) -> None:
        """Let the environment see the packages of the Python that runs this script, even if that is an environment.

        For an environment, venv's option --system-site-packages would add the packages of the Python below it.
        """
        folders = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
        if site.ENABLE_USER_SITE and site.getusersitepackages() not in folders:
            folders.append(site.getusersitepackages())
        found = subprocess.run(
            [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in dict.fromkeys(folders)]
        Path(found.stdout.strip(), "packages-of-the-machine.pth").write_text("".join(lines), encoding="utf-8")

    def build_horovod(self) -> str:
        """Build Horovod with NCCL, and install it. Return the value of gpu_machine.HOROVOD: how that ended."""
        asked = (
            "import json\n"
            "from sparkring.tools.horovod_build.plan import detect\n"
            "plan = detect()\n"
            "print(json.dumps([bool(plan.nccl), list(plan.left_out_of_gpu)]))"
        )
        env = {**self.env, "HOROVOD_WITHOUT_TENSORFLOW": "1"}
        answer = subprocess.run([str(self.python), "-c", asked], capture_output=True, text=True, check=False, env=env)
        if answer.returncode:
            return f"failed: {(answer.stderr.strip().splitlines() or ['exit status'])[-1]}"
        has_nccl, left_out = json.loads(answer.stdout.splitlines()[-1])
        if not has_nccl:
            return f"left out: {'; '.join(left_out) or 'PyTorch is a build without CUDA'}"
        # With this variable, a build that fails is an error, and is not followed by one without NCCL.
        env.setdefault("HOROVOD_GPU_OPERATIONS", "NCCL")
        command = [str(self.python), "-m", "sparkring.tools.build_horovod", "--install"]
        try:
            self._step("Building Horovod with NCCL", command, env, self.deadline - CHECKS_S)
        except CannotRun as error:
            self.progress.note(str(error))
            return f"failed: {' '.join(str(error).split())}"
        return "built"

    def _step(
        self, title: str, command: Sequence[str], env: Mapping[str, str] | None = None, until: float | None = None
    ) -> None:
        """Run a command with its output in a log. Raise CannotRun if it fails, or has not ended at the time `until`."""
        LOG.write_text("", encoding="utf-8")
        until = self.deadline if until is None else until
        self.progress.step(title)

        def time_is_over(number: int, frame: object) -> None:
            raise TimeoutError

        before = signal.signal(signal.SIGALRM, time_is_over)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, until - time.time()))
        try:
            status = watch(command, env or self.env, LOG, self.progress)
        except TimeoutError:
            self.progress.close()
            raise CannotRun(
                f"{title} did not end in time, so it was ended (the log is {LOG}): run make test-gpu again, or set "
                f"{gpu_machine.LIMIT} to more than {gpu_machine.LIMIT_S:g} seconds."
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if status:
            self.progress.close()
            raise CannotRun(why_failed(f"{title} failed. Correct these errors, {AGAIN}:", LOG))
        self.progress.done()


def _status(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> int:
    """Run the checks, and return their exit status. If they hang, kill them; their ranks then end, too."""
    try:
        return subprocess.run(command, env=env, check=False, cwd=ROOT, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        print(
            f"make test-gpu: the checks did not end within {limit_s:.0f} s, so they were killed: the last line above "
            "names the check that hangs.",
            file=sys.stderr,
        )
        return 1


def _numpy_major() -> int:
    """Return the major version of this Python's NumPy; 0 if it has none."""
    try:
        return int(metadata.version("numpy").split(".")[0])
    except metadata.PackageNotFoundError:
        return 0


def main() -> int:
    """Set up the environment, run the checks, and return the exit status: 0 if all checks passed."""
    begun = time.time()
    limit_s = float(os.environ.get(gpu_machine.LIMIT, gpu_machine.LIMIT_S))
    setup = Setup(os.environ, begun + limit_s)
    try:
        setup.check()
        setup.make()
        # In a trial on CPUs, Horovod is not built: the checks use the one that this Python has, if any.
        horovod = "" if gpu_machine.on_cpu() else setup.build_horovod()
    except CannotRun as error:
        print(f"make test-gpu: {error}", file=sys.stderr)
        return 1
    ready = time.time()
    env = {**setup.env, gpu_machine.HOROVOD: horovod, gpu_machine.UNTIL: str(setup.deadline - LAST_CHECK_S)}
    checks = [
        str(setup.python),
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",
        "--no-header",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    status = _status([*checks, str(ROOT / "tests" / "with_gpu")], env, max(LAST_CHECK_S, setup.deadline - ready))
    print(f"The setup took {ready - begun:.0f} s, and the checks {time.time() - ready:.0f} s.")
    return status


if __name__ == "__main__":
    sys.exit(main())
