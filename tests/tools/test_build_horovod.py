"""What `sparkring-build-horovod` decides, prints and caches. `make demo` runs the build itself."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import platformdirs
import pytest

from sparkring.tools import watch
from sparkring.tools.horovod_build import target as targets
from sparkring.tools.horovod_build import wheel
from sparkring.tools.horovod_build.edits import Edit, edits, patch
from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.options import BuildOptions
from sparkring.tools.horovod_build.plan import BuildPlan, detect
from sparkring.tools.horovod_build.requirements import find_cmake
from sparkring.tools.horovod_build.target import HOROVOD, Target

BOTH = Target(python="cp311", platform="linux_x86_64", tensorflow="2.15.1", torch="2.13.0+cpu", cxx_standard=20)
TF_ONLY = Target(python="cp310", platform="linux_x86_64", tensorflow="2.9.3", torch=None, cxx_standard=14)
CUDA = Target(
    python="cp311",
    platform="linux_x86_64",
    tensorflow="2.15.1",
    torch="2.13.0",
    cxx_standard=20,
    torch_cuda="13.0",
    cuda="13.0",
    nccl="2.29.7",
    nccl_in_packages=True,
)
TF_NEW = Target(python="cp312", platform="linux_x86_64", tensorflow="2.21.0", torch=None, cxx_standard=17)

# The lines of Horovod's source that are edited, each with a neighbouring line.
SAMPLE = {
    "setup.py": "config = 'Debug' if self.debug else 'RelWithDebInfo'\n",
    "CMakeLists.txt": "project(horovod CXX)\n\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
    "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))\n",
    "horovod/common/gloo/gloo_context.cc": (
        "void GlooContext::InitializeForProcessSet(const GlooContext& global_context) {\n  attr device_attr;\n"
        "  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n"
    ),
    "horovod/torch/CMakeLists.txt": (
        'if("$ENV{HOROVOD_WITHOUT_PYTORCH}" STREQUAL "1")\n    return()\nendif()\n'
        'if(NOT Pytorch_VERSION VERSION_LESS "1.5.0")\n    set(CMAKE_CXX_STANDARD 14)\nendif()\n'
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n"
    ),
    "cmake/Modules/FindPytorch.cmake": (
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n\nif (Pytorch_CUDA OR Pytorch_ROCM)\n'
    ),
    "cmake/Modules/FindNCCL.cmake": (
        'if (lowercase_HOROVOD_NCCL_LINK STREQUAL "shared")\n    set(NCCL_LIBNAME "nccl")\nendif()\n'
        'find_library(NCCL_LIBRARY\n        NAMES "nccl"\n        HINTS ${HOROVOD_NCCL_LIB})\n'
    ),
    "horovod/common/ops/cuda/CMakeLists.txt": (
        "set(CMAKE_CUDA_STANDARD 11)\nadd_library(horovod_cuda_kernels cuda_kernels.cu)\n"
        "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)\n"
    ),
    "horovod/tensorflow/mpi_ops.cc": (
        "// Forward declaration of AsGpuStreamValue\nnamespace stream_executor {\nnamespace gpu {\n"
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n} // namespace stream_executor\n} // namespace gpu\n"
        '#if TENSORFLOW_VERSION >= 2011000000\n#include "tensorflow/compiler/xla/stream_executor/stream.h"\n#else\n'
        '#include "tensorflow/stream_executor/stream.h"\n#endif // TENSORFLOW_VERSION >= 2011000000\n'
        "#endif // HAVE_GPU\n  auto stream = stream_executor::gpu::AsGpuStreamValue(device_context->stream());\n"
    ),
    "horovod/tensorflow/CMakeLists.txt": (
        'if("$ENV{HOROVOD_WITHOUT_TENSORFLOW}" STREQUAL "1")\n    return()\nendif()\n'
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")\n'
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
        "    if (Tensorflow_CXX17)\n       list(APPEND TF_LINKER_LIBS compatible17_gloo)\n    endif()\n"
        "add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})\n"
    ),
    "horovod/tensorflow/keras/__init__.py": "from tensorflow import keras\n    from keras import backend as K\n",
    "horovod/tensorflow/keras/callbacks.py": "from tensorflow import keras\n    from keras import backend as K\n",
}


@pytest.fixture(params=["sample", "release"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Horovod's build files: a sample, and the real files if an earlier build has left them in the cache."""
    texts = dict(SAMPLE)
    sdist = platformdirs.user_cache_path("sparkring") / "horovod" / f"horovod-{HOROVOD}.tar.gz"
    if request.param == "release" and sdist.is_file():
        with tarfile.open(sdist) as archive:
            for path in SAMPLE:
                member = archive.extractfile(f"horovod-{HOROVOD}/{path}")
                assert member is not None
                texts[path] = member.read().decode()
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., Path]:
    """Makes a program of a given name that prints a line and exits with a status."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name: str, says: str = "", status: int = 0) -> Path:
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
        program.chmod(0o755)
        return folder

    return make


def test_the_key_names_all_that_a_wheel_depends_on() -> None:
    assert BOTH.key == f"horovod{HOROVOD}-cp311-linux_x86_64-tf2.15.1-torch2.13.0+cpu-cxx20-r{targets.RECIPE}"
    changed = [
        Target("cp310", "linux_x86_64", "2.15.1", "2.13.0+cpu", 20),
        Target("cp311", "macosx_13_0_arm64", "2.15.1", "2.13.0+cpu", 20),
        Target("cp311", "linux_x86_64", "2.15.0", "2.13.0+cpu", 20),
        Target("cp311", "linux_x86_64", None, "2.13.0+cpu", 20),
        Target("cp311", "linux_x86_64", "2.15.1", "2.13.0", 20),
        Target("cp311", "linux_x86_64", "2.15.1", "2.13.0+cpu", 17),
    ]
    assert len({BOTH.key, *(target.key for target in changed)}) == 7


def test_the_key_names_cuda_and_the_users_options() -> None:
    recipe = f"r{targets.RECIPE}c{targets.RECIPE_WITH_CUDA}"
    for_both = f"horovod{HOROVOD}-cp311-linux_x86_64-tf2.15.1-torch2.13.0cu13.0-cxx20"
    assert CUDA.key == f"{for_both}-cuda13.0-nccl2.29.7pip-{recipe}"
    changed = [
        replace(CUDA, torch_cuda="12.6"),
        replace(CUDA, tensorflow_cuda="12.5"),
        replace(CUDA, cuda="13.1"),
        replace(CUDA, nccl="2.30.1"),
        replace(CUDA, nccl_in_packages=False),
        replace(CUDA, nccl=None, nccl_in_packages=False),
        replace(CUDA, cuda=None, nccl=None, nccl_in_packages=False),
        replace(CUDA, options="0123abcd"),
    ]
    assert len({CUDA.key, *(target.key for target in changed)}) == 9


def test_the_recipe_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BOTH.key
    monkeypatch.setattr(targets, "RECIPE", targets.RECIPE + 1)
    assert BOTH.key != before


def test_detection_reads_the_environment_and_imports_no_framework() -> None:
    code = (
        "import sys; from sparkring.tools.horovod_build.plan import detect; t = detect().target; "
        "print(t.tensorflow, t.torch, t.python, [m for m in ('tensorflow', 'torch', 'horovod') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    installed = [_version("tensorflow-cpu") or _version("tensorflow"), _version("torch")]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert answer.stdout.split(maxsplit=3) == [*map(str, installed), python, "[]\n"]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize(
    ("tensorflow", "torch", "flags", "standard"),
    [
        ("2.9.3", None, "", 14),
        ("2.15.1", None, "", 17),
        ("2.21.0", None, "", 17),
        (None, "1.13.1", "['-std=c++14']", 14),
        (None, "2.2.0", "['-std=c++17']", 17),
        ("2.15.1", "2.13.0+cpu", "['-std=c++17']; ['-std=c++20']", 20),
        (None, "2.3.0", "no flag to be seen", 17),
    ],
)
def test_the_standard_is_the_one_that_the_frameworks_ask_for(
    tensorflow: str | None,
    torch: str | None,
    flags: str,
    standard: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"tensorflow-cpu": tensorflow, "torch": torch}
    for name, version in versions.items():
        if version:
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    extension = tmp_path / "torch" / "utils" / "cpp_extension.py"
    extension.parent.mkdir(parents=True)
    extension.write_text(f"flags = {flags}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    target = detect().target
    assert (target.tensorflow, target.torch, target.cxx_standard) == (tensorflow, torch, standard)


def test_a_newer_standard_goes_into_both_build_files(source: Path) -> None:
    patch(source, edits(BOTH))
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        text = (source / path).read_text()
        assert "set(CMAKE_CXX_STANDARD 20)" in text
        assert "set(CMAKE_CXX_STANDARD 14)" not in text
    assert "set(CMAKE_CXX_STANDARD 20)" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()


def test_gloo_is_compiled_once_for_both_parts(source: Path) -> None:
    patch(source, edits(BOTH))
    for path in ("CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"):
        assert "Tensorflow_CXX17 AND NOT Tensorflow_CXX11)" in (source / path).read_text()


@pytest.mark.parametrize(("target", "batches"), [(BOTH, True), (CUDA, False), (replace(BOTH, options="x"), False)])
def test_only_the_usual_build_is_in_batches(source: Path, target: Target, batches: bool) -> None:
    """MPI's and CUDA's sources have not been tried in batches. The frameworks' own sources do not go together."""
    patch(source, edits(target))
    for path, name in (("torch", "PYTORCH"), ("tensorflow", "TF")):
        text = (source / "horovod" / path / "CMakeLists.txt").read_text()
        assert ("set(CMAKE_UNITY_BUILD TRUE)\nadd_library(" in text) == batches
        assert (f"${{{name}_SOURCES}} PROPERTIES SKIP_UNITY_BUILD_INCLUSION TRUE" in text) == batches


def test_all_connections_use_the_interface(source: Path) -> None:
    """Process sets use the interface of the global context, since their own context does not have it yet."""
    patch(source, edits(BOTH))
    text = (source / "horovod/common/gloo/gloo_context.cc").read_text()
    made = text.index("device_attr.iface = global_context.gloo_iface_;")
    assert text.index("::InitializeForProcessSet(") < made < text.index("global_ctx = global_context.ctx;")


def test_pytorch_uses_cuda_only_if_the_target_does(source: Path) -> None:
    """PyTorch treats any nvcc as a toolkit. Without the runtime's headers and library, the build would fail."""
    patch(source, edits(BOTH))
    text = (source / "cmake/Modules/FindPytorch.cmake").read_text()
    decided = text.index("set(Pytorch_CUDA FALSE)")
    assert text.index("string(TOUPPER") < decided < text.index("if (Pytorch_CUDA OR Pytorch_ROCM)")


def test_cuda_brings_its_own_edits(source: Path) -> None:
    patch(source, edits(CUDA))
    texts = {path: (source / path).read_text() for path in SAMPLE}
    assert "Pytorch_CUDA FALSE" not in texts["cmake/Modules/FindPytorch.cmake"]
    assert "set(CMAKE_CUDA_STANDARD 17)" in texts["horovod/common/ops/cuda/CMakeLists.txt"]
    # pip's library is called libnccl.so.2, and is found again wherever the wheel is installed.
    assert texts["cmake/Modules/FindNCCL.cmake"].count("libnccl.so.2") == 2
    assert '"nccl"' not in texts["cmake/Modules/FindNCCL.cmake"]
    assert "$ORIGIN/../../nvidia/nccl/lib" in texts["CMakeLists.txt"]


def test_a_framework_without_cuda_is_built_without_it(source: Path) -> None:
    """Even if the other framework is built with CUDA: a part with CUDA would not load in a CPU build."""
    patch(source, edits(CUDA))
    assert "set(HAVE_CUDA FALSE)" in (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "set(HAVE_CUDA FALSE)" not in (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "AsGpuStreamValue" in (source / "horovod/tensorflow/mpi_ops.cc").read_text()


def test_pytorch_without_cuda_is_built_without_it(source: Path) -> None:
    patch(source, edits(replace(CUDA, tensorflow_cuda="13.0", torch_cuda=None)))
    assert "set(HAVE_CUDA FALSE)" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    torch = (source / "horovod/torch/CMakeLists.txt").read_text()
    assert torch.index("set(HAVE_CUDA FALSE)") < torch.index("set(CMAKE_CXX_STANDARD")
    assert "set(Pytorch_CUDA FALSE)" in (source / "cmake/Modules/FindPytorch.cmake").read_text()


def test_the_streams_of_a_newer_tensorflow_are_got_in_another_way(source: Path) -> None:
    before = (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    older = replace(CUDA, tensorflow="2.14.1", tensorflow_cuda="13.0", nccl_in_packages=False)
    patch(source, edits(older))
    assert (source / "horovod/tensorflow/mpi_ops.cc").read_text() == before
    assert "$ORIGIN" not in (source / "CMakeLists.txt").read_text()  # this NCCL is not pip's
    newer = [edit for edit in edits(replace(older, tensorflow="2.15.1")) if edit.path.endswith("mpi_ops.cc")]
    patch(source, newer)
    operations = (source / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert "AsGpuStreamValue" not in operations
    assert operations.index("xla/stream_executor/stream.h") < operations.index("GpuStreamOf(stream_executor::Stream*")


def test_a_new_tensorflow_is_built_without_the_xla_operations(source: Path) -> None:
    patch(source, edits(TF_NEW))
    text = (source / "horovod/tensorflow/CMakeLists.txt").read_text()
    assert "/xla_mpi_ops.cc" not in text
    assert "/mpi_ops.cc" in text
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()


def test_a_tensorflow_with_keras_3_gets_the_backend_of_its_own_keras(source: Path) -> None:
    """With TF_USE_LEGACY_KERAS, this is Keras 2. Wheels that were built without these edits are not used again."""
    patch(source, edits(TF_NEW))
    for name in ("__init__.py", "callbacks.py"):
        text = (source / "horovod/tensorflow/keras" / name).read_text()
        assert "    from tensorflow.keras import backend as K\n" in text
        assert "    from keras import" not in text
    assert TF_NEW.key.endswith(f"r{targets.RECIPE_WITH_KERAS_3}")


def test_an_older_tensorflow_alone_needs_three_edits(source: Path) -> None:
    """The first edit leaves out debug information, which takes a third of the compiler's time."""
    changes = edits(TF_ONLY)
    tensorflow = "horovod/tensorflow/CMakeLists.txt"
    assert [edit.path for edit in changes] == ["setup.py", "horovod/common/gloo/gloo_context.cc", tensorflow]
    patch(source, changes)
    assert "else 'Release'" in (source / "setup.py").read_text()


def test_another_source_than_the_known_one_stops_the_build(source: Path) -> None:
    with pytest.raises(BuildError, match=r"CMakeLists\.txt .*not contain .*--force"):
        patch(source, [Edit("CMakeLists.txt", "no such line", "")])


def command(*arguments: str, path: str, setup: str = "pass", cache: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with nothing but `path` on PATH."""
    code = (
        "import sys; from sparkring.tools import build_horovod as b; "
        f"from sparkring.tools.horovod_build import requirements as r; {setup}; "
        f"sys.exit(b.main({[*arguments, '--cache', str(cache)]!r}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": path}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)


NO_SCRIPTS = "r.sysconfig.get_path = lambda name: '/nonexistent'"
SETUPTOOLS = (
    "there = {{'setuptools': '{}', 'pip': '26', 'torch': '2.1.2'}}; r.installed_version = lambda *n: there.get(n[-1])"
)


@pytest.mark.parametrize(
    ("programs", "setup", "sentence"),
    [
        ({}, "pass", r"No C\+\+ compiler was found .*apt-get install g\+\+.*"),
        (
            {"g++": ("", 1)},
            "pass",
            r"The C\+\+ compiler g\+\+ does not support C\+\+\d\d, .*install g\+\+ 10 or later.*",
        ),
        ({"g++": ("", 0)}, NO_SCRIPTS, r"No cmake was found .*pip install 'cmake<4'.*"),
        (
            {"g++": ("", 0), "cmake": ("cmake version 4.1.2", 0)},
            NO_SCRIPTS,
            r"cmake 4\.1\.2 at .* cannot configure Horovod, .*pip install 'cmake<4'.*",
        ),
        (
            {"g++": ("", 0), "cmake": ("cmake version 3.31.10", 0)},
            NO_SCRIPTS,
            r"No make was found on PATH: .*apt-get install make.*",
        ),
        (
            {"g++": ("", 0), "cmake": ("cmake version 3.31.10", 0), "make": ("", 0)},
            NO_SCRIPTS,
            r"Python's headers are missing \(/nonexistent/Python\.h\): .*apt-get install python3\.\d+-dev.*",
        ),
        (
            {"g++": ("", 0), "make": ("", 0)},
            SETUPTOOLS.format("60"),
            r"needs setuptools 70\.1 or later, but .* has 60: .*install --upgrade setuptools`.*",
        ),
        (
            {"g++": ("", 0), "make": ("", 0)},
            f"{SETUPTOOLS.format('80')}; r.torchs_build_support = lambda: 'from pkg_resources import packaging'",
            r"Horovod cannot be built for PyTorch .* with setuptools 80: .*install 'setuptools<70' wheel`.*",
        ),
        ({}, "sys.path[:] = []", r"Neither TensorFlow nor PyTorch is installed in .*: install one of them with pip.*"),
    ],
    ids=[
        "compiler",
        "old-compiler",
        "cmake",
        "new-cmake",
        "make",
        "headers",
        "setuptools",
        "new-setuptools",
        "frameworks",
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    programs: dict[str, tuple[str, int]], setup: str, sentence: str, stub: Callable[..., Path], tmp_path: Path
) -> None:
    for name, (says, status) in programs.items():
        stub(name, says, status)
    answer = command(path=str(tmp_path / "bin"), setup=setup, cache=tmp_path / "cache")
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("sparkring-build-horovod: ")
    assert re.search(sentence, answer.stderr)
    assert not (tmp_path / "cache").exists()


def test_the_environments_own_cmake_comes_before_the_systems(
    stub: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stub("cmake", "cmake version 3.20.1")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cmake").write_text("#!/bin/sh\necho cmake version 4.0.0\n")
    (other / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", str(other), prepend=os.pathsep)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    assert find_cmake() == folder / "cmake"
    # If the environment's cmake is too new, the system's cmake is used.
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(other))
    assert find_cmake() == folder / "cmake"


def test_a_kept_wheel_is_used_without_any_tool(tmp_path: Path) -> None:
    kept = tmp_path / detect().target.key / f"horovod-{HOROVOD}-cp311-cp311-linux_x86_64.whl"
    kept.parent.mkdir()
    kept.touch()
    answer = command("--print-path", path="", cache=tmp_path)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{kept}\n", "")


def test_force_builds_even_if_a_wheel_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / detect().target.key / f"horovod-{HOROVOD}-cp311-cp311-linux_x86_64.whl"
    kept.parent.mkdir()
    kept.touch()
    answer = command("--force", path="", cache=tmp_path)
    assert answer.returncode == 1
    assert "No C++ compiler" in answer.stderr


def test_a_half_written_wheel_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.whl"
    made.write_bytes(b"wheel")
    shelf = tmp_path / "shelf"
    shelf.mkdir()

    def disk_full(source: Path, place: str) -> None:
        Path(place).write_bytes(b"wh")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(wheel.shutil, "copy", disk_full)
        with pytest.raises(OSError, match="No space left"):
            wheel.keep(made, shelf / "made.whl")
    assert list(shelf.iterdir()) == []
    wheel.keep(made, shelf / "made.whl")
    assert [path.read_bytes() for path in shelf.iterdir()] == [b"wheel"]


FAILING = "raise SystemExit('error: flux capacitor not found')  # 'RelWithDebInfo'\n"


def test_a_failed_build_shows_its_reason_and_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with tarfile.open(cache / f"horovod-{HOROVOD}.tar.gz", "w:gz") as archive:
        for path, text in {**SAMPLE, "setup.py": FAILING}.items():
            member = tarfile.TarInfo(f"horovod-{HOROVOD}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setattr(wheel, "check_tools", lambda target: Path("cmake"))
    shown = io.StringIO()
    with pytest.raises(BuildError) as caught:
        wheel.build(BuildPlan(BOTH, BuildOptions({})), cache, watch.StepProgress(shown))
    log = cache / BOTH.key / "build.log"
    assert "flux capacitor" in str(caught.value)
    assert str(caught.value).endswith(str(log))
    assert "flux capacitor" in log.read_text()
    assert f"Building {BOTH} …\n" in shown.getvalue()
    assert not list(cache.rglob("*.whl"))
