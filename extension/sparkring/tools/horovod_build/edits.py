"""The changes to Horovod's source that current frameworks, compilers and pip's CUDA need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from sparkring.tools.horovod_build.errors import BuildError
from sparkring.tools.horovod_build.options import VARIABLE_OF
from sparkring.tools.horovod_build.target import FIRST_TENSORFLOW_WITH_HANDLES, HOROVOD, Target


@dataclass(frozen=True)
class Edit:
    """One replacement in Horovod's source."""

    path: str
    old: str
    new: str


def edits(target: Target) -> list[Edit]:
    """Return the changes to Horovod's source that this target needs."""
    # Build without debug information, since generating it takes a third of the compiler's time.
    wanted = [Edit("setup.py", "'RelWithDebInfo'", "'Release'"), _edit_for_interface()]
    if target.cxx_standard != 14:
        # The first file sets the standard for Gloo, the second for the PyTorch part, and both must be the same. Gloo's
        # constants are inline in C++17 but not in C++14, so with two standards a constant would be defined twice, and
        # linking would fail.
        old, new = (f"set(CMAKE_CXX_STANDARD {standard})" for standard in (14, target.cxx_standard))
        wanted += [Edit("CMakeLists.txt", old, new), Edit("horovod/torch/CMakeLists.txt", old, new)]
    if target.tensorflow and target.cxx_standard >= 17:
        # Gloo is compiled once for both parts. Horovod would compile it again for TensorFlow.
        asked = "Tensorflow_CXX17 AND NOT Tensorflow_CXX11"
        old, new = (f"    if ({which})\n       list" for which in ("Tensorflow_CXX17", asked))
        wanted += [
            Edit("CMakeLists.txt", "(DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17)", f"({asked})"),
            Edit("horovod/tensorflow/CMakeLists.txt", old, new),
        ]
    if not (target.cuda or target.options):
        # Horovod's own sources are compiled several at a time, because most of the time goes into their headers.
        wanted += map(_edit_for_batches, target.frameworks)
    if target.torch and not (target.cuda and target.torch_cuda):
        # PyTorch treats any nvcc, or the folder /usr/local/cuda, as a CUDA toolkit, even if it lacks what the build
        # needs. Without CUDA, Horovod takes tensors in the CPU's memory only.
        has_cuda = 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        wanted.append(Edit("cmake/Modules/FindPytorch.cmake", has_cuda, f"{has_cuda}set(Pytorch_CUDA FALSE)\n"))
    if target.has_keras_3:
        # This file needs XLA headers that TensorFlow 2.16 and later do not ship. Only XLA-compiled collectives use it.
        line = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'
        wanted.append(Edit("horovod/tensorflow/CMakeLists.txt", line, ""))
        # Horovod must use the same Keras as tf.keras. From TensorFlow 2.16 on, the module `keras` is always Keras 3,
        # but tf.keras is Keras 2 (from the package tf-keras) if TF_USE_LEGACY_KERAS is set.
        imported = "from keras import backend as K"
        wanted += [
            Edit(f"horovod/tensorflow/keras/{name}.py", imported, "from tensorflow.keras import backend as K")
            for name in ("__init__", "callbacks")
        ]
    return wanted + (_edits_for_cuda(target) if target.cuda else [])


def _edit_for_batches(framework: str) -> Edit:
    """Return the edit that compiles the sources of one part in batches, except those that are for the framework."""
    name = {"tensorflow": "TF", "torch": "PYTORCH"}[framework]
    old = f"add_library(${{{name}_TARGET_LIB}} SHARED"
    single = f"set_source_files_properties(${{{name}_SOURCES}} PROPERTIES SKIP_UNITY_BUILD_INCLUSION TRUE)"
    return Edit(f"horovod/{framework}/CMakeLists.txt", old, f"{single}\nset(CMAKE_UNITY_BUILD TRUE)\n{old}")


def _edit_for_interface() -> Edit:
    """Return the edit that makes all of Gloo's connections use the interface in HOROVOD_GLOO_IFACE.

    Horovod's own code reads the interface from the new context, where it is not set yet. Gloo would then use the
    address to which the host's name resolves, which other hosts may not reach, and would crash if the name does not
    resolve.
    """
    made = """device_attr.iface = {};
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
"""
    path = "horovod/common/gloo/gloo_context.cc"
    return Edit(path, made.format("gloo_iface_"), made.format("global_context.gloo_iface_"))


def _edits_for_cuda(target: Target) -> list[Edit]:
    kernels = "horovod/common/ops/cuda/CMakeLists.txt"
    wanted = [
        # The headers of CUDA 13 need C++17.
        Edit(kernels, "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)"),
        # These kernels are for frameworks with the older C++ ABI. They are built only if a framework needs them.
        Edit(
            kernels,
            "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)",
            "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)",
        ),
    ]
    if target.nccl:
        # pip's NCCL has a library with a version in its name only, and the user may name any folder.
        wanted += [
            Edit("cmake/Modules/FindNCCL.cmake", 'NAMES "nccl"', "NAMES nccl libnccl.so.2"),
            Edit("cmake/Modules/FindNCCL.cmake", 'set(NCCL_LIBNAME "nccl")', "set(NCCL_LIBNAME nccl libnccl.so.2)"),
        ]
    if target.nccl_in_packages:
        # Horovod must find pip's NCCL when it is imported, in any environment. The path is relative to the folders
        # horovod/tensorflow and horovod/torch.
        project = "project(horovod CXX)\n"
        path = 'set(CMAKE_BUILD_RPATH "$ORIGIN/../../nvidia/nccl/lib")\n'
        wanted.append(Edit("CMakeLists.txt", project, project + path))
    for framework, cuda in (("tensorflow", target.tensorflow_cuda), ("torch", target.torch_cuda)):
        if framework in target.frameworks and not cuda:
            wanted.append(_without_gpu(framework))
    if target.tensorflow and target.tensorflow_cuda and Version(target.tensorflow) >= FIRST_TENSORFLOW_WITH_HANDLES:
        operations = "horovod/tensorflow/mpi_ops.cc"
        declared = """// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
"""
        defined = """static GpuStreamHandle GpuStreamOf(stream_executor::Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
"""
        header = '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n'
        wanted += [
            Edit(operations, declared, ""),
            Edit(operations, "stream_executor::gpu::AsGpuStreamValue(", "GpuStreamOf("),
            Edit(operations, header, '#include "xla/stream_executor/stream.h"\n'),
            Edit(
                operations,
                "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n",
                f"#endif // TENSORFLOW_VERSION >= 2011000000\n\n{defined}#endif // HAVE_GPU\n",
            ),
        ]
    return wanted


def _without_gpu(framework: str) -> Edit:
    """Return the edit that builds the part for one framework as if the whole build were without CUDA.

    A part with CUDA needs functions that only the framework's CUDA builds have. What these lines set is valid in the
    folder of this part only.
    """
    first = f'if("$ENV{{HOROVOD_WITHOUT_{VARIABLE_OF[framework]}}}" STREQUAL "1")\n'
    return Edit(
        f"horovod/{framework}/CMakeLists.txt",
        first,
        f"""\
get_directory_property(DEFINITIONS_OF_PART COMPILE_DEFINITIONS)
list(FILTER DEFINITIONS_OF_PART EXCLUDE REGEX "^(HAVE_(CUDA|GPU|NCCL)|HOROVOD_GPU_)")
set_directory_properties(PROPERTIES COMPILE_DEFINITIONS "${{DEFINITIONS_OF_PART}}")
list(FILTER SOURCES EXCLUDE REGEX "(cuda|gpu|nccl)_operations\\.cc$")
list(FILTER LINKER_LIBS EXCLUDE REGEX "nccl|cudart")
set(HAVE_CUDA FALSE)
{first}""",
    )


def patch(source: Path, changes: Sequence[Edit]) -> None:
    """Apply `changes` to the files in `source`. Raise BuildError if a file lacks the text to replace."""
    for edit in changes:
        file = source / edit.path
        text = file.read_text(encoding="utf-8")
        if edit.old not in text:
            raise BuildError(
                f"Horovod's {edit.path} does not contain {edit.old.strip()!r}, so this is not the source of "
                f"{HOROVOD} that this command expects: run it again with --force to download the source again."
            )
        file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
