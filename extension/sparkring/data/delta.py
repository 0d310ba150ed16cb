"""Reads the log of a Delta table: which files a version of the table has, which of their rows were deleted, and how
their columns are called.

The rows are read from the files themselves, like those of plain Parquet files, so ranks need no package for Delta,
unless they resume from another version than that which the notebook has opened.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import operator
import os
import posixpath
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from sparkring.data.folders import on_credentials
from sparkring.errors import DataError
from sparkring.runtime.packages import require
from sparkring.runtime.storage import Location, protocols

LOG = "_delta_log"
# The features of tables that are read as they are meant. Any other may change which rows a table has.
_FEATURES = {
    *("columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint"),
    *("vacuumProtocolCheck",),
}
_WITH_SPARK = "Read it with Spark, and pass the DataFrame."
_OLDEST_PYARROW = 14  # the first version that takes the schema and the tables of deltalake


class DeltaFile(NamedTuple):
    """A file of a table. `partitions` has the values of the partition columns, which the file itself need not have.

    `deleted` says which rows were deleted, as packed() returns it; it is empty if none were.
    """

    path: str
    size_bytes: int
    partitions: tuple[tuple[str, Any], ...]
    deleted: bytes


class DeltaVersion(NamedTuple):
    """A version of a Delta table. `stored_as` has the name in the files of each column that is renamed in the table."""

    version: int
    schema: pa.Schema
    stored_as: Mapping[str, str]
    files: tuple[DeltaFile, ...]


def read_table(
    place: Location, version: int | None = None, timestamp: str | datetime.datetime | None = None
) -> DeltaVersion:
    """Read the newest version of a Delta table, version number `version`, or the newest one at the time `timestamp`.

    A time without a time zone is in the zone of this process. Raise DataError if the table has no such version, or if
    it cannot be read as its log says.
    """
    deltalake = require(
        "deltalake",
        f"{place.written} is a Delta table, which",
        DataError,
        otherwise=", or read it with Spark and pass the DataFrame",
    )
    if int(pa.__version__.partition(".")[0]) < _OLDEST_PYARROW:
        raise DataError(
            f"Delta tables such as {place.written} need pyarrow {_OLDEST_PYARROW} or newer, but this is pyarrow "
            f"{pa.__version__}: pip install -U pyarrow."
        )
    number, moment = _number(version), _moment(timestamp)
    if number is not None and moment is not None:
        raise DataError("version= and timestamp= both choose a version of the table: give one of them.")
    url = place.path if place.local else place.written if "://" in place.written else place.url
    opened = functools.partial(deltalake.DeltaTable, url, storage_options=_options(place))
    problems = (deltalake.exceptions.DeltaError, OSError, ValueError)
    try:
        table = opened()
        newest = table.version()
        if moment is not None:
            first_ms = min(entry["timestamp"] for entry in table.history())
            if moment.timestamp() * 1000 < first_ms:
                first = datetime.datetime.fromtimestamp(first_ms / 1000, moment.tzinfo)
                raise DataError(
                    f"{place.written} has no version at timestamp={timestamp!r}: its log begins at "
                    f"{first:%Y-%m-%d %H:%M:%S %z}. Pass a later time."
                )
            table.load_as_version(moment)
        if number is not None and number > newest:
            raise DataError(f"{place.written} has no version {number:,}: the newest is {newest:,}.")
        if number is not None and number != newest:
            try:
                table = opened(version=number)
            except problems as error:
                raise DataError(
                    f"cannot open version {number:,} of {place.written}: {_reason(error)}. It may have been removed "
                    f"from the log. The newest version is {newest:,}."
                ) from error
        return _table(place, table)
    except problems as error:
        raise DataError(
            f"{place.written} cannot be read as a Delta table: {_reason(error)}.{on_credentials(place)}"
        ) from error


def _table(place: Location, table: Any) -> DeltaVersion:
    protocol, metadata = table.protocol(), table.metadata()
    unknown = sorted({*(protocol.reader_features or ())} - _FEATURES)
    if unknown or protocol.min_reader_version > 3:
        raise _unsupported(place, ", ".join(unknown) or f"reader version {protocol.min_reader_version}")
    if metadata.configuration.get("delta.columnMapping.mode") == "id":
        raise _unsupported(place, "column mapping mode `id`")
    try:
        schema = pa.schema(table.schema().to_arrow()).remove_metadata()
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{place.written} has a column that Arrow cannot represent: {_reason(error)}. {_WITH_SPARK}"
        ) from error
    schema = pa.schema([field.remove_metadata() for field in schema])
    fields = json.loads(table.schema().to_json())["fields"]
    if renamed := [field["name"] for field in fields if _has_renamed_fields(field["type"])]:
        raise _unsupported(place, f"column mapping of the fields in `{renamed[0]}`")
    stored_as = {field["name"]: _stored_name(field) for field in fields if _stored_name(field) != field["name"]}
    root, deleted = f"{table.table_uri.rstrip('/')}/", {}
    for batch in table.deletion_vectors() if "deletionVectors" in (protocol.reader_features or ()) else ():
        masks = pa.record_batch(batch)
        for url, kept in zip(masks.column(0).to_pylist(), masks.column(1), strict=True):
            deleted[url.removeprefix(root)] = packed(~kept.values.to_numpy(zero_copy_only=False))
    actions = pa.table(table.get_add_actions()).to_pydict()
    partitions = actions.get("partition") or [{}] * len(actions["path"])
    files = []
    for encoded, size_bytes, keys in zip(actions["path"], actions["size_bytes"], partitions, strict=True):
        if "://" in encoded or encoded.startswith("/"):
            raise DataError(
                f"{place.written} is a shallow clone, whose files are elsewhere ({unquote(encoded)}). {_WITH_SPARK}"
            )
        path = posixpath.join(place.path, unquote(encoded))
        files.append(DeltaFile(path, size_bytes, tuple(keys.items()), deleted.pop(encoded, b"")))
    if deleted:  # rows of some file are deleted, but it is not known of which
        raise DataError(
            f"{place.written} has deletion vectors that fit none of its files, such as {next(iter(deleted))}. "
            f"{_WITH_SPARK}"
        )
    return DeltaVersion(table.version(), schema, stored_as, tuple(sorted(files, key=operator.attrgetter("path"))))


def packed(deleted: Any) -> bytes:
    """Return an array of booleans, one for each row of a file, as bytes."""
    return zlib.compress(np.packbits(deleted).tobytes())


@functools.lru_cache(maxsize=16)
def unpacked(deleted: bytes, rows: int) -> Any:
    """Return the array of `rows` booleans from which packed() has made `deleted`."""
    return np.unpackbits(np.frombuffer(zlib.decompress(deleted), np.uint8), count=rows).astype(bool)


def table_of(fs: Any, folder: str) -> tuple[str, str] | None:
    """Return the kind and the folder of the table whose files are in `folder`; None if there is no table.

    The folder can be that of the table, of some of its partitions, or `data` in an Iceberg table.
    """
    while True:
        if kind := _kind(fs, folder):
            return kind, folder
        name = posixpath.basename(folder)
        if "=" not in name and name != "data":
            return None
        folder = posixpath.dirname(folder)


def _kind(fs: Any, folder: str) -> str:
    with contextlib.suppress(OSError):
        if fs.exists(f"{folder}/{LOG}"):
            return "Delta"
        if fs.exists(f"{folder}/metadata") and fs.glob(f"{folder}/metadata/*.metadata.json"):
            return "Iceberg"
        if fs.exists(f"{folder}/.hoodie"):
            return "Hudi"
    return ""


def _number(version: Any) -> int | None:
    if version is None:
        return None
    with contextlib.suppress(TypeError):
        number = operator.index(version)
        if number >= 0 and not isinstance(version, bool):
            return number
    raise DataError(f"version={version!r}: expected the number of a version of the table, as in version=17.")


def _moment(timestamp: Any) -> datetime.datetime | None:
    if timestamp is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(timestamp, str):  # Python 3.10 does not know the Z
            timestamp = datetime.datetime.fromisoformat(re.sub(r"[Zz]$", "+00:00", timestamp.strip()))
        if isinstance(timestamp, datetime.datetime):
            return timestamp.astimezone()
    raise DataError(
        f"timestamp={timestamp!r}: expected a time, as in timestamp='2026-01-31 12:00' or '2026-01-31T12:00:00Z'."
    )


def _options(place: Location) -> dict[str, str]:
    """Return what deltalake, which opens the log itself, needs for S3: the credentials and the server of fsspec."""
    if "s3" not in protocols(place.fs):
        return {}
    fs: Any = place.fs
    url = fs.endpoint_url or fs.client_kwargs.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
    options = {
        "AWS_ACCESS_KEY_ID": fs.key,
        "AWS_SECRET_ACCESS_KEY": fs.secret,
        "AWS_SESSION_TOKEN": fs.token,
        "AWS_REGION": fs.client_kwargs.get("region_name"),
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true" if url and url.startswith("http:") else None,
    }
    return {name: value for name, value in options.items() if value}


def _reason(error: BaseException) -> str:
    plain = re.sub(r"\x1b\[[\d;]*m|↳", "", str(error))  # deltalake colours its messages
    return " ".join(plain.split())[:300].rstrip(".")


def _stored_name(field: Mapping[str, Any]) -> str:
    name: str = field["metadata"].get("delta.columnMapping.physicalName", field["name"])
    return name


def _has_renamed_fields(kind: Any) -> bool:
    """Return whether structs in a type of the log have fields with other names in the files."""
    if not isinstance(kind, dict):
        return False
    fields = kind.get("fields", ())
    inner = (*(field["type"] for field in fields), *map(kind.get, ("elementType", "keyType", "valueType")))
    return any(_stored_name(field) != field["name"] for field in fields) or any(map(_has_renamed_fields, inner))


def _unsupported(place: Location, feature: str) -> DataError:
    return DataError(
        f"{place.written} uses the Delta feature {feature}, which sparkring does not support. {_WITH_SPARK}"
    )
