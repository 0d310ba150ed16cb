"""Every message between driver, member and rank, and how it is encoded as the header and the parts of a frame.

    driver  ── Stop, Interrupt, TakeStack, RecordTimeline ─────────────▶ member
    driver  ── EnterWorld, Work, Run, Answer, Release, … ── passed on ─▶ rank
    member  ── SetEnvironment ─────────────────────────────────────────▶ rank
    member  ── Hello, Output, GpuUsed, RankUsed, Beat, Exited, … ──────▶ driver
    rank    ── Done, Failed, Metrics, DataRead, … ───── passed on ─────▶ driver
    model process of predict() ── ModelUsed, GpuUsed ──────────────────▶ driver

To add a message, write its class in one of the modules here, and add it to one of the unions below. Members,
ranks and the driver accept what is in their unions; mypy says where a class of a union has yet to be handled. The
annotations in the class define how the message is encoded and decoded: a field of type `bytes` is one part of the
frame's body, a field of type `Buffers` is all of the body's parts, and other fields go into the header as JSON. If the
type of a field is a union of classes, the name of the class comes before its fields. `decode` refuses whatever the
annotations do not allow.

Members import this package at start-up, so it imports only light parts of the standard library. For the same reason,
the messages are NamedTuples: importing `dataclasses` would take longer than all other imports of this package. `from
__future__ import annotations` is not used: it turns annotations into strings, and typing would have to compile each
string.
"""

# ruff: noqa: F403, F405 - a star passes on all classes of a module, and mypy finds a class that does not exist

from typing import NoReturn, get_args

from sparkring.wire.messages.encoding import MalformedMessage as MalformedMessage
from sparkring.wire.messages.encoding import decode as decode
from sparkring.wire.messages.encoding import encode as encode
from sparkring.wire.messages.fields import *
from sparkring.wire.messages.gpus import *
from sparkring.wire.messages.member_reports import *
from sparkring.wire.messages.model_reports import *
from sparkring.wire.messages.orders import *
from sparkring.wire.messages.rank_reports import *
from sparkring.wire.messages.run_reports import *

MemberOrder = Stop | Interrupt | GiveBack | TakeStack | RecordTimeline | EnterWorld  # what members carry out
# The driver's orders to ranks, which members pass on.
PassedOn = (
    ModuleFiles
    | LackingPackages
    | Work
    | Run
    | Answer
    | Gathered
    | Release
    | EndItem
    | SaveSoon
    | GoNow
    | StoredKey
    | Leave
)
RankOrder = PassedOn | EnterWorld | SetEnvironment
MemberReport = Hello | Beat | Output | GpuUsed | GpuTrouble | RankUsed | Stack | GivenBack | TimelinePart | Exited
# What a rank reports while it is running a request.
Told = (
    UserMessage
    | CommandFailed
    | InputRequested
    | InputEnded
    | Metrics
    | Displayed
    | ItemMeasured
    | DataOpened
    | DataPlanned
    | DataRead
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | CheckpointRestored
    | CheckpointRemoved
    | AtLine
    | TracePart
    | TimeSpent
)
RequestEnd = Done | Failed
RankReport = (
    RequestEnd
    | ModelWeights
    | Importing
    | CollectivesEnded
    | TrainsAlone
    | HostGoing
    | SavePoint
    | StoredKey
    | Gather
    | Told
)
Report = MemberReport | RankReport
Kept = Output | GpuUsed | RankUsed | TimelinePart | Told  # passed to the run's record unchanged
Message = MemberOrder | RankOrder | Report | ModelUsed
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def never(message: NoReturn) -> NoReturn:
    """End a `match` over the classes of a union: mypy reports the call if the cases leave a class out."""
    raise AssertionError(f"{type(message).__name__} is not handled")
