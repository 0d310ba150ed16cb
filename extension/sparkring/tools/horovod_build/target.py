"""What a wheel of Horovod is built for, and the name under which the cache keeps it."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from sparkring.tools.horovod_build.frameworks import TITLES, InstalledFramework, torchs_build_support

HOROVOD = "0.28.1"
# The recipe's number is part of a wheel's key, so that wheels of an older recipe are not used. Raise it when the edits
# to the source, or the build's environment variables, change. TensorFlow 2.16 and later need other edits, so their
# recipe has a number of its own. Builds with CUDA need further edits, which have a number of their own, too.
RECIPE, RECIPE_WITH_KERAS_3, RECIPE_WITH_CUDA = 4, 5, 1
FIRST_TENSORFLOW_WITH_KERAS_3 = Version("2.16")
# From this version on, Horovod compiles the TensorFlow part as C++17.
FIRST_TENSORFLOW_WITH_CXX17 = Version("2.10")
# Horovod gets a GPU's stream from AsGpuStreamValue(), which newer versions of TensorFlow do not have. From this version
# on, there is platform_specific_handle(), which does the same.
FIRST_TENSORFLOW_WITH_HANDLES = Version("2.15")


@dataclass(frozen=True)
class Target:
    """What a wheel is built for. Equal targets can share a wheel.

    `tensorflow_cuda` and `torch_cuda` are the versions of CUDA that the frameworks are built for. `cuda` and `nccl` are
    the versions that Horovod is built with, or None; `nccl_in_packages` is whether this is pip's NCCL. `options` is a
    digest of the user's variables.
    """

    python: str
    platform: str
    tensorflow: str | None
    torch: str | None
    cxx_standard: int
    tensorflow_cuda: str | None = None
    torch_cuda: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nccl_in_packages: bool = False
    options: str = ""

    @property
    def key(self) -> str:
        """The name of the cache folder that holds the wheel."""
        recipe = f"r{RECIPE_WITH_KERAS_3 if self.has_keras_3 else RECIPE}"
        versions = (("tf", self.tensorflow, self.tensorflow_cuda), ("torch", self.torch, self.torch_cuda))
        frameworks = [f"{name}{version}{f'cu{cuda}' if cuda else ''}" for name, version, cuda in versions if version]
        built_with = [f"cuda{self.cuda}"] if self.cuda else []
        if self.nccl:
            built_with.append(f"nccl{self.nccl}{'pip' if self.nccl_in_packages else ''}")
        if self.options:
            built_with.append(f"o{self.options}")
        recipe += f"c{RECIPE_WITH_CUDA}" if self.cuda else ""
        built_for = [self.python, self.platform, *frameworks, f"cxx{self.cxx_standard}", *built_with, recipe]
        return "-".join([f"horovod{HOROVOD}", *built_for])

    @property
    def has_keras_3(self) -> bool:
        """Whether this TensorFlow comes with Keras 3, that is, from 2.16 on."""
        return self.tensorflow is not None and Version(self.tensorflow) >= FIRST_TENSORFLOW_WITH_KERAS_3

    @property
    def frameworks(self) -> list[str]:
        """The names of the frameworks, which are also the names of Horovod's subpackages for them."""
        return [name for name in TITLES if getattr(self, name)]

    def __str__(self) -> str:
        frameworks = " and ".join(f"{TITLES[name]} {getattr(self, name)}" for name in self.frameworks)
        nccl = f"NCCL {self.nccl} and " if self.nccl else ""
        gpu = f" with {nccl}CUDA {self.cuda}" if self.cuda else ""
        return f"Horovod {HOROVOD}{gpu} for {frameworks} on {self.python}, {self.platform}"


def target_for(frameworks: Mapping[str, InstalledFramework], options: str = "") -> Target:
    """Return the target for these frameworks and the running Python, without CUDA. At least one framework is needed."""
    versions = {name: framework.version for name, framework in frameworks.items()}
    cuda = {name: framework.cuda for name, framework in frameworks.items()}
    return Target(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform().replace("-", "_").replace(".", "_"),
        tensorflow=versions.get("tensorflow"),
        torch=versions.get("torch"),
        cxx_standard=_cxx_standard(versions.get("tensorflow"), versions.get("torch")),
        tensorflow_cuda=cuda.get("tensorflow"),
        torch_cuda=cuda.get("torch"),
        options=options,
    )


def _cxx_standard(tensorflow: str | None, torch: str | None) -> int:
    """Return the C++ standard for Gloo and for Horovod's PyTorch part. The TensorFlow part chooses its own standard.

    From C++17 on, libraries that were compiled for different standards can be linked.
    """
    standard = 17 if tensorflow and Version(tensorflow) >= FIRST_TENSORFLOW_WITH_CXX17 else 14
    if torch:
        # The compiler flags that PyTorch gives to extensions name the standard that its headers need.
        named = re.findall(r"-std=c\+\+(\d+)", torchs_build_support())
        fallback = 17 if Version(torch) >= Version("2.1") else 14
        standard = max([standard, fallback, *map(int, named)])
    return standard
