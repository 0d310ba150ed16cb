"""Finds the records of TFRecord files by their framing, without parsing them.

A record is its length (8 bytes, little-endian), a checksum of the length (4 bytes), the data, and a checksum of the
data (4 bytes). The checksum is CRC-32C, rotated by 15 bits, plus a constant. A file may be compressed as a whole.

The checksum of every length is checked. The checksum of the data is checked for every record if the package
google-crc32c is installed, and otherwise for the first record of each file, because Python would need much longer for
it than for the rest of the reading.
"""

from __future__ import annotations

import functools
import importlib
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparkring.data.dataset import BROKEN
from sparkring.errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Array = Any  # numpy.ndarray
HEAD, TAIL = 12, 4  # bytes of a record before and after its data
CHUNK_BYTES = 1 << 20
REMOTE_CHUNK_BYTES = 8 << 20
GROUP_BYTES = 8 << 20  # a file is divided into row groups of this size, so that ranks can begin inside it
_LENGTH = struct.Struct("<Q")
# How many records are first looked at in one step, and how many are at most looked at one by one after a failure.
_TRIED, _LONGEST_WAIT = 8, 16_384
FIRST_CHECKED_BYTES = 1 << 16  # without google-crc32c, longer data is not checked
_WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
_ADVICE = "Write the file again, or leave it out of the paths."


class Frames(NamedTuple):
    """Complete records in a buffer: where the data of each begins and how long it is. `end` is where they end."""

    starts: Array
    lengths: Array
    end: int


class Group(NamedTuple):
    """Consecutive records of a file. `begin` and `end` are offsets in bytes in the file before compression."""

    begin: int
    end: int
    records: int


class RecordIndex(NamedTuple):
    """Where the records of a file are. `compression` is "", "GZIP" or "ZLIB"."""

    compression: str
    groups: tuple[Group, ...]


def index_of(fs: AbstractFileSystem, path: str, size_bytes: int, *, local: bool) -> RecordIndex:
    """Return where the records of a file are, from its framing. The data of large records is not read.

    Raise DataError with the byte offset if the file is cut off or damaged, or is not a TFRecord file.
    """
    if not size_bytes:
        return RecordIndex("", ())
    chunk_bytes = CHUNK_BYTES if local else REMOTE_CHUNK_BYTES
    try:
        with fs.open(path, "rb", **({} if local else {"block_size": chunk_bytes})) as file:
            first = file.read(chunk_bytes)
            compression = _compression(first, path)
            if compression:
                end = records = 0
                for buffer, frames in _inflated(file, first, path, compression):
                    _checked_first(buffer, frames, path, end, compression)
                    end, records = end + frames.end, records + len(frames.starts)
                return RecordIndex(compression, (Group(0, end, records),) if records else ())
            record_starts: list[Array] = []
            at = 0
            while at < size_bytes:
                if at:
                    file.seek(at)
                data = file.read(chunk_bytes) if at else first
                buffer = np.frombuffer(data, np.uint8)
                frames = frames_in(buffer, path, at)
                if not at:
                    _checked_first(buffer, frames, path, 0)
                if len(frames.starts):
                    record_starts.append(at + frames.starts - HEAD)
                end = at + frames.end
                if len(data) - frames.end >= HEAD:  # this record goes on after the chunk: its data need not be read
                    record_starts.append(np.array([end]))
                    end += HEAD + _length(buffer, frames.end, path, at) + TAIL
                elif not len(frames.starts):
                    end += HEAD  # not even the length is there
                if end > size_bytes:
                    raise _cut_off(path, at + frames.end, size_bytes)
                at = end
    except FileNotFoundError:
        raise DataError(f"{path} has been removed while its records were counted. Call tfrecords() again.") from None
    except BROKEN as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split()).rstrip('.')}.") from error
    offsets = np.concatenate(record_starts)
    cuts = np.flatnonzero(np.diff(offsets // GROUP_BYTES, prepend=-1))
    begins, ends = offsets[cuts], [*offsets[cuts[1:]], at]
    counts = np.diff([*cuts, len(offsets)])
    return RecordIndex("", tuple(Group(int(a), int(b), int(n)) for a, b, n in zip(begins, ends, counts, strict=True)))


def buffers(
    fs: AbstractFileSystem, path: str, index: RecordIndex, group: Group, *, local: bool
) -> Iterator[tuple[Array, Frames, int]]:
    """Yield the records of a group, in one or more buffers, each with its offset in the uncompressed file.

    Raise DataError if the records are not where the index says.
    """
    verify = _crc32c()
    try:
        with open(path, "rb", buffering=0) if local else fs.open(path, "rb", cache_type="none") as file:
            if index.compression:
                end = 0
                for buffer, frames in _inflated(file, file.read(CHUNK_BYTES), path, index.compression):
                    _verified(verify, buffer, frames, path, end, index.compression)
                    yield buffer, frames, end
                    end += frames.end
                return
            file.seek(group.begin)
            size = group.end - group.begin
            data = file.read(size)
            while len(data) < size and (more := file.read(size - len(data))):
                data += more
    except FileNotFoundError:
        raise DataError(
            f"{path} has been removed since it was opened. Call tfrecords() again, without this file."
        ) from None
    buffer = np.frombuffer(data, np.uint8)
    frames = frames_in(buffer, path, group.begin)
    if frames.end != size or len(frames.starts) != group.records:
        raise DataError(f"{path} has been rewritten or truncated since it was opened. Call tfrecords() again.")
    _verified(verify, buffer, frames, path, group.begin)
    yield buffer, frames, group.begin


def is_record_file(fs: AbstractFileSystem, path: str) -> bool:
    """Return whether a file begins with a record, as far as its first bytes show it."""
    with fs.open(path, "rb") as file:
        first = file.read(1 << 12)
    try:
        compression = _compression(first, path)
        if compression:
            first = zlib.decompressobj(_WINDOW_BITS[compression]).decompress(first, HEAD)
        return not compression or (len(first) == HEAD and not _compression(first, path))
    except (DataError, zlib.error):
        return False


def frames_in(buffer: Array, path: str, offset: int, compression: str = "") -> Frames:
    """Return the complete records in a buffer that begins with a record, at byte `offset` of the uncompressed file.

    Raise DataError if the checksum of a length is wrong.
    """
    size, at, tried, wait = len(buffer), 0, _TRIED, _TRIED
    starts: list[Array] = []
    single: list[int] = []
    content, next_try = buffer.data, 0
    while size - at >= HEAD:
        (length,) = _LENGTH.unpack_from(content, at)
        stride = HEAD + length + TAIL
        if stride > size - at:
            break
        if len(single) < next_try:
            single.append(at)
            at += stride
            continue
        # Records often have the same length. Then, many of them are looked at in one step.
        heads: Array = np.ndarray((min(tried, (size - at) // stride), 8), np.uint8, buffer, at, (stride, 1))
        same = (heads == heads[0]).all(1)
        starts.append(np.array(single, np.int64))
        single = []
        if same.all():
            count, tried, wait, next_try = len(same), tried * 4, _TRIED, 0
        else:
            count, tried, wait, next_try = int(np.argmin(same)), _TRIED, min(wait * 2, _LONGEST_WAIT), wait
        starts.append(at + np.arange(count) * stride)
        at += count * stride
    heads = np.concatenate([*starts, np.array(single, np.int64)])
    lengths = words_at(buffer, heads, "<u8").astype(np.int64) if len(heads) else heads
    wrong = np.flatnonzero(_masked_crc_of_lengths(lengths) != words_at(buffer, heads + 8, "<u4"))
    if len(wrong):
        raise _wrong_length(path, byte_words(offset + int(heads[wrong[0]]), compression))
    if size - at >= HEAD:
        _length(buffer, at, path, offset, compression)
    return Frames(heads + HEAD, lengths, at)


def _cut_off(path: str, at: int, size_bytes: int) -> DataError:
    """Return the error for a file that ends inside the record that begins at byte `at`."""
    return DataError(
        f"{path} is truncated: the record at byte {at:,} extends past the end of the file (byte {size_bytes:,}). "
        f"{_ADVICE}"
    )


def _compression(first: bytes, path: str) -> str:
    """Return how a file that begins with these bytes is compressed. Raise DataError if it is no TFRecord file."""
    if len(first) >= HEAD:
        head = np.frombuffer(first, np.uint8, HEAD)
        if _masked_crc_of_lengths(head[:8].view("<i8"))[0] == head[8:].view("<u4")[0]:
            return ""
    if first[:2] == b"\x1f\x8b":
        return "GZIP"
    if len(first) > 1 and first[0] & 15 == 8 and int.from_bytes(first[:2], "big") % 31 == 0:
        return "ZLIB"
    if first[:4] == b"PAR1":
        raise DataError(f"{path} is a Parquet file: read it with shards().")
    raise DataError(
        f"{path} is not a TFRecord file, or is damaged at byte 0: leave it out, for example with a pattern such as "
        "'folder/*.tfrecord'."
    )


def _inflated(file: Any, first: bytes, path: str, compression: str) -> Iterator[tuple[Array, Frames]]:
    """Yield the records of a compressed file, chunk by chunk."""
    inflate = zlib.decompressobj(_WINDOW_BITS[compression])
    rest, offset, stored = b"", 0, 0
    chunk = first
    while chunk:
        stored += len(chunk)
        try:
            plain = inflate.decompress(chunk)
            while inflate.eof and inflate.unused_data:  # files of gzip may be appended to one another
                unused = inflate.unused_data
                inflate = zlib.decompressobj(_WINDOW_BITS[compression])
                plain += inflate.decompress(unused)
        except zlib.error as error:
            at = stored - len(chunk)
            raise DataError(
                f"{path} is damaged after byte {at:,}: decompression failed ({compression}: {error}). {_ADVICE}"
            ) from None
        data = rest + plain
        buffer = np.frombuffer(data, np.uint8)
        frames = frames_in(buffer, path, offset, compression)
        if len(frames.starts):
            yield buffer, frames
        rest, offset = data[frames.end :], offset + frames.end
        chunk = file.read(CHUNK_BYTES)
    if rest or not inflate.eof:
        raise DataError(
            f"{path} is truncated: the record at byte {offset:,} of the uncompressed data extends past the end of the "
            f"{compression} data (byte {stored:,} of the file). {_ADVICE}"
        )


def _length(buffer: Array, at: int, path: str, offset: int, compression: str = "") -> int:
    """Return the length in the head at `at`. Raise DataError if its checksum is wrong."""
    length = buffer[at : at + 8].view("<i8")
    if _masked_crc_of_lengths(length)[0] != buffer[at + 8 : at + HEAD].view("<u4")[0]:
        raise _wrong_length(path, byte_words(offset + at, compression))
    return int(length[0])


def _wrong_length(path: str, at: str) -> DataError:
    return DataError(
        f"{path} is damaged at {at}: the length of the record there does not match its checksum. {_ADVICE}"
    )


def byte_words(at: int, compression: str) -> str:
    """Say which byte is meant: of a compressed file, offsets are known in its uncompressed data."""
    return f"byte {at:,}" + " of the uncompressed data" * bool(compression)


def words_at(buffer: Array, at: Array, dtype: str) -> Array:
    """Return the numbers of type `dtype` that begin at the given bytes of a buffer."""
    size = np.dtype(dtype).itemsize
    if len(buffer) < size:
        return np.empty(0, dtype)
    return np.ndarray((len(buffer) - size + 1,), dtype, buffer, 0, (1,))[at]


# ── Checksums ─────────────────────────────────────────────────────────────────


@functools.cache
def _table() -> Array:
    """Return the CRC-32C of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


def _masked(crc: Array) -> Array:
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def _masked_crc_of_lengths(lengths: Array) -> Array:
    table, crc = _table(), np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    columns = np.ascontiguousarray(lengths, "<i8").view(np.uint8).reshape(-1, 8).T
    for column in columns:
        crc = table[(crc ^ column) & np.uint32(255)] ^ (crc >> np.uint32(8))
    return _masked(~crc)


def _crc32c() -> Callable[[Any], int] | None:
    """Return google-crc32c's function, or None if the package is not installed or has no fast implementation."""
    try:
        package: Any = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    return package.value if package.implementation == "c" else None


def _slow_crc32c(data: bytes) -> int:
    table, crc = _table().tolist(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _checked_first(buffer: Array, frames: Frames, path: str, offset: int, compression: str = "") -> None:
    """Check the data of a file's first record, if it is in this buffer and not too long."""
    if not offset and len(frames.starts) and frames.lengths[0] <= FIRST_CHECKED_BYTES:
        first = Frames(frames.starts[:1], frames.lengths[:1], 0)
        _verified(_crc32c() or _slow_crc32c, buffer, first, path, offset, compression)


def _verified(
    crc32c: Callable[[Any], int] | None,
    buffer: Array,
    frames: Frames,
    path: str,
    offset: int,
    compression: str = "",
) -> None:
    """Raise DataError if the data of a record does not match its checksum. Without `crc32c`, nothing is checked."""
    if crc32c is None:
        return
    ends, whole = frames.starts + frames.lengths, memoryview(buffer)
    spans = zip(frames.starts.tolist(), ends.tolist(), strict=True)
    crcs = np.array([crc32c(bytes(whole[start:end])) for start, end in spans], np.uint32)
    wrong = np.flatnonzero(_masked(crcs) != words_at(buffer, ends, "<u4"))
    if len(wrong):
        at = byte_words(offset + int(frames.starts[wrong[0]]) - HEAD, compression)
        raise DataError(
            f"{path} is damaged at {at}: the data of the record there does not match its checksum. {_ADVICE}"
        )
