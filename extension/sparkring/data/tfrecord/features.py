"""Turns serialised tf.train.Examples and SequenceExamples into Arrow columns, without TensorFlow or protobuf.

    Example          1: Features                          SequenceExample  1: Features (the context), 2: FeatureLists
    Features         1: entries of a map: 1: name, 2: Feature
    FeatureLists     1: entries of a map: 1: name, 2: FeatureList
    FeatureList      1: Feature, one for each step
    Feature          1: BytesList, 2: FloatList or 3: Int64List, each with its values in 1

All records of a batch are parsed at the same time: a step of the parser reads the next field of every record, with a
few calls of NumPy. So Python's own work is done once per field, and not for each record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sparkring.data.tfrecord.framing import words_at

Array = Any  # numpy.ndarray
KINDS = {1: "bytes", 2: "float", 3: "int64"}
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5  # protobuf's wire types
_LONGEST_VARINT = 10
# Masks of the first 0 to 8 bytes of a word.
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_SHORT_BYTES = 64  # shorter pieces are put together by NumPy, longer ones by Python
# The first bytes of fields: field 1 and field 2 of any message, and the three kinds of lists.
_TAG, _VALUE, _TAGS = 0x0A, 0x12, {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}
_SHORT_KEY = 100  # bytes
_NOT_VALID = "is not a valid tf.train.Example or SequenceExample. Write the file again, or leave it out of the paths"


class FeatureColumn(NamedTuple):
    """How a feature becomes a column.

    `kind` is how the feature is stored: as "bytes", "float" or "int64". `dtype` is NumPy's name of the column's type,
    "bytes" or "string"; numbers that are stored as bytes are the memory of an array. `shape` is the shape of a row; a
    first dimension of -1 has any length. `in_steps` says whether the feature is a FeatureList of a SequenceExample. If
    `nulls` is true, the feature may be missing, and a list that is too short is filled up with nulls.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    in_steps: bool = False
    nulls: bool = False

    @property
    def type(self) -> pa.DataType:
        kind = value_type(self.dtype)
        for length in reversed(self.shape):
            kind = pa.list_(kind, length)
        return kind


class Unfit(Exception):
    """A record that cannot be parsed, or does not fit the columns. `record` is its number in the batch."""

    def __init__(self, record: int, what: str) -> None:
        super().__init__(what)
        self.record = int(record)


class Fields(NamedTuple):
    """Fields of some messages: for each, the number of its message, its own number and wire type, and its bytes."""

    owner: Array
    number: Array
    wire: Array
    start: Array
    end: Array

    def only(self, chosen: Array) -> Fields:
        return self if chosen.all() else Fields(*(part[chosen] for part in self))


class Entries(NamedTuple):
    """Entries of the maps in some records: the number of the record, and the bytes of the key and of the value.

    `in_steps` says whether the value is a FeatureList.
    """

    record: Array
    key_start: Array
    key_end: Array
    start: Array
    end: Array
    in_steps: Array


class FeatureValues(NamedTuple):
    """The values of a feature. `counts` is how many values each message has, and `flat` holds those of all messages.

    For bytes, `flat` has the positions of the first byte and after the last byte of each value.
    """

    counts: Array
    flat: Any


class Content(NamedTuple):
    """The values of a feature: the records that have it, its values in each of them, or in each of their steps.

    `steps` is the number of steps of each record, or None if the feature is no FeatureList.
    """

    record: Array
    values: FeatureValues
    steps: Array | None = None


def value_type(dtype: str) -> pa.DataType:
    """Return Arrow's type of a value. Raise TypeError if there is none."""
    if dtype in ("bytes", "string"):
        return pa.binary() if dtype == "bytes" else pa.string()
    try:
        return pa.from_numpy_dtype(np.dtype(dtype))
    except pa.ArrowNotImplementedError as error:
        raise TypeError(str(error)) from None


def entries_of(data: Array, starts: Array, ends: Array) -> Entries:
    """Return all features of some records."""
    top = _fields(data, starts, ends)
    parts = []
    for number in (1, 2):
        chosen = top.only((top.number == number) & (top.wire == _DELIMITED))
        if not len(chosen.owner):
            continue
        entries = _fields(data, chosen.start, chosen.end, chosen.owner)
        record = chosen.owner[entries.owner]
        entries = entries.only(entries.number == 1)
        pairs = _fields(data, entries.start, entries.end, record)
        spans = np.zeros((4, len(record)), np.int64)
        for row, number_of_part in ((0, 1), (2, 2)):
            part = pairs.only((pairs.number == number_of_part) & (pairs.wire == _DELIMITED))
            spans[row, part.owner], spans[row + 1, part.owner] = part.start, part.end
        parts.append(Entries(record, spans[0], spans[1], spans[2], spans[3], np.full(len(record), number == 2)))
    if not parts:
        nothing = np.empty(0, np.int64)
        return Entries(nothing, nothing, nothing, nothing, nothing, np.empty(0, bool))
    return parts[0] if len(parts) == 1 else Entries(*map(np.concatenate, zip(*parts, strict=True)))


def names_of(data: Array, entries: Entries) -> dict[tuple[str, bool], Array]:
    """Return the numbers of the entries of each feature, by its name and whether it is a FeatureList."""
    numbers: dict[tuple[bytes, bool], list[int]] = {}
    whole = data.tobytes()
    columns = (entries.key_start.tolist(), entries.key_end.tolist(), entries.in_steps.tolist())
    for number, (start, end, in_steps) in enumerate(zip(*columns, strict=True)):
        numbers.setdefault((whole[start:end], in_steps), []).append(number)
    return {(key.decode(errors="replace"), steps): np.array(at) for (key, steps), at in numbers.items()}


def kind_of(data: Array, entries: Entries, chosen: Array) -> str:
    """Return how the values of some entries are stored, or "" if none of them has a value."""
    starts, ends, record = entries.start[chosen], entries.end[chosen], entries.record[chosen]
    if entries.in_steps[chosen[0]]:
        features = _fields(data, starts, ends, record)
        starts, ends, record = features.start, features.end, record[features.owner]
    numbers = _fields(data, starts, ends, record).number
    return KINDS.get(int(numbers[0]), "") if len(numbers) else ""


def values_of(data: Array, entries: Entries, chosen: Array, name: str, kind: str) -> tuple[FeatureValues, Array | None]:
    """Return the values of a feature and, for a FeatureList, the number of steps of each entry."""
    starts, ends, record = entries.start[chosen], entries.end[chosen], entries.record[chosen]
    if not len(chosen) or not entries.in_steps[chosen[0]]:
        return _values(data, starts, ends, record, name, kind), None
    features = _fields(data, starts, ends, record)
    steps = np.bincount(features.owner, minlength=len(starts))
    return _values(data, features.start, features.end, record[features.owner], name, kind), steps


def columns_of_records(
    data: Array,
    starts: Array,
    lengths: Array,
    columns: Sequence[FeatureColumn],
    *,
    known: frozenset[str] | None,
    batched: bool,
) -> pa.RecordBatch:
    """Return some records as Arrow columns.

    With `batched`, each record holds several rows, and `shape` is that of one of them. Raise Unfit if a record does not
    fit the columns, or has a feature that is not in `known` (None: any).
    """
    ends = starts + lengths
    contents = _like_the_first(data, starts, ends, columns, known)
    if contents is None:
        contents = _in_any_order(data, starts, ends, columns, known)
    arrays, before = [], None
    for column, content in zip(columns, contents, strict=True):
        array, rows = _column(data, content, column, len(starts), batched=batched)
        if batched:
            if before is not None and (rows != before).any():
                record = int(np.flatnonzero(rows != before)[0])
                raise Unfit(
                    record,
                    f"has {rows[record]:,} rows of the feature `{column.name}`, but {before[record]:,} of "
                    f"`{columns[0].name}`. Give the shape of a row of each in schema=, or name only features that have "
                    "the same number of rows",
                )
            before = rows
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(column.name, column.type) for column in columns]))


def rows_of_records(data: Array, starts: Array, lengths: Array, column: FeatureColumn) -> Array:
    """Return how many rows each record has, if it holds a batch."""
    (content,) = _in_any_order(data, starts, starts + lengths, [column], None)
    return _column(data, content, column, len(starts), batched=True)[1]


# ── Columns ───────────────────────────────────────────────────────────────────


def _column(
    data: Array, content: Content, column: FeatureColumn, records: int, *, batched: bool
) -> tuple[pa.Array, Array]:
    """Return a column, and how many rows of it each record has."""
    name, record, (counts, flat), steps = column.name, content.record, content.values, content.steps
    inner = math.prod(column.shape[1:])
    if column.kind == "bytes" and column.dtype not in ("bytes", "string"):
        counts, flat = _decoded(data, counts, flat, column, record, steps)
    elif steps is not None:
        odd = np.flatnonzero(counts != inner)
        if len(odd):
            owner = np.repeat(record, steps)[odd[0]]
            raise Unfit(
                owner,
                f"has a step with {counts[odd[0]]:,} values instead of {inner:,} in the feature `{name}`. Write steps "
                "of the same length, or name only the other features, with columns=[…] or schema={…}",
            )
    if steps is not None:
        ends = np.cumsum(steps)
        totals = np.concatenate([[0], np.cumsum(counts)])
        counts = totals[ends] - totals[ends - steps]
    per_record = counts
    if len(record) != records:
        per_record = np.zeros(records, np.int64)
        per_record[record] = counts
    values = _arrow_values(data, flat, column, record, counts)
    if batched:
        wanted = math.prod(column.shape)
        odd = np.flatnonzero(per_record % wanted)
        if len(odd):
            raise Unfit(
                odd[0],
                f"has {per_record[odd[0]]:,} values of the feature `{name}`, which is not a multiple of the {wanted:,} "
                "of a row. Correct the shape of a row in schema=",
            )
        return _nested(values, column.shape), per_record // wanted
    if not column.shape:
        return _scalars(values, per_record, column), np.ones(records, np.int64)
    if column.shape[0] == -1:
        odd = np.flatnonzero(per_record % inner)
        if len(odd):
            raise Unfit(
                odd[0],
                f"has {per_record[odd[0]]:,} values of the feature `{name}`, which is not a multiple of {inner:,}. "
                f"Correct the shape {list(column.shape)} in schema=",
            )
        offsets = np.concatenate([[0], np.cumsum(per_record // inner)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, _nested(values, column.shape[1:])), per_record
    return _nested(_filled_up(values, per_record, column), column.shape), per_record


def _decoded(
    data: Array, counts: Array, spans: Array, column: FeatureColumn, record: Array, steps: Array | None
) -> tuple[Array, Array]:
    """Return the numbers of arrays whose memory is stored as bytes, and how many each message has."""
    owner = np.repeat(record if steps is None else np.repeat(record, steps), counts)
    dtype = np.dtype(column.dtype).newbyteorder("<")
    sizes = spans[1] - spans[0]
    odd = np.flatnonzero(sizes % dtype.itemsize)
    if len(odd):
        raise Unfit(
            owner[odd[0]],
            f"has {sizes[odd[0]]:,} bytes in the feature `{column.name}`, which is not a multiple of "
            f"the {dtype.itemsize:,} bytes of {column.dtype}. Correct the dtype in schema=",
        )
    totals = np.concatenate([[0], np.cumsum(sizes // dtype.itemsize)])
    ends = np.cumsum(counts)
    return totals[ends] - totals[ends - counts], _gathered(data, *spans).view(dtype)


def _arrow_values(data: Array, flat: Any, column: FeatureColumn, record: Array, counts: Array) -> pa.Array:
    """Return the values of all records as one Arrow array."""
    wanted = value_type(column.dtype)
    try:
        if column.dtype not in ("bytes", "string"):
            array = pa.array(flat)
            return array if array.type == wanted else array.cast(wanted)
        starts, ends = flat
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        if offsets[-1] > 2**31 - 1:
            raise Unfit(
                record[0],
                f"and those after it hold more than 2 GB of the feature `{column.name}`, the limit of an Arrow array. "
                "Write smaller records",
            )
        content = pa.py_buffer(_gathered(data, starts, ends))
        array = pa.Array.from_buffers(wanted, len(starts), [None, pa.py_buffer(offsets.astype(np.int32)), content])
        if column.dtype == "string":
            array.validate(full=True)
        return array
    except pa.ArrowInvalid as error:
        reason = " ".join(str(error).split()).rstrip(".")
        first = int(record[np.flatnonzero(counts)[0]]) if counts.any() else 0
        which = "or a later one " if len(record) > 1 else ""
        advice = "'bytes'" if column.dtype == "string" else "a dtype that holds all values"
        raise Unfit(
            first,
            f"{which}has a value of the feature `{column.name}` that is not {column.dtype} ({reason}). Give {advice} "
            "in schema=",
        ) from None


def _scalars(values: pa.Array, counts: Array, column: FeatureColumn) -> pa.Array:
    many = np.flatnonzero(counts > 1)
    if len(many):
        raise Unfit(
            many[0],
            f"has {counts[many[0]]:,} values of the feature `{column.name}`, but the first records have one. To pad "
            f"shorter lists, use schema={{'{column.name}': ('{column.dtype}', ({counts[many[0]]},)), …}}, with every "
            f"feature to read, and fill={{'{column.name}': 0}}",
        )
    if len(values) == len(counts):
        return values
    _refuse_missing(counts == 0, column)
    return values.take(pa.array(np.cumsum(counts) - 1, mask=counts == 0))


def _filled_up(values: pa.Array, counts: Array, column: FeatureColumn) -> pa.Array:
    """Return the values of lists of a fixed length. Lists that are too short are filled up with nulls."""
    wanted = math.prod(column.shape)
    odd = np.flatnonzero((counts > wanted) | ((counts != wanted) & (not column.nulls)))
    if len(odd):
        _refuse_missing(counts == 0, column)
        more = f"give a larger shape than {list(column.shape)} in schema=, and " if counts[odd[0]] > wanted else ""
        raise Unfit(
            odd[0],
            f"has {counts[odd[0]]:,} value{'s' * bool(counts[odd[0]] != 1)} of the feature `{column.name}`, but "
            f"{wanted:,} are expected. To pad shorter lists, {more}use fill={{'{column.name}': 0}}",
        )
    if len(values) == wanted * len(counts):
        return values
    place = np.arange(wanted)[None, :]
    index = place + (np.cumsum(counts) - counts)[:, None]
    missing = np.broadcast_to(place, index.shape) >= counts[:, None]
    return values.take(pa.array(np.where(missing, 0, index).ravel(), mask=missing.ravel()))


def _refuse_missing(missing: Array, column: FeatureColumn) -> None:
    if missing.any() and not column.nulls:
        raise Unfit(
            np.flatnonzero(missing)[0],
            f"lacks the feature `{column.name}`, which the first records have. Give a value for such records, as in "
            f"fill={{'{column.name}': {'0' if column.dtype not in ('bytes', 'string') else repr('')}}}",
        )


def _nested(values: pa.Array, shape: Sequence[int]) -> pa.Array:
    for length in reversed(shape):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values


# ── The names of features ─────────────────────────────────────────────────────


def _column_of(data: Array, entries: Entries, names: Sequence[str]) -> Array:
    """Return the number of the column of each entry, or -1 if its name is not among `names`."""
    numbers = {name.encode(): number for number, name in enumerate(names)}
    whole = data.tobytes()
    spans = zip(entries.key_start.tolist(), entries.key_end.tolist(), strict=True)
    return np.array([numbers.get(whole[start:end], -1) for start, end in spans], np.int64)


def _in_any_order(
    data: Array, starts: Array, ends: Array, columns: Sequence[FeatureColumn], known: frozenset[str] | None
) -> list[Content]:
    """Return the content of the columns in some records, whatever features each record has."""
    entries = entries_of(data, starts, ends)
    of_column = _column_of(data, entries, [column.name for column in columns])
    if known is not None and (unknown := np.flatnonzero(of_column < 0)).size:
        whole, accepted = memoryview(data), {name.encode() for name in known}
        spans = zip(entries.key_start[unknown].tolist(), entries.key_end[unknown].tolist(), strict=True)
        for number, (start, end) in enumerate(spans):
            if (name := bytes(whole[start:end])) not in accepted:
                raise Unfit(
                    entries.record[unknown[number]],
                    f"has the feature `{name.decode(errors='replace')}`, which the first records do not have. Name the "
                    "features that you want, with columns=[…] or schema={…}",
                )
    order = np.argsort(of_column.astype(np.int16), kind="stable")
    bounds = np.searchsorted(of_column[order], np.arange(len(columns) + 1))
    contents = []
    for number, column in enumerate(columns):
        chosen = order[bounds[number] : bounds[number + 1]]
        record = entries.record[chosen]
        if (entries.in_steps[chosen] != column.in_steps).any():
            odd = record[np.flatnonzero(entries.in_steps[chosen] != column.in_steps)[0]]
            place, usual = ("its context", "a list of steps") if column.in_steps else ("a list of steps", "the context")
            raise Unfit(
                odd,
                f"has the feature `{column.name}` in {place}, but the first records have it in {usual}. Write all "
                "records alike, or name only the other features, with columns=[…] or schema={…}",
            )
        if (record[1:] <= record[:-1]).any():
            last = np.full(len(starts), -1)
            last[record] = chosen  # of several entries with one name, the last counts
            chosen = last[last >= 0]
            record = entries.record[chosen]
        contents.append(Content(record, *values_of(data, entries, chosen, column.name, column.kind)))
    return contents


def _like_the_first(
    data: Array, starts: Array, ends: Array, columns: Sequence[FeatureColumn], known: frozenset[str] | None
) -> list[Content] | None:
    """Return the content of the columns if all records have the features of the first one, in its order; else None.

    This is so in most files, and several times as fast as in any order. If there is something wrong with a record, the
    result is None, too.
    """
    try:
        first = entries_of(data, starts[:1], ends[:1])
        kinds = [kind_of(data, first, np.array([number])) for number in range(len(first.record))]
    except Unfit:
        return None
    wanted = {column.name: column for column in columns}
    if first.in_steps.any() or (data.take(starts, mode="clip") != _TAG).any():
        return None
    length, at = _varints(data, starts + 1)
    if (at + length != ends).any():
        return None
    contents: dict[str, Content] = {}
    everyone = np.arange(len(starts))
    for number in np.argsort(first.key_start).tolist():
        kind = kinds[number]
        key = data[first.key_start[number] : first.key_end[number]].tobytes()
        name = key.decode(errors="replace")
        if not kind or (known is not None and name not in known and name not in wanted):
            return None
        content = _payloads(data, at, ends, key, kind)
        if content is None:
            return None
        start, at = content
        column = wanted.get(name)
        if column is None:
            continue
        if column.in_steps or column.kind != kind or name in contents:
            return None
        if kind == "bytes":
            values = FeatureValues(np.ones(len(starts), np.int64), np.stack([start, at]))
        elif kind == "float":
            if ((at - start) % 4).any():
                return None
            values = FeatureValues((at - start) // 4, _gathered(data, start, at).view("<f4"))
        else:
            try:
                values = FeatureValues(*_integers(_gathered(data, start, at), at - start, everyone))
            except Unfit:
                return None
        contents[name] = Content(everyone, values)
    if (at != ends).any() or len(contents) < len(columns):
        return None
    return [contents[column.name] for column in columns]


def _payloads(data: Array, at: Array, ends: Array, key: bytes, kind: str) -> tuple[Array, Array] | None:
    """Return where the values of a feature begin and end, if an entry with this key begins at each of `at`; else None.

    The entry has one list with all of its numbers, or with a single value of bytes.
    """
    if len(key) > _SHORT_KEY:
        return None
    # As long as all lengths are below 128, they have one byte each, and the bytes before the values
    # differ only in them.
    inside = bytes([_TAG, len(key), *key])
    head = bytes([_TAG, 0, *inside, _VALUE, 0, _TAGS[kind], 0, _TAG, 0])
    size = len(head)
    if (at + size <= ends).all():
        heads = _pieces(data, at, size).reshape(-1, size)
        length = heads[:, -1]
        overhead = len(inside) + 6
        lengths = [(1, overhead), (size - 5, 4), (size - 3, 2), (size - 1, 0)]
        if int(length.max()) + overhead < 128:
            expected = np.frombuffer(head, np.uint8)
            same = all((heads[:, place] == length + np.uint8(more)).all() for place, more in lengths)
            others = np.setdiff1d(np.arange(size), [place for place, _ in lengths])
            if same and (heads[:, others] == expected[others]).all():
                start = at + size
                end = start + length
                return (start, end) if (end <= ends).all() else None
    # The lengths may have any size.
    if (data.take(at, mode="clip") != _TAG).any():
        return None
    length, after = _varints(data, at + 1)
    end = after + length
    size = len(inside)
    if (end > ends).any() or (after + size > ends).any():
        return None
    if (_pieces(data, after, size).reshape(-1, size) != np.frombuffer(inside, np.uint8)).any():
        return None
    after = after + size
    for tag in (_VALUE, _TAGS[kind], _TAG):
        if (data.take(after, mode="clip") != tag).any():
            return None
        length, after = _varints(data, after + 1)
        if (after + length != end).any():
            return None
    return after, end


# ── Protobuf ──────────────────────────────────────────────────────────────────


def _fields(data: Array, starts: Array, ends: Array, record: Array | None = None) -> Fields:
    """Return the fields of the messages in these bytes, message by message. `record` has the record of each message."""
    at, live = starts.copy(), np.flatnonzero(starts < ends)
    parts: list[tuple[Array, ...]] = []
    while len(live):
        tag, start = _varints(data, at[live])
        wire, number = tag & 7, tag >> 3
        if (wire == _DELIMITED).all():
            length, start = _varints(data, start)
            end = start + length
        else:
            length = np.zeros(len(live), np.int64)
            delimited = wire == _DELIMITED
            length[delimited], start[delimited] = _varints(data, start[delimited])
            end = start + length + np.where(wire == _FOUR_BYTES, 4, np.where(wire == _EIGHT_BYTES, 8, 0))
            end[wire == _VARINT] = _varints(data, start[wire == _VARINT])[1]
            end[(wire != _VARINT) & (wire != _EIGHT_BYTES) & ~delimited & (wire != _FOUR_BYTES)] = -1
        limit = ends[live]
        if (bad := (end > limit) | (end < start)).any():
            owner = live[np.flatnonzero(bad)[0]]
            raise Unfit(owner if record is None else record[owner], _NOT_VALID)
        parts.append((live, number, wire, start, end))
        at[live] = end
        live = live[end < limit]
    if not parts:
        return Fields(*(np.empty(0, np.int64) for _ in range(5)))
    if len(parts) == 1:
        return Fields(*parts[0])
    joined = [np.concatenate(part) for part in zip(*parts, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return Fields(*(part[order] for part in joined))


def _varints(data: Array, at: Array) -> tuple[Array, Array]:
    """Return the numbers that begin at these bytes, and where each ends."""
    byte = data.take(at, mode="clip").astype(np.int64)
    after = at + 1
    if (byte < 128).all():
        return byte, after
    value, shift = byte & 127, 7
    live = np.flatnonzero(byte >= 128)
    while len(live) and shift < 7 * _LONGEST_VARINT:
        byte = data.take(after[live], mode="clip").astype(np.int64)
        value[live] |= (byte & 127) << shift
        after[live] += 1
        live, shift = live[byte >= 128], shift + 7
    after[live] = -1  # no number is so long
    return value, after


def _values(data: Array, starts: Array, ends: Array, record: Array, name: str, kind: str) -> FeatureValues:
    """Return the values of some Features. Raise Unfit if one of them is stored in another way than `kind`."""
    lists = _fields(data, starts, ends, record)
    stored = KINDS.get
    for number in np.unique(lists.number).tolist():
        if stored(number) != kind:
            at = lists.owner[np.flatnonzero(lists.number == number)[0]]
            raise Unfit(
                record[at],
                f"has {_words_of(stored(number, ''))} in the feature `{name}`, which holds {_words_of(kind)} in the "
                "first records. Write all records with one type, or name only the other features, "
                "with columns=[…] or schema={…}",
            )
    if (lists.owner[1:] == lists.owner[:-1]).any():
        at = lists.owner[np.flatnonzero(lists.owner[1:] == lists.owner[:-1])[0]]
        raise Unfit(record[at], f"has two lists of values in the feature `{name}`. Write it again with one list")
    owners = record[lists.owner]
    items = _fields(data, lists.start, lists.end, owners)
    if (items.number != 1).any():
        items = items.only(items.number == 1)
    per_list, rows = items.owner, len(starts)
    sizes = items.end - items.start
    if kind == "bytes":
        counts, flat = np.bincount(per_list, minlength=len(owners)), np.stack([items.start, items.end])
    elif kind == "float":
        counts = np.bincount(per_list, sizes, len(owners)).astype(np.int64)
        if (counts % 4).any():
            raise Unfit(owners[np.flatnonzero(counts % 4)[0]], _NOT_VALID)
        counts, flat = counts // 4, _gathered(data, items.start, items.end).view("<f4")
    else:
        packed, flat = _integers(_gathered(data, items.start, items.end), sizes, owners[per_list])
        counts = np.bincount(per_list, packed, len(owners)).astype(np.int64)
    if len(owners) != rows:  # some Features have no value
        spread = np.zeros(rows, np.int64)
        spread[lists.owner] = counts
        counts = spread
    return FeatureValues(counts, flat)


def _integers(content: Array, sizes: Array, record: Array) -> tuple[Array, Array]:
    """Return how many numbers each of some pieces of `content` has, and all numbers. The pieces have these sizes."""
    last = content < 128
    if last.all():
        return sizes, content.astype(np.int64)
    ends = np.cumsum(sizes)
    if not last[ends[sizes > 0] - 1].all():
        raise Unfit(record[np.flatnonzero(~last[ends - 1])[0]], _NOT_VALID)
    totals = np.concatenate([[0], np.cumsum(last)])
    stops = np.flatnonzero(last)
    lengths = np.diff(stops, prepend=-1)
    begins, longest = stops - lengths + 1, int(lengths.max())
    # Up to eight bytes are taken at once; the seven lower bits of each byte are then moved together.
    words = words_at(np.concatenate([content, np.zeros(8, np.uint8)]), begins, "<u8")
    words &= _FIRST_BYTES[np.minimum(lengths, 8)]
    values = words & np.uint64(127)
    for byte in range(1, min(longest, 8)):
        values |= (words >> np.uint64(byte)) & np.uint64(127 << 7 * byte)
    live = np.flatnonzero(lengths > 8)
    for byte in range(8, min(longest, _LONGEST_VARINT)):
        values[live] |= (content[begins[live] + byte] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * byte)
        live = live[lengths[live] > byte + 1]
    return totals[ends] - totals[ends - sizes], values.view(np.int64)


def _gathered(data: Array, starts: Array, ends: Array) -> Array:
    """Return the bytes between `starts` and `ends`, one piece after another."""
    if not len(starts):
        return np.empty(0, np.uint8)
    lengths = ends - starts
    length = int(lengths[0])
    if (lengths == length).all():
        return _pieces(data, starts, length)
    total = int(lengths.sum())
    if total < _SHORT_BYTES * len(starts):
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return data[shift + np.arange(total)]
    whole = memoryview(data)
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    return np.frombuffer(bytearray().join([whole[start:end] for start, end in spans]), np.uint8)


def _pieces(data: Array, starts: Array, length: int) -> Array:
    """Return the `length` bytes at each of `starts`, one after another."""
    if not length or not len(starts):
        return np.empty(0, np.uint8)
    # Each item of this view begins one byte after the item before, so that NumPy copies whole pieces.
    view: Array = np.ndarray((len(data) - length + 1,), f"V{length}", data, 0, (1,))
    return view[starts].view(np.uint8)


def _words_of(kind: str) -> str:
    return {"bytes": "bytes", "float": "floats", "int64": "integers"}.get(kind, "values of an unknown type")
