"""The messages that a rank sends to the driver about the request that it is running. Its member passes them on."""

from typing import Literal, NamedTuple

from sparkring.wire.messages.fields import Buffers, Count, FailureCause, Port
from sparkring.wire.messages.gpus import GpuFault

Library = Literal["torch", "lightning", "accelerate", "keras"]


class RankNews(NamedTuple):
    """What the gang needs for the next request.

    `names_bound` are the names that are new in the rank's `__main__`, and `names_gone` those that it no longer has.
    `loaded` says whether the rank has loaded all values that were sent to it. `port` is free on the rank's address.
    `memory_bytes` is how much memory the process holds after an item; 0 if that is not known. `imported` are the
    frameworks that the rank has imported; None if the code has changed the environment on which their import depends.
    `seconds` is how long the request took.
    """

    names_bound: tuple[str, ...]
    loaded: bool
    port: Port
    memory_bytes: Count = 0
    imported: tuple[str, ...] | None = ()
    seconds: float = 0.0
    names_gone: tuple[str, ...] = ()


class PackedValue(NamedTuple):
    """A returned value. It consists of `parts` parts of the message.

    `without` names the wrappers that were left out. With `shards`, the last part has the rank's shards of the value's
    sharded tensors. A rank that was asked only for its shards sends no other part.

    If the value could not be packed, `error` says why. The parts then have what could be packed of it: its state_dict()
    (`is_state_dict`), or its items or attributes, except those with the paths `left_out`.
    """

    name: str
    type_name: str
    parts: Count
    error: str
    without: tuple[str, ...] = ()
    shards: bool = False
    is_state_dict: bool = False
    left_out: tuple[str, ...] = ()


class Done(NamedTuple):
    """The rank has run the request. `repr` is the shortened repr() of the value that the request returned.

    In `values`, the returned value is first, under the name ''. The values of the names to pull follow; names that the
    rank does not have are in `missing`.
    """

    values: tuple[PackedValue, ...]
    missing: tuple[str, ...]
    repr: str
    news: RankNews
    parts: Buffers

    def problem(self) -> str:
        same = sum(value.parts for value in self.values) == len(self.parts)
        return "" if same else "the parts of the values do not add up to the parts of the message"


class SourceLine(NamedTuple):
    """A line of source code near the line where an exception was raised."""

    number: int
    text: str


class CodeFrame(NamedTuple):
    """One frame of a traceback. `in_cell` marks the user's notebook code; `source` contains the lines around `line`."""

    filename: str
    line: int
    function: str
    in_cell: bool = False
    source: tuple[SourceLine, ...] = ()


class Failure(NamedTuple):
    """Why a rank did not finish.

    `summary` is one line: `ValueError: bad shape`, `killed by SIGKILL`, `exited with code 3`. `error` is the class of
    the exception with its module, '' if there was none; `signal` is the name of the signal that ended the process, and
    `exit_code` the code that the process exited with. `gpu` says what went wrong with a GPU; None if nothing did.
    """

    cause: FailureCause
    summary: str
    frames: tuple[CodeFrame, ...] = ()
    traceback: str = ""
    advice: str = ""
    error: str = ""
    signal: str = ""
    exit_code: int | None = None
    gpu: GpuFault | None = None

    def __repr__(self) -> str:
        return f"Failure({self.cause!r}, {self.summary!r})"  # without the frames and the traceback, which are long

    @property
    def is_exception(self) -> bool:
        """Whether the rank's code raised an exception, other than an exit or a consequence of another rank's exit."""
        return bool(self.error) and self.cause not in ("exit", "echo")


class Failed(NamedTuple):
    """The request has ended with an exception, an exit or an interrupt."""

    failure: Failure
    news: RankNews


class Importing(NamedTuple):
    """A package import is delaying an interrupt. The rank repeats this message during the import."""


class CollectivesEnded(NamedTuple):
    """The rank is about to end collectives, as a Release requested. A rank without collectives does not send this."""


class StoredKey(NamedTuple):
    """A key that this rank's Gloo has stored, so that other ranks find this one. The driver sends it to all others."""

    scope: str
    key: str
    value: bytes


class Gather(NamedTuple):
    """The rank has called barrier() or allGather() of its context, and waits for Gathered. `what` is the function."""

    what: Literal["barrier", "allGather"]
    text: str = ""


class HostGoing(NamedTuple):
    """The rank has got SIGTERM, and its code saves checkpoints. It ends after `grace_s` seconds, or when told to."""

    grace_s: float


class SavePoint(NamedTuple):
    """The answer to SaveSoon: the rank will pass the save point `number` next. With `saved`, it has saved there."""

    number: Count
    saved: bool = False


class ModelWeights(NamedTuple):
    """The weights of a rank's largest model at the end of a request in which ranks have trained together.

    `model` is the name of its class, and `parameters` is the number of weights. `total` is the sum of a part of them,
    and `magnitude` is the sum of their absolute values.
    """

    model: str
    library: Library
    parameters: Count
    total: float
    magnitude: float


class TrainsAlone(NamedTuple):
    """The rank has trained with `library`, but has exchanged nothing with other ranks so far.

    `connected` says whether the rank was in a group with others, and `ended` whether the request's code has ended.
    """

    library: Library
    connected: bool
    ended: bool
