"""Finds a CUDA toolkit and NCCL, on the system or among pip's nvidia-… packages. Nothing is run or imported."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOME = Path("/usr/local/cuda")
# Where Linux distributions put NCCL's header and library.
SYSTEM_ROOTS = (Path("/usr"), Path("/usr/local"))
_INCLUDES = ("include", "targets/*/include")
_LIBRARIES = ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu")
# What a build needs of a toolkit. cuda_fp16.h, which Horovod's kernels include, includes nv/target.
_PARTS = {
    "nvcc": ("bin/nvcc",),
    "cuda_runtime_api.h": tuple(f"{folder}/cuda_runtime_api.h" for folder in _INCLUDES),
    "crt/host_config.h": tuple(f"{folder}/crt/host_config.h" for folder in _INCLUDES),
    "nv/target": tuple(f"{folder}/{parent}nv/target" for folder in _INCLUDES for parent in ("", "cccl/")),
    "libcudart_static.a": tuple(f"{folder}/libcudart_static.a" for folder in _LIBRARIES),
}
# nvcc starts cicc. pip has a package of its own for it; system packages put it into different folders.
_PARTS_IN_PACKAGES = {**_PARTS, "cicc": ("nvvm/bin/cicc",)}


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit. `origin` says how it was found, for messages.

    The parts of a toolkit from pip are in one or more `packages` (folders), which lay_out() joins. Otherwise, all parts
    are in `home`.
    """

    version: str
    origin: str
    home: Path
    packages: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Nccl:
    """The folder of NCCL's header, and NCCL's library. `in_packages` is whether they are pip's."""

    version: str
    include: Path
    binary: Path
    in_packages: bool = False


@dataclass(frozen=True)
class Missing:
    """Says in `reason` why something was not found, and in `fix` what to do about it."""

    reason: str
    fix: str


def find_toolkit(environ: Mapping[str, str], site_packages: Sequence[Path], wanted: str) -> Toolkit | Missing:
    """Return a toolkit of the same major version as the CUDA version `wanted`.

    A toolkit that HOROVOD_CUDA_HOME names is used even if its version is another. `site_packages` are the folders that
    may contain pip's packages.
    """
    chosen = environ.get("HOROVOD_CUDA_HOME")
    reasons = []
    for origin, folders, in_packages in _places(environ, site_packages, chosen):
        parts = _PARTS_IN_PACKAGES if in_packages else _PARTS
        lacking = [name for name, patterns in parts.items() if _first(folders, patterns) is None]
        if lacking:
            reasons.append(f"{origin} has no {_enumerate(lacking)}")
            continue
        version = _toolkits_version(folders)
        if not chosen and _major(version) != _major(wanted):
            reasons.append(f"{origin} has CUDA {version}")
            continue
        return Toolkit(version, origin, folders[0], folders if in_packages else ())
    return Missing(
        f"no CUDA {_major(wanted)} toolkit was found{': ' + '; '.join(reasons) if reasons else ''}",
        _get_toolkit(wanted, chosen),
    )


def find_nccl(
    environ: Mapping[str, str],
    site_packages: Sequence[Path],
    toolkit: Toolkit,
) -> Nccl | Missing:
    """Return the NCCL to build with: the one that the user's HOROVOD_NCCL_… variables name, pip's, or the system's.

    pip's comes before the system's, since PyTorch loads it, too.
    """
    include, library = environ.get("HOROVOD_NCCL_INCLUDE"), environ.get("HOROVOD_NCCL_LIB")
    home = environ.get("HOROVOD_NCCL_HOME")
    if home or include or library:
        roots = [Path(home)] if home else [toolkit.home, *SYSTEM_ROOTS]
        nccl = _nccl_in([Path(include)] if include else _folders(roots, _INCLUDES), _library_folders(library, roots))
        named = " and ".join(name for name in ("HOME", "INCLUDE", "LIB") if environ.get(f"HOROVOD_NCCL_{name}"))
        return nccl or Missing(
            f"there is no NCCL (nccl.h and libnccl) where HOROVOD_NCCL_{named} points",
            "correct this variable, or unset it",
        )
    reasons = []
    for site in site_packages:
        package = site / "nvidia" / "nccl"
        nccl = _nccl_in([package / "include"], [package / "lib"], in_packages=True)
        if nccl:
            majors = {folder.name.split("_cu")[1].split("-")[0] for folder in site.glob("nvidia_nccl_cu*-*.dist-info")}
            if not majors or _major(toolkit.version) in majors:
                return nccl
            reasons.append(f"pip's NCCL is for CUDA {' and '.join(sorted(majors))}")
    for root in (toolkit.home, *SYSTEM_ROOTS):
        nccl = _nccl_in(_folders([root], _INCLUDES), _folders([root], _LIBRARIES))
        if nccl:
            return nccl
    return Missing(
        f"no NCCL for CUDA {toolkit.version} was found{': ' + '; '.join(reasons) if reasons else ''}",
        f"run `pip install nvidia-nccl-cu{_major(toolkit.version)}`",
    )


def lay_out(toolkit: Toolkit, folder: Path) -> Path:
    """Return the home of a toolkit, as compilers and CMake expect it.

    A toolkit from pip has no folder lib64, and its libraries have no names without a version, so links to all of its
    files are put into `folder`, under the usual names.
    """
    if not toolkit.packages:
        return toolkit.home
    if folder.exists():
        shutil.rmtree(folder)
    for package in toolkit.packages:
        for part in ("bin", "include", "lib", "nvvm"):
            _link(package / part, folder / part)
    for library in sorted((folder / "lib").glob("lib*.so.*")):
        plain = library.with_name(f"{library.name.split('.so.')[0]}.so")
        if not plain.is_symlink():
            plain.symlink_to(library.name)
    (folder / "lib64").symlink_to("lib")
    return folder


def _link(source: Path, place: Path) -> None:
    """Put a link to each file below `source` into a folder of the same name below `place`."""
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        for child in source.iterdir():
            _link(child, place / child.name)
    elif source.exists() and not place.is_symlink():
        place.symlink_to(source.resolve())


def _places(
    environ: Mapping[str, str], site_packages: Sequence[Path], chosen: str | None
) -> Iterator[tuple[str, tuple[Path, ...], bool]]:
    """Return the places where a toolkit may be: how each is called, its folders, and whether they are pip's."""
    if chosen:
        # This may be the folder of pip's toolkit, nvidia/cu13.
        yield f"HOROVOD_CUDA_HOME ({chosen})", (Path(chosen),), Path(chosen).parent.name == "nvidia"
        return
    seen = set()
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    on_path = str(Path(nvcc).resolve().parent.parent) if nvcc else ""
    for origin, home in (
        ("CUDA_HOME", environ.get("CUDA_HOME")),
        ("CUDA_PATH", environ.get("CUDA_PATH")),
        ("the toolkit of the nvcc on PATH", on_path),
        ("", str(DEFAULT_HOME) if DEFAULT_HOME.is_dir() else ""),
    ):
        if home and Path(home).resolve() not in seen:
            seen.add(Path(home).resolve())
            yield f"{origin} ({home})" if origin else home, (Path(home),), False
    for site in site_packages:
        nvidia = site / "nvidia"
        for folder in sorted(nvidia.glob("cu[0-9]*"), reverse=True):
            yield f"pip's toolkit ({folder})", (folder,), True
        # Up to CUDA 12, each package has a folder of its own.
        packages = tuple(nvidia / name for name in ("cuda_nvcc", "cuda_runtime", "cuda_cccl"))
        if any(package.is_dir() for package in packages):
            yield f"pip's toolkit ({nvidia}/cuda_…)", packages, True


def _get_toolkit(wanted: str, chosen: str | None) -> str:
    """Return what to do if there is no toolkit."""
    if chosen:
        return "correct HOROVOD_CUDA_HOME, or unset it"
    # Up to CUDA 12, pip's packages contain no nvcc.
    if int(_major(wanted)) < 13:
        return f"install NVIDIA's CUDA {wanted} toolkit (pip has no nvcc for it) and set CUDA_HOME to its folder"
    return f"run `pip install 'cuda-toolkit[nvcc,cccl]=={wanted}.*'`"


def _toolkits_version(folders: Sequence[Path]) -> str:
    """Return the version in a toolkit's headers, such as "13.0"."""
    header = _first(folders, _PARTS["cuda_runtime_api.h"])
    assert header is not None
    number = int(_defined(header, "CUDART_VERSION") or 0)
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl_in(includes: Sequence[Path], libraries: Sequence[Path], *, in_packages: bool = False) -> Nccl | None:
    header = _first(includes, ("nccl.h",))
    library = _first(libraries, ("libnccl_static.a", "libnccl.so", "libnccl.so.2"))
    if header is None or library is None:
        return None
    version = ".".join(_defined(header, f"NCCL_{part}") or "?" for part in ("MAJOR", "MINOR", "PATCH"))
    return Nccl(version, header.parent, library, in_packages)


def _library_folders(chosen: str | None, roots: Sequence[Path]) -> Sequence[Path]:
    return [Path(chosen)] if chosen else _folders(roots, _LIBRARIES)


def _folders(roots: Sequence[Path], patterns: Sequence[str]) -> list[Path]:
    return [folder for root in roots for pattern in patterns for folder in sorted(root.glob(pattern))]


def _first(roots: Sequence[Path], patterns: Sequence[str]) -> Path | None:
    """Return the first file below `roots` that matches one of `patterns`."""
    return next((file for file in _folders(roots, patterns) if file.is_file()), None)


def _defined(header: Path, name: str) -> str | None:
    """Return the number that a header defines as `name`."""
    text = header.read_text(encoding="utf-8", errors="replace")
    defined = re.search(rf"^\s*#\s*define\s+{name}\s+(\d+)", text, re.MULTILINE)
    return defined and defined[1]


def _major(version: str) -> str:
    return version.split(".")[0]


def _enumerate(names: Sequence[str]) -> str:
    return " and no ".join([", no ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
