"""Encodes a message as the header and the parts of a frame, and decodes it."""

import types
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from sparkring.wire.messages.fields import Buffer, Buffers
from sparkring.wire.messages.orders import Run, Work
from sparkring.wire.messages.rank_reports import Done

if TYPE_CHECKING:
    from sparkring.wire.messages import Message


class MalformedMessage(ValueError):
    """A frame that is not a valid message."""


def encode(message: "Message") -> tuple[dict[str, Any], list[Buffer]]:
    """Return the fields of the message's header, as JSON values, and the parts of its body."""
    plan = _plan(type(message))
    parts: list[Buffer] = []
    for name in plan.binary:
        value = getattr(message, name)
        parts += value if isinstance(value, tuple) else [value]
    fields = {name: getattr(message, name) for name in plan.converters}
    for name in plan.tagged:
        fields[name] = [type(fields[name]).__name__, *fields[name]]
    return fields, parts


def decode(kind: "type[Message]", fields: dict[str, Any], parts: Sequence[Buffer]) -> "Message":
    """Return the message. Raise MalformedMessage if this kind of message does not have these fields and parts."""
    plan = _plan(kind)
    if fields.keys() != plan.converters.keys():
        wrong = ", ".join(sorted(fields.keys() ^ plan.converters.keys()))
        raise MalformedMessage(f"{kind.__name__}: fields that are missing or unknown: {wrong}")
    values: dict[str, Any] = {}
    for name, convert in plan.converters.items():
        try:
            values[name] = convert(fields[name])
        except (ValueError, OverflowError) as error:
            raise MalformedMessage(f"{kind.__name__}.{name}: {error}") from None
    if len(parts) != len(plan.binary) and not any(plan.binary.values()):
        raise MalformedMessage(f"{kind.__name__}: {len(parts)} parts instead of {len(plan.binary)}")
    for name, several in plan.binary.items():
        values[name] = tuple(parts) if several else bytes(parts[0])
    message = kind(**values)
    problem = message.problem() if isinstance(message, Work | Run | Done) else ""
    if problem:
        raise MalformedMessage(f"{kind.__name__}: {problem}")
    return message


Converter = Callable[[Any], Any]


class _Plan(NamedTuple):
    """How a kind of message is encoded and decoded.

    `converters` contains a function for each field in the header. `binary` contains the other fields, which are in the
    body: the value is True for a field of type `Buffers`, and False for a field of type `bytes`. `tagged` are the
    fields in the header whose type is a union of classes.
    """

    converters: dict[str, Converter]
    binary: dict[str, bool]
    tagged: tuple[str, ...]


_plans: dict[Any, _Plan] = {}  # for the kinds of messages that this process has sent or received


def _plan(kind: Any) -> _Plan:
    if kind not in _plans:
        hints = get_type_hints(kind, include_extras=True)
        if "time" in hints:  # the record keeps these messages, and the driver sets the two fields
            del hints["time"], hints["rank"]
        binary = {name: hint == Buffers for name, hint in hints.items() if hint in (bytes, Buffers)}
        converters = {name: _converter(hint) for name, hint in hints.items() if name not in binary}
        _plans[kind] = _Plan(converters, binary, tuple(name for name in converters if _classes(hints[name])))
    return _plans[kind]


def _classes(hint: Any) -> dict[str, Any]:
    """Return the classes of a union of classes, by name."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return {kind.__name__: kind for kind in kinds} if all(hasattr(kind, "_fields") for kind in kinds) else {}


def _converter(hint: Any) -> Converter:
    """Return a function that turns a value from JSON into a value of type `hint`, or raises ValueError."""
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _checked((float, int), "float", float)
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return _each(list(_plan(hint).converters.values()), hint.__name__, lambda items: hint(*items))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(int, f"int from {arguments[1].start} to {arguments[1].stop - 1}", within=arguments[1])
    if origin is Literal:
        return _checked(str, f"one of {', '.join(map(repr, arguments))}", within=arguments)
    if classes := _classes(hint):
        return _tagged({name: _converter(message_class) for name, message_class in classes.items()})
    if origin in (Union, types.UnionType):
        (inner,) = (_converter(argument) for argument in arguments if argument is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _each([_converter(argument) for argument in arguments], f"list of {len(arguments)}", tuple)
    if origin in (tuple, Sequence):
        kind, convert_item = tuple if origin is tuple else list, _converter(arguments[0])
        return _checked(list, "list", lambda items: kind(map(convert_item, items)))
    if origin in (dict, Mapping):
        convert_value = _converter(arguments[1])
        return _checked(dict, "object", lambda mapping: {key: convert_value(item) for key, item in mapping.items()})
    return _checked(hint, hint.__name__)


def _checked(
    kinds: type | tuple[type, ...], expected: str, make: Converter | None = None, within: Container[Any] | None = None
) -> Converter:
    """Return a converter that checks a value's type and whether the value is in `within`, and then calls `make`."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)

    def convert(value: Any) -> Any:
        if type(value) not in allowed or (within is not None and value not in within):
            raise _wrong(value, expected)
        return value if make is None else make(value)

    return convert


def _each(converters: Sequence[Converter], expected: str, make: Converter) -> Converter:
    """Return a converter for lists with one item for each of `converters`. It passes the converted items to `make`."""

    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            raise _wrong(value, expected)
        return make([convert(item) for convert, item in zip(converters, value, strict=True)])

    return convert


def _tagged(converters: Mapping[str, Converter]) -> Converter:
    """Return a converter for lists of the name of a class, which must be in `converters`, and the class's fields."""

    def convert(value: Any) -> Any:
        if type(value) is not list or not value or type(value[0]) is not str or value[0] not in converters:
            raise _wrong(value, f"list that begins with one of {', '.join(map(repr, converters))}")
        return converters[value[0]](value[1:])

    return convert


def _wrong(value: Any, expected: str) -> ValueError:
    text = repr(value)
    return ValueError(f"expected {expected}, not {text if len(text) < 60 else f'{text[:59]}…'}")
