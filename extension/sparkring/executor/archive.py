"""Sends sparkring's code to executors that do not have it, as a zip."""

from __future__ import annotations

import functools
import io
import os
import py_compile
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import sparkring


@functools.cache
def archive(with_nvml: bool) -> bytes:
    """Return a zip with sparkring and cloudpickle. Python can import them from the zip on executors that have neither.

    The driver compiles the modules once, because otherwise each member would compile them. The executors can load the
    compiled modules, because Spark ensures that the driver and the executors run the same minor version of Python.
    pynvml is as large as all other files together, so it is included only if `with_nvml` is true, which means that
    there are GPUs.
    """
    import cloudpickle

    roots = [Path(str(package.__file__)).parent for package in (sparkring, cloudpickle)]
    files = [(path, path.relative_to(root.parent)) for root in roots for path in sorted(root.rglob("*.py"))]
    if with_nvml:
        import pynvml

        path = Path(pynvml.__file__)
        files.append((path, Path(path.name)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written, tempfile.TemporaryDirectory(prefix="sparkring-") as folder:
        compiled = str(Path(folder, "module.pyc"))
        for path, name in files:
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(path), compiled, dfile=str(name), doraise=True, invalidation_mode=unchecked)
            written.write(compiled, f"{name}c")
    return buffer.getvalue()


def unpacked(archive: Any, folder: str) -> str:
    """Write an archive of sparkring to a folder. Return its path, which a process needs among the `first`.

    The archive is bytes or, with Spark Connect, an Artifact with compressed bytes.
    """
    path = os.path.join(folder, "sparkring.zip")
    if not isinstance(archive, bytes):
        archive = zlib.decompress(archive.value[0])
    with open(path, "wb") as file:
        file.write(archive)
    return path
