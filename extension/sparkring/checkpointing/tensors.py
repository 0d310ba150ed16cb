"""Writes arrays to a file in the safetensors format from beginning to end, and reads them back in the same way.

    8 bytes     the length of the header, little-endian
    header      JSON: {"__metadata__": {text: text}, name: {"dtype": …, "shape": […], "data_offsets": [from, to]}, …}
    the rest    the arrays' bytes in C order, one after another, without gaps

A mount of an object store supports only sequential access: no seek, no append, no rename. So the digest is computed
while the file is written or read. If the format lacks the dtype of an array, the array is stored as bytes, and its
dtype is stored in the metadata.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import math
import mmap
import operator
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sparkring.checkpointing.digests import Digest
from sparkring.checkpointing.entries import File
from sparkring.checkpointing.tree import Array, Leaf, Raw
from sparkring.errors import CheckpointDamagedError, CheckpointError
from sparkring.runtime import limits
from sparkring.runtime.storage import Location

CHUNK_BYTES = 512 << 10  # how much is written or read at a time; a chunk fits into a core's cache, so hashing is fast
COPIERS = min(4, limits.cores())  # the largest number of threads that copy a state
PER_COPIER_BYTES = 8 << 20  # how many bytes justify another thread
COPIED_BYTES = 4 << 20  # how much a thread copies at a time
HEADER_BYTES = 100_000_000  # the largest header that safetensors' own readers accept
_npy: Any = np.lib.format  # describes dtypes as .npy files do; Any, because the module has no annotations
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
# Two keys in the metadata of a file: for the metadata that the caller gave, and for the dtypes that the format lacks.
_OURS, _DTYPES = "sparkring", "dtypes"
_UNSYNCED = ("EINVAL", "ENOSYS", "ENOTSUP", "EOPNOTSUPP")  # the errors of fsync() on a mount that does not support it

_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
_RAW = {"BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)}
_CODES = {name: code for code, name in _NUMPY.items()}
_RAW_CODES = {name: code for code, (name, _) in _RAW.items()}


class TensorInfo(NamedTuple):
    """The header's entry for an array. The array's bytes run from `start` to `stop`, counted from the header's end.

    `code` is the format's name for the array's dtype, and `dtype` is ''. If the format lacks the dtype, the array is
    stored as bytes: `code` is then "U8", and `dtype` describes the dtype.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str = ""


class FileLayout(NamedTuple):
    """All arrays of a file, in the order of the file."""

    arrays: tuple[TensorInfo, ...]
    size_bytes: int  # without the header


def lay_out(leaves: Mapping[str, Leaf]) -> FileLayout:
    """Decide where each of `leaves` is stored in the file."""
    infos, start = [], 0
    stored = [(name, leaf, *_stored(leaf)) for name, leaf in leaves.items()]
    # Arrays with large elements come first, so that each array is aligned for its dtype. A program that maps the file
    # into its memory may need this.
    for name, leaf, code, dtype, _ in sorted(stored, key=lambda row: -row[4]):
        stop = start + (memoryview(leaf.buffer).nbytes if isinstance(leaf, Raw) else leaf.nbytes)
        infos.append(TensorInfo(name, code, tuple(leaf.shape), start, stop, dtype))
        start = stop
    return FileLayout(tuple(infos), start)


def copy_into(arena: npt.NDArray[np.uint8], layout: FileLayout, leaves: Mapping[str, Leaf]) -> memoryview:
    """Copy `leaves` to the beginning of `arena`, in the layout of the file; return that part of `arena`."""
    pairs = iter([pair for info in layout.arrays for pair in _pairs(arena[info.start : info.stop], leaves[info.name])])

    def copy() -> None:
        for room, array in pairs:
            np.copyto(room, array)

    # The training waits for the copy. Several threads are faster, because one core alone cannot use the memory's full
    # bandwidth.
    count = min(COPIERS, layout.size_bytes // PER_COPIER_BYTES)
    threads = [threading.Thread(target=copy, name="sparkring-copy", daemon=True) for _ in range(count - 1)]
    try:
        for thread in threads:
            thread.start()
        copy()
    finally:  # after an interrupt, too: the next save uses the arena again, so no thread may still write to it
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return arena[: layout.size_bytes].data


def in_order(layout: FileLayout, leaves: Mapping[str, Leaf]) -> Iterator[memoryview]:
    """Yield the bytes of `leaves` in the order of the file, copied only if they are not contiguous."""
    return (_bytes_of(leaves[info.name]) for info in layout.arrays)


def write(file: Location, layout: FileLayout, metadata: Mapping[str, Any], buffers: Iterable[memoryview]) -> File:
    """Write a header and then `buffers`, and return the name, size and digest of the file.

    The buffers contain the bytes of the arrays in the order of `layout`. `metadata` has JSON values. Raises OSError.
    """
    digest = Digest()
    header = _header(layout, metadata)
    with open_synced(file) as out:
        for buffer in (memoryview(header), *buffers):
            for begin in range(0, len(buffer), CHUNK_BYTES):
                piece = buffer[begin : begin + CHUNK_BYTES]
                out.write(piece)
                digest.add(piece)
    return File(file.path.rpartition("/")[2], digest.size_bytes, str(digest))


@contextlib.contextmanager
def open_synced(file: Location) -> Iterator[Any]:
    """Open a file for writing. At the end of the block, a local file is flushed to the disk."""
    with file.fs.open(file.path, "wb") as out:
        yield out
        if file.local:
            out.flush()
            sync(out.fileno())


def sync(descriptor: int) -> None:
    """Flush a local file or folder to the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:  # not every mount supports fsync(); other errors, such as a full disk, are raised
        if errno.errorcode.get(error.errno or 0) not in _UNSYNCED:
            raise


def read(
    file: Location, written: File, room: Mapping[str, npt.NDArray[Any]] | None = None
) -> tuple[dict[str, Any], dict[str, Leaf]]:
    """Read the metadata and the arrays of a file, and check that its size and digest are those in `written`.

    With `room`, a local file is read twice: first to check its digest, so that a damaged file does not change `room`,
    then to read each array into the array of the same name in `room`, if it fits. This is faster than allocating new
    memory. Raises CheckpointDamagedError, which says what is wrong with the file, and OSError.
    """
    check_size(file, written)
    if room and file.local:
        check_digest(file, written)
        digest = None
    else:
        room, digest = {}, Digest()
    with file.fs.open(file.path, "rb") as source:
        reading = _Reading(source, digest, written.size_bytes, written.name)
        arrays, metadata = reading.header()
        leaves = {info.name: reading.array(info, room.get(info.name)) for info in arrays}
    if digest is not None and str(digest) != written.digest:
        raise CheckpointDamagedError(digest_mismatch(written.name))
    return _json(metadata.get(_OURS, "{}"), written.name), leaves


def read_metadata(file: Location, written: File) -> dict[str, Any]:
    """Read only the metadata of a file, and check the file's size, but not its digest. Raises the errors of read()."""
    check_size(file, written)
    with file.fs.open(file.path, "rb") as source:
        _, metadata = _Reading(source, None, written.size_bytes, written.name).header()
    return _json(metadata.get(_OURS, "{}"), written.name)


def check_digest(file: Location, written: File) -> None:
    """Raise CheckpointDamagedError if a file's bytes are not those that were written. Raises OSError."""
    digest, room = Digest(), _room(CHUNK_BYTES).data
    with file.fs.open(file.path, "rb") as source:
        while count := source.readinto(room):
            digest.add(room[:count])
    if str(digest) != written.digest:
        raise CheckpointDamagedError(digest_mismatch(written.name))


def check_size(file: Location, written: File) -> None:
    """Raise CheckpointDamagedError if a file is missing, or if its size has changed since it was written."""
    try:
        size = int(file.fs.size(file.path))
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{written.name} is missing") from None
    if size != written.size_bytes:
        raise CheckpointDamagedError(size_mismatch(written, size))


def size_mismatch(written: File, size: int) -> str:
    """Describe what is wrong with a file whose size is now `size`."""
    return f"{written.name} has {size:,} bytes instead of {written.size_bytes:,}"


def digest_mismatch(name: str) -> str:
    """Describe what is wrong with a file that has the right size but the wrong digest."""
    return f"{name} does not match its digest"


# ── Laying out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _stored(leaf: Leaf) -> tuple[str, str, int]:
    """Return how an array is stored: `code` and `dtype` as in TensorInfo, and its alignment in bytes."""
    if isinstance(leaf, Raw):
        code = _RAW_CODES.get(leaf.dtype_name)
        return (code, "", _RAW[code][1]) if code else ("U8", f"raw:{leaf.dtype_name}", 1)
    if leaf.dtype.name in _CODES and leaf.dtype.str[0] in "<|":
        return _CODES[leaf.dtype.name], "", leaf.dtype.itemsize
    return "U8", repr(_npy.dtype_to_descr(leaf.dtype)), 1


def _pairs(room: npt.NDArray[np.uint8], leaf: Leaf) -> Iterator[tuple[Array, Array]]:
    if isinstance(leaf, Raw):
        leaf = np.frombuffer(leaf.buffer, np.uint8)
    if not leaf.flags.c_contiguous:
        yield room.view(leaf.dtype).reshape(leaf.shape), leaf
    elif leaf.nbytes:
        flat = leaf.reshape(-1).view(np.uint8)
        for begin in range(0, leaf.nbytes, COPIED_BYTES):
            yield room[begin : begin + COPIED_BYTES], flat[begin : begin + COPIED_BYTES]


def _header(layout: FileLayout, metadata: Mapping[str, Any]) -> bytes:
    dtypes = {info.name: [info.dtype, list(info.shape)] for info in layout.arrays if info.dtype}
    header: dict[str, Any] = {_METADATA: {_OURS: json.dumps(metadata), _DTYPES: json.dumps(dtypes)}}
    for info in layout.arrays:
        shape = [info.stop - info.start] if info.dtype else list(info.shape)
        header[info.name] = {"dtype": info.code, "shape": shape, "data_offsets": [info.start, info.stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise CheckpointError(
            f"the state contains {len(text) / 1e6:,.0f} MB of plain values and names, but a checkpoint can contain at "
            f"most {HEADER_BYTES / 1e6:,.0f} MB: convert long lists to NumPy arrays."
        )
    return _LENGTH.pack(len(text)) + text


def _bytes_of(leaf: Leaf) -> memoryview:
    if isinstance(leaf, Raw):
        return memoryview(leaf.buffer).cast("B")
    if not leaf.nbytes:
        return memoryview(b"")
    # As uint8, because dates and structures do not support the buffer protocol.
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reading:
    """A file that is being read from its beginning to its end.

    Everything in the header is checked before use, because the file's digest is known only at the end. `digest` is None
    if the digest has already been checked.
    """

    def __init__(self, source: Any, digest: Digest | None, size_bytes: int, name: str) -> None:
        self.source = source
        self.digest = digest
        self.left = size_bytes
        self.name = name

    def header(self) -> tuple[list[TensorInfo], dict[str, str]]:
        if self.left < _LENGTH.size:
            raise self.damaged()
        (length,) = _LENGTH.unpack(self.take(np.empty(_LENGTH.size, np.uint8)).tobytes())
        if length > min(self.left, HEADER_BYTES):
            raise self.damaged()
        header = _json(self.take(np.empty(length, np.uint8)).tobytes(), self.name)
        try:
            return self._parsed(header)
        except Exception as error:  # a damaged header may contain anything
            raise self.damaged() from error

    def _parsed(self, header: dict[str, Any]) -> tuple[list[TensorInfo], dict[str, str]]:
        metadata = dict(header.pop(_METADATA, {}))
        dtypes = _json(metadata.get(_DTYPES, "{}"), self.name)
        arrays, begun = [], 0
        for name, fields in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            start, stop = map(operator.index, fields["data_offsets"])
            if start != begun or stop < start:
                raise ValueError(name)
            dtype, shape = dtypes.get(name, ["", fields["shape"]])
            arrays.append(TensorInfo(name, fields["dtype"], tuple(map(operator.index, shape)), start, stop, dtype))
            begun = stop
        if begun != self.left:
            raise ValueError("length")
        return arrays, metadata

    def array(self, info: TensorInfo, room: npt.NDArray[Any] | None) -> Leaf:
        try:
            raw, dtype = _dtype_of(info)
            size = info.stop - info.start
            if dtype is not None and size != math.prod(info.shape) * dtype.itemsize:
                raise ValueError(info.name)
            if raw:
                return Raw(raw, info.shape, self.take(_room(size)))
            if room is not None and (room.shape, room.dtype) == (info.shape, dtype):
                array = room
            else:
                array = _room(size).view(dtype).reshape(info.shape) if size else np.empty(info.shape, dtype)
        except Exception as error:  # a damaged header may describe an impossible array
            raise self.damaged() from error
        if size:
            self.take(array.reshape(-1).view(np.uint8))
        return array

    def take(self, room: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        view, begin = room.data, 0
        while begin < len(view):
            count = self.source.readinto(view[begin : begin + (CHUNK_BYTES if self.digest else len(view))])
            if not count:
                raise self.damaged()
            if self.digest is not None:
                self.digest.add(view[begin : begin + count])
            begin += count
        self.left -= begin
        return room

    def damaged(self) -> CheckpointDamagedError:
        return CheckpointDamagedError(digest_mismatch(self.name))


def _room(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory without huge pages, which Linux allocates slowly when cached files fill the memory."""
    if size_bytes < CHUNK_BYTES:
        return np.empty(size_bytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _dtype_of(info: TensorInfo) -> tuple[str, np.dtype[Any] | None]:
    """Return '' and an array's NumPy dtype. If NumPy lacks the dtype, return its name and a NumPy dtype of its size.

    The NumPy dtype is None if that size is unknown.
    """
    if min(info.shape, default=0) < 0:
        raise ValueError(info.name)
    if info.dtype.startswith("raw:"):
        return info.dtype.removeprefix("raw:"), None
    if info.dtype:
        dtype: np.dtype[Any] = _npy.descr_to_dtype(ast.literal_eval(info.dtype))
        if dtype.hasobject:  # NumPy would take the file's bytes for addresses of objects
            raise ValueError(info.dtype)
        return "", dtype
    if info.code in _RAW:
        name, itemsize = _RAW[info.code]
        return name, np.dtype(f"V{itemsize}")
    return "", np.dtype(_NUMPY[info.code])


def _json(text: str | bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(digest_mismatch(name)) from error
    if not isinstance(content, dict):
        raise CheckpointDamagedError(digest_mismatch(name))
    return content
