"""With which CUDA and NCCL `sparkring-build-horovod` builds, on trees of empty files. No compiler runs."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from texts import mentions

from sparkring.tools import watch
from sparkring.tools.build_horovod import gpu_limits
from sparkring.tools.horovod_build import proof, wheel
from sparkring.tools.horovod_build.cuda import Missing, Nccl, Toolkit, find_nccl, find_toolkit, lay_out
from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.frameworks import InstalledFramework, installed_frameworks
from sparkring.tools.horovod_build.options import BuildOptions, read_options
from sparkring.tools.horovod_build.plan import BuildPlan, make_plan
from sparkring.tools.horovod_build.proof import Proof
from sparkring.tools.horovod_build.target import Target

CPU_TENSORFLOW = InstalledFramework("tensorflow", "2.15.1")
TENSORFLOW = InstalledFramework("tensorflow", "2.15.1", "12.2")
CPU_TORCH = InstalledFramework("torch", "2.13.0+cpu")
TORCH = InstalledFramework("torch", "2.13.0", "13.0")


def write(folder: Path, *files: str, text: str = "") -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        (folder / file).chmod(0o755)
    return folder


def system_toolkit(home: Path, version: str = "13.0") -> Path:
    major, minor = version.split(".")
    write(home, "bin/nvcc", "include/crt/host_config.h", "include/nv/target", "lib64/libcudart_static.a")
    write(home, "include/cuda_runtime_api.h", text=f"#define CUDART_VERSION  {major}0{minor}0\n")
    return home


def pips_runtime(site: Path) -> Path:
    """What PyTorch's CUDA builds install: CUDA's headers and libraries, without a compiler."""
    home = write(site / "nvidia" / "cu13", "lib/libcudart.so.13", "lib/libcudart_static.a", "include/cuda.h")
    write(home, "include/cuda_runtime_api.h", text="#define CUDART_VERSION  13000\n")
    return home


def pips_toolkit(site: Path) -> Path:
    home = pips_runtime(site)
    return write(home, "bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cccl/nv/target")


def nccl_in(include: Path, library: Path, name: str, version: str = "2.29.7") -> None:
    major, minor, patch = version.split(".")
    header = f"#define NCCL_MAJOR {major}\n#define NCCL_MINOR {minor}\n#define NCCL_PATCH {patch}\n"
    write(include, "nccl.h", text=header)
    write(library, name)


def pips_nccl(site: Path, cuda: str = "13") -> None:
    nccl_in(site / "nvidia/nccl/include", site / "nvidia/nccl/lib", "libnccl.so.2")
    (site / f"nvidia_nccl_cu{cuda}-2.29.7.dist-info").mkdir()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site-packages"


@pytest.fixture(autouse=True)
def no_system_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's own CUDA and NCCL."""
    monkeypatch.setattr("sparkring.tools.horovod_build.cuda.DEFAULT_HOME", tmp_path / "usr-local-cuda")
    monkeypatch.setattr("sparkring.tools.horovod_build.cuda.SYSTEM_ROOTS", (tmp_path / "usr",))


def plan(*frameworks: InstalledFramework, site: Path, linux: bool = True, **environ: str) -> BuildPlan:
    return make_plan({each.name: each for each in frameworks}, environ, (site,), linux=linux)


# Discovery


@pytest.mark.parametrize("origin", ["HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "PATH", "default", "pip"])
def test_a_toolkit_is_found_wherever_it_is(origin: str, tmp_path: Path, site: Path) -> None:
    home = tmp_path / "usr-local-cuda" if origin == "default" else tmp_path / "cuda"
    home = pips_toolkit(site) if origin == "pip" else system_toolkit(home)
    environ = {"PATH": str(home / "bin")} if origin == "PATH" else {origin: str(home)}
    found = find_toolkit(environ, [site], "13.0")
    assert isinstance(found, Toolkit)
    assert (found.version, found.home, bool(found.packages)) == ("13.0", home, origin == "pip")
    assert str(home) in found.origin


def test_a_toolkit_of_another_version_is_passed_over(tmp_path: Path, site: Path) -> None:
    old, new = system_toolkit(tmp_path / "old", "12.9"), system_toolkit(tmp_path / "new", "13.1")
    found = find_toolkit({"CUDA_HOME": str(old), "CUDA_PATH": str(new)}, [site], "13.0")
    assert isinstance(found, Toolkit)
    assert (found.home, found.version) == (new, "13.1")
    missing = find_toolkit({"CUDA_HOME": str(old)}, [site], "13.0")
    assert isinstance(missing, Missing)
    assert f"CUDA_HOME ({old}) has CUDA 12.9" in missing.reason
    # The user's choice is not questioned.
    chosen = find_toolkit({"HOROVOD_CUDA_HOME": str(old), "CUDA_HOME": str(new)}, [site], "13.0")
    assert isinstance(chosen, Toolkit)
    assert chosen.home == old


def test_what_a_toolkit_lacks_is_named(tmp_path: Path, site: Path) -> None:
    pips_runtime(site)
    write(tmp_path / "bin", "nvcc")
    missing = find_toolkit({"PATH": str(tmp_path / "bin")}, [site], "13.0")
    assert isinstance(missing, Missing)
    assert mentions(
        missing.reason, f"({tmp_path})", "cuda_runtime_api.h", "crt/host_config.h", "nv/target", "libcudart_static.a"
    )
    assert mentions(missing.reason, f"{site}/nvidia/cu13)", "nvcc", "crt/host_config.h", "nv/target", "cicc")
    assert "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'" in missing.fix


def test_pip_has_no_compiler_for_cuda_12(site: Path) -> None:
    write(site / "nvidia", "cuda_nvcc/bin/ptxas", "cuda_nvcc/include/crt/host_config.h", "cuda_cccl/include/nv/target")
    write(site / "nvidia", "cuda_runtime/include/cuda_runtime_api.h", "cuda_runtime/lib/libcudart_static.a")
    missing = find_toolkit({}, [site], "12.6")
    assert isinstance(missing, Missing)
    assert mentions(missing.reason, "no nvcc", "no cicc")
    assert mentions(missing.fix, "NVIDIA's CUDA 12.6")


def test_pips_toolkit_is_laid_out_like_a_systems(site: Path, tmp_path: Path) -> None:
    pips_toolkit(site)
    found = find_toolkit({}, [site], "13.0")
    assert isinstance(found, Toolkit)
    for _ in range(2):  # a second build may find the folder of the first
        home = lay_out(found, tmp_path / "cuda")
        assert (home / "lib64/libcudart.so").resolve() == site / "nvidia/cu13/lib/libcudart.so.13"
        for file in ("bin/nvcc", "nvvm/bin/cicc", "include/cccl/nv/target", "lib64/libcudart_static.a"):
            assert (home / file).is_file()


def test_a_systems_toolkit_is_used_where_it_is(tmp_path: Path, site: Path) -> None:
    home = system_toolkit(tmp_path / "cuda")
    found = find_toolkit({"CUDA_HOME": str(home)}, [site], "13.0")
    assert isinstance(found, Toolkit)
    assert lay_out(found, tmp_path / "other") == home
    assert not (tmp_path / "other").exists()


TOOLKIT = Toolkit("13.0", "CUDA_HOME (/cuda)", Path("/no/such/cuda"))


def test_pips_nccl_comes_before_the_systems(tmp_path: Path, site: Path) -> None:
    nccl_in(tmp_path / "usr/include", tmp_path / "usr/lib/x86_64-linux-gnu", "libnccl.so", "2.28.3")
    systems = find_nccl({}, [site], TOOLKIT)
    assert isinstance(systems, Nccl)
    assert (systems.version, systems.in_packages) == ("2.28.3", False)
    pips_nccl(site)
    pips = find_nccl({}, [site], TOOLKIT)
    assert pips == Nccl("2.29.7", site / "nvidia/nccl/include", site / "nvidia/nccl/lib/libnccl.so.2", True)


def test_the_users_nccl_comes_first(tmp_path: Path, site: Path) -> None:
    pips_nccl(site)
    nccl_in(tmp_path / "mine/include", tmp_path / "mine/lib", "libnccl_static.a", "2.18.5")
    whole = find_nccl({"HOROVOD_NCCL_HOME": str(tmp_path / "mine")}, [site], TOOLKIT)
    parts = {"HOROVOD_NCCL_INCLUDE": str(tmp_path / "mine/include"), "HOROVOD_NCCL_LIB": str(tmp_path / "mine/lib")}
    assert whole == find_nccl(parts, [site], TOOLKIT)
    assert whole == Nccl("2.18.5", tmp_path / "mine/include", tmp_path / "mine/lib/libnccl_static.a")
    missing = find_nccl({"HOROVOD_NCCL_HOME": str(tmp_path / "none")}, [site], TOOLKIT)
    assert isinstance(missing, Missing)
    assert "HOROVOD_NCCL_HOME" in missing.reason


def test_pips_nccl_for_another_cuda_is_not_used(site: Path) -> None:
    pips_nccl(site, "12")
    missing = find_nccl({}, [site], TOOLKIT)
    assert isinstance(missing, Missing)
    assert mentions(missing.reason, "pip's NCCL", "CUDA 12")
    assert "pip install nvidia-nccl-cu13" in missing.fix


def test_the_cuda_of_frameworks_is_read_from_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "tensorflow": "2.15.1"}
    for name, version in versions.items():
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(tmp_path, f"{name}-{version}.dist-info/METADATA", text=header)
    torchs = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    write(tmp_path, "torch/version.py", text=torchs)
    file = "tensorflow/python/platform/build_info.py"
    write(tmp_path, file, text="OrderedDict([('cuda_version', '12.2'), ('is_cuda_build', True)])\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(installed_frameworks().values()) == [TENSORFLOW, TORCH]
    write(tmp_path, "torch/version.py", text="cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    write(tmp_path, file, text="OrderedDict([('is_cuda_build', False), ('is_rocm_build', False)])\n")
    assert [each.cuda for each in installed_frameworks().values()] == [None, None]


# Decisions


def test_a_cuda_build_of_pytorch_is_given_nccl(site: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    made = plan(CPU_TENSORFLOW, TORCH, site=site)
    assert (made.target.cuda, made.target.nccl, made.target.nccl_in_packages) == ("13.0", "2.29.7", True)
    assert made.target.frameworks == ["tensorflow", "torch"]
    assert not made.asked
    assert not made.left_out_of_gpu
    assert made.included == (
        "TensorFlow 2.15.1: without CUDA",
        "PyTorch 2.13.0: built for CUDA 13.0",
        f"CUDA 13.0: pip's toolkit ({site}/nvidia/cu13)",
        f"NCCL 2.29.7: {site}/nvidia/nccl/lib/libnccl.so.2",
    )


def test_frameworks_without_cuda_are_built_without_it(site: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    made = plan(CPU_TENSORFLOW, CPU_TORCH, site=site)
    assert (made.toolkit, made.nccl, made.left_out_of_gpu) == (None, None, ())
    assert made.target.key == plan(CPU_TENSORFLOW, CPU_TORCH, site=site / "none").target.key
    assert plan(TORCH, site=site, linux=False).toolkit is None


@pytest.mark.parametrize(
    ("frameworks", "why"),
    [
        ((TENSORFLOW, TORCH), "TensorFlow 2.15.1 is built for CUDA 12.2 and PyTorch 2.13.0 is built for CUDA 13.0"),
        ((TORCH,), "no CUDA 13 toolkit was found"),
    ],
)
def test_why_cuda_is_left_out_is_said(frameworks: tuple[InstalledFramework, ...], why: str, site: Path) -> None:
    pips_nccl(site)
    made = plan(*frameworks, site=site)
    assert (made.toolkit, made.nccl, made.target.cuda) == (None, None, None)
    (line,) = made.left_out_of_gpu
    assert line.startswith("CUDA and NCCL, since ")
    assert why in line
    assert f"Left out: {line}." in gpu_limits(made, "")
    # If the user asks for it, the same is an error.
    with pytest.raises(BuildError) as caught:
        plan(*frameworks, site=site, HOROVOD_GPU_OPERATIONS="NCCL")
    assert mentions(str(caught.value), "HOROVOD_GPU_OPERATIONS", "NCCL")
    assert why in str(caught.value)


def test_nccl_cannot_be_had_for_cpu_builds(site: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    with pytest.raises(BuildError, match=r"not CUDA builds: .*install"):
        plan(CPU_TENSORFLOW, CPU_TORCH, site=site, HOROVOD_GPU_OPERATIONS="NCCL")
    beside = plan(CPU_TENSORFLOW, TORCH, site=site, HOROVOD_GPU_OPERATIONS="NCCL")
    assert (beside.target.nccl, beside.target.tensorflow_cuda) == ("2.29.7", None)


def test_without_nccl_pytorch_is_still_built_with_cuda(tmp_path: Path, site: Path) -> None:
    pips_toolkit(site)
    made = plan(CPU_TENSORFLOW, TORCH, site=site)
    assert (made.target.cuda, made.target.nccl) == ("13.0", None)
    assert "the CPU's memory" in gpu_limits(made, "")[0]
    assert "pip install nvidia-nccl-cu13" in gpu_limits(made, "")[1]
    for others in ((TENSORFLOW,), (TENSORFLOW, CPU_TORCH)):
        without = plan(*others, site=site, CUDA_HOME=str(system_toolkit(tmp_path / "cuda", "12.4")))
        assert (without.toolkit, without.target.cuda) == (None, None)
        assert mentions(without.left_out_of_gpu[0], "NCCL", "no NCCL", "CUDA 12.4")
    with pytest.raises(BuildError, match=r"HOROVOD_GPU_ALLREDUCE .*NCCL, .*no NCCL .*CUDA"):
        plan(TORCH, site=site, HOROVOD_GPU_ALLREDUCE="NCCL")


def test_the_user_can_leave_out_a_framework_or_cuda(tmp_path: Path, site: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    alone = plan(TENSORFLOW, TORCH, site=site, HOROVOD_WITHOUT_TENSORFLOW="1")
    assert (alone.target.tensorflow, alone.target.nccl) == (None, "2.29.7")
    assert "TensorFlow 2.15.1, since HOROVOD_WITHOUT_TENSORFLOW is 1" in alone.left_out
    assert alone.target.key == plan(TORCH, site=site).target.key
    without = plan(TORCH, site=site, HOROVOD_GPU_OPERATIONS="")
    assert (without.toolkit, without.target.cuda) == (None, None)
    assert without.left_out_of_gpu == ("CUDA and NCCL, since HOROVOD_GPU_OPERATIONS is empty",)


def test_the_users_toolkit_may_have_another_version(tmp_path: Path, site: Path) -> None:
    pips_nccl(site)
    home = system_toolkit(tmp_path / "cuda", "13.0")
    made = plan(TENSORFLOW, site=site, HOROVOD_CUDA_HOME=str(home))
    assert made.target.cuda == "13.0"
    assert mentions(made.included[1], "TensorFlow 2.15.1", "CUDA 12.2")


def test_asking_for_nccl_gives_the_same_wheel(site: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    asked = plan(TORCH, site=site, HOROVOD_GPU_OPERATIONS="NCCL")
    assert asked.asked
    assert asked.target == plan(TORCH, site=site).target


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MPI": "1"}, "HOROVOD_WITH_MPI and HOROVOD_WITHOUT_MPI are both 1"),
        ({"HOROVOD_WITHOUT_GLOO": "1"}, "sparkring connects Horovod's ranks with Gloo"),
        ({"HOROVOD_SKIP_COMPILE": "1"}, "HOROVOD_SKIP_COMPILE is 1"),
        ({"HOROVOD_GPU_OPERATIONS": "nccl"}, "HOROVOD_GPU_OPERATIONS is 'nccl', but Horovod accepts"),
        (
            {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_ALLREDUCE": "NCCL"},
            "HOROVOD_GPU_OPERATIONS and HOROVOD_GPU_ALLREDUCE are both set",
        ),
        ({"HOROVOD_WITH_PYTORCH": "1"}, "HOROVOD_WITH_PYTORCH is 1, but PyTorch is not installed"),
        ({"HOROVOD_WITHOUT_TENSORFLOW": "1"}, "leave out every installed framework"),
    ],
)
def test_variables_that_cannot_work_are_refused(variables: dict[str, str], sentence: str, site: Path) -> None:
    with pytest.raises(BuildError, match=sentence) as caught:
        plan(CPU_TENSORFLOW, site=site, **variables)
    assert str(caught.value).endswith("this command again.")


def test_each_option_that_changes_the_wheel_changes_its_key(site: Path) -> None:
    changes = [
        {},
        {"HOROVOD_WITH_MPI": "1"},
        {"HOROVOD_WITH_MXNET": "1"},
        {"HOROVOD_CPU_OPERATIONS": "MPI"},
        {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"},
        {"HOROVOD_DEBUG": "1"},
        {"HOROVOD_GPU": "ROCM", "HOROVOD_GPU_OPERATIONS": "NCCL"},
    ]
    assert len({plan(CPU_TENSORFLOW, site=site, **each).target.key for each in changes}) == len(changes)
    for unchanged in ({"HOROVOD_LOG_LEVEL": "debug"}, {"HOROVOD_WITHOUT_MPI": "1"}, {"HOROVOD_CMAKE": "/bin/cmake"}):
        assert plan(CPU_TENSORFLOW, site=site, **unchanged).target.key == plan(CPU_TENSORFLOW, site=site).target.key


# The build


def variables_of(made: BuildPlan, home: Path | None = None, **environ: str) -> dict[str, str]:
    env = wheel.build_environment(made, Path("/usr/bin/cmake"), home, {"PATH": "/usr/bin", **environ})
    return {name: value for name, value in env.items() if name.startswith("HOROVOD_")}


def test_a_build_without_options_has_gloo_and_nothing_else(site: Path) -> None:
    environ = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_RANK": "1", "MAKEFLAGS": " -- PYTHON=python3"}
    made = plan(CPU_TENSORFLOW, site=site, **environ)
    assert variables_of(made, **environ) == {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_CMAKE": "/usr/bin/cmake",
    }
    assert wheel.build_environment(made, Path("cmake"), None, environ)["MAKEFLAGS"].startswith("-j")


def test_the_users_options_reach_the_build(site: Path) -> None:
    chosen = {"HOROVOD_WITH_MPI": "1", "HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_BUILD_CUDA_CC_LIST": "80,90"}
    found = variables_of(plan(CPU_TENSORFLOW, site=site, **chosen))
    assert chosen.items() <= found.items()
    assert "HOROVOD_WITHOUT_MPI" not in found


def test_a_build_with_nccl_is_told_where_everything_is(site: Path, tmp_path: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    made = plan(TORCH, site=site)
    env = wheel.build_environment(made, Path("cmake"), tmp_path, {"PATH": "/usr/bin", "CUDA_HOME": "/other"})
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["HOROVOD_NCCL_INCLUDE"] == str(site / "nvidia/nccl/include")
    assert env["HOROVOD_NCCL_LIB"] == str(site / "nvidia/nccl/lib")
    assert env["HOROVOD_NCCL_LINK"] == "SHARED"
    assert env["HOROVOD_CUDA_HOME"] == env["CUDA_HOME"] == str(tmp_path)
    assert env["PATH"].split(":") == [f"{tmp_path}/bin", "/usr/bin"]
    single = variables_of(plan(TORCH, site=site, HOROVOD_GPU_ALLREDUCE="NCCL"), tmp_path)
    assert single["HOROVOD_GPU_ALLREDUCE"] == "NCCL"
    assert "HOROVOD_GPU_OPERATIONS" not in single


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets builds with CUDA fail and others succeed; lists which builds were tried."""
    tried: list[bool] = []

    def build(made: BuildPlan, cache: Path, progress: watch.StepProgress, *, force: bool, verbose: bool) -> Path:
        (cache / made.target.key).mkdir(parents=True, exist_ok=True)
        tried.append(made.toolkit is not None)
        if made.toolkit:
            raise wheel.CudaBuildFailed("nvcc says no")
        return cache / "horovod.whl"

    monkeypatch.setattr(wheel, "_build", build)
    return tried


def test_a_build_with_cuda_that_fails_is_followed_by_one_without(
    builds: list[bool], site: Path, tmp_path: Path
) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    shown = io.StringIO()
    built = wheel.build(plan(TORCH, site=site), tmp_path, watch.StepProgress(shown))
    assert builds == [True, False]
    assert built.plan.target.cuda is None
    assert "nvcc says no" in shown.getvalue()
    assert any("nvcc says no" in line for line in gpu_limits(built.plan, built.failure))
    # The next call does not spend minutes on the same failure, but says it again. --force tries again.
    again = wheel.build(plan(TORCH, site=site), tmp_path, watch.StepProgress(io.StringIO()))
    assert (builds, again.failure) == ([True, False, False], "nvcc says no")
    wheel.build(plan(TORCH, site=site), tmp_path, watch.StepProgress(io.StringIO()), force=True)
    assert builds[3:] == [True, False]


def test_a_build_that_the_user_has_asked_for_fails(builds: list[bool], site: Path, tmp_path: Path) -> None:
    pips_toolkit(site)
    pips_nccl(site)
    with pytest.raises(BuildError, match="nvcc says no"):
        wheel.build(plan(TORCH, site=site, HOROVOD_GPU_OPERATIONS="NCCL"), tmp_path, watch.StepProgress(io.StringIO()))
    assert builds == [True]


# The proof


def fake_horovod(folder: Path, *, nccl: int = 22907, cuda: int = 1, fails: str = "") -> Path:
    """Write modules named horovod.torch and torch. This torch sees no GPU."""
    facts = {"gloo": 1, "mpi": 0, "nccl": nccl, "cuda": cuda, "rocm": 0}
    code = "".join(f"def {name}_built():\n    return {value}\n" for name, value in facts.items())
    write(folder, "horovod/__init__.py")
    write(folder, "horovod/torch.py", text=f"{fails}\n{code}")
    write(folder, "torch.py", text="class cuda:\n    is_available = staticmethod(lambda: False)\n")
    return folder


TARGET = Target("cp311", "linux_x86_64", None, "2.13.0", 20, torch_cuda="13.0", cuda="13.0", nccl="2.29.7")


def test_the_facts_of_a_build_are_those_that_horovod_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")  # must not reach the process, which would wait for rank 0
    (found,) = proof.prove(TARGET, watch.StepProgress(io.StringIO()), path=fake_horovod(tmp_path))
    assert found == Proof("torch", gloo=True, mpi=False, nccl=22907, cuda=True, rocm=False, gpu=None)
    assert mentions(str(found), "horovod.torch", "Gloo", "NCCL 2.29.7", "CUDA", "PyTorch", "no GPU", "no")
    assert mentions(str(replace(found, gpu="NVIDIA X")), "NVIDIA X")
    assert mentions(str(replace(found, nccl=0, cuda=False)), "horovod.torch", "Gloo")


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        ({"nccl": 0}, "horovod.torch was built without NCCL"),
        ({"cuda": 0}, "horovod.torch was built without CUDA"),
        ({"fails": "raise ImportError('undefined symbol: ncclSend')"}, "does not load: ImportError: undefined symbol"),
    ],
)
def test_a_build_that_lacks_something_is_refused(built: dict[str, object], reason: str, tmp_path: Path) -> None:
    folder = fake_horovod(tmp_path, **built)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=reason) as caught:
        proof.prove(TARGET, watch.StepProgress(io.StringIO()), path=folder)
    assert not isinstance(caught.value, proof.ModuleMissing)


def test_a_part_for_a_cpu_build_needs_no_cuda(tmp_path: Path) -> None:
    target = replace(TARGET, torch_cuda=None, tensorflow_cuda="13.0")
    (found,) = proof.prove(target, watch.StepProgress(io.StringIO()), path=fake_horovod(tmp_path, nccl=0, cuda=0))
    assert (found.nccl, found.cuda) == (0, False)


def test_a_package_that_is_not_yet_installed_is_told_apart(tmp_path: Path) -> None:
    folder = fake_horovod(tmp_path, fails="import no_such_package")
    with pytest.raises(proof.ModuleMissing):
        proof.prove(TARGET, watch.StepProgress(io.StringIO()), path=folder)


@pytest.mark.parametrize(("total", "gpu"), [("[0.0, 1.0, 2.0, 3.0]", "NVIDIA X"), ("[0.0, 0.0, 0.0, 0.0]", None)])
def test_an_allreduce_on_a_gpu_must_give_the_right_sum(total: str, gpu: str | None, tmp_path: Path) -> None:
    """With modules that behave as if there were a GPU."""
    fake_horovod(tmp_path)
    write(
        tmp_path,
        "torch.py",
        text="class cuda:\n    is_available = staticmethod(lambda: True)\n"
        "    get_device_name = staticmethod(lambda index: 'NVIDIA X')\n"
        "def arange(end, device):\n    assert device == 'cuda:0'\n    return Tensor()\n"
        f"class Tensor:\n    is_cuda = True\n    tolist = staticmethod(lambda: {total})\n",
    )
    with (tmp_path / "horovod/torch.py").open("a") as module:
        module.write("Sum = 1\ndef init():\n    pass\ndef allreduce(tensor, op):\n    return tensor\n")
    progress = watch.StepProgress(io.StringIO())
    if gpu is None:
        with pytest.raises(BuildError, match=r"allreduce .*GPU gave"):
            proof.prove(TARGET, progress, path=tmp_path)
    else:
        assert [found.gpu for found in proof.prove(TARGET, progress, path=tmp_path)] == [gpu]


def test_the_help_names_the_variables() -> None:
    code = "import sys; from sparkring.tools.build_horovod import main; main(['--help'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_NCCL_HOME", "cuda-toolkit[nvcc,cccl]"):
        assert name in answer.stdout
    assert read_options({}) == BuildOptions({})
