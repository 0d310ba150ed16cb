"""Computes a digest of an item's content. Identical items have the same digest in every kernel."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import os
import uuid
from typing import Any

from sparkring.capture.packing import pack

# Values of these types have the same content if they have the same type and the same repr().
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, os.PathLike),
)


def digest(*values: Any) -> str:
    """Return the digest of `values`.

    The digest of numbers, strings, dates, paths and arrays, and of lists, tuples, dicts, sets and dataclasses of these,
    depends only on their types and contents; that of a member of an enumeration depends on its name and its value. The
    order of a dict makes no difference. A container that holds one object twice has the same digest as one that holds
    two equal objects. The digest of a part of a DataFrame is computed from what identifies the part's rows; the rows
    are not read. For any other object, the digest is computed from its pickle.
    """
    return _digest(values).hex()


def _digest(value: Any) -> bytes:
    kind = type(value)
    found = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}\0".encode())
    if isinstance(value, enum.Enum):
        found.update(repr(value.name).encode())  # a Flag may have no name
        found.update(_digest(value.value))
    elif isinstance(value, PLAIN):
        found.update(repr(value).encode())
    elif hasattr(kind, "__sparkring_content__"):
        found.update(_digest(value.__sparkring_content__()))
    elif isinstance(value, list | tuple):
        if hasattr(value, "_fields"):  # a named tuple
            found.update(repr(value._fields).encode())
        for each in value:
            found.update(_digest(each))
    elif isinstance(value, set | frozenset):
        found.update(b"".join(sorted(map(_digest, value))))
    elif isinstance(value, dict):
        found.update(b"".join(sorted(_digest(pair) for pair in value.items())))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found.update(_digest({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}))
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        found.update(f"{value.dtype.str}{value.shape}".encode())
        found.update(value.tobytes())
    else:
        packed = pack({"": value})
        found.update(packed.payload)
        for buffer in packed.buffers:
            found.update(buffer)
    return found.digest()
