"""Every message between driver, member and rank, and how it is encoded as the header and the parts of a frame.

    driver  ── Stop, Interrupt, TakeStack, RecordTimeline ─────────────▶ member
    driver  ── EnterWorld, Work, Run, Answer, Release, … ── passed on ─▶ rank
    member  ── SetEnvironment ─────────────────────────────────────────▶ rank
    member  ── Hello, Output, GpuUsed, RankUsed, Beat, Exited, … ──────▶ driver
    rank    ── Done, Failed, Metrics, DataRead, … ───── passed on ─────▶ driver
    model process of predict() ── ModelUsed, GpuUsed ──────────────────▶ driver

To add a message, write its class in one of the modules here, import it below, and add it to one of the unions. Members,
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

from typing import NoReturn, get_args

from sparkring.wire.messages.encoding import MalformedMessage as MalformedMessage
from sparkring.wire.messages.encoding import decode as decode
from sparkring.wire.messages.encoding import encode as encode
from sparkring.wire.messages.fields import Buffer as Buffer
from sparkring.wire.messages.fields import Buffers as Buffers
from sparkring.wire.messages.fields import CheckpointKind as CheckpointKind
from sparkring.wire.messages.fields import DataKind as DataKind
from sparkring.wire.messages.fields import DisplayType as DisplayType
from sparkring.wire.messages.fields import FailureCause as FailureCause
from sparkring.wire.messages.fields import GpuFaultKind as GpuFaultKind
from sparkring.wire.messages.fields import PathKind as PathKind
from sparkring.wire.messages.fields import Stream as Stream
from sparkring.wire.messages.gpus import GpuFault as GpuFault
from sparkring.wire.messages.gpus import GpuHolder as GpuHolder
from sparkring.wire.messages.gpus import GpuTrouble as GpuTrouble
from sparkring.wire.messages.member_reports import Beat as Beat
from sparkring.wire.messages.member_reports import Exited as Exited
from sparkring.wire.messages.member_reports import GivenBack as GivenBack
from sparkring.wire.messages.member_reports import GpuUsed as GpuUsed
from sparkring.wire.messages.member_reports import Hello as Hello
from sparkring.wire.messages.member_reports import Output as Output
from sparkring.wire.messages.member_reports import RankUsed as RankUsed
from sparkring.wire.messages.member_reports import Stack as Stack
from sparkring.wire.messages.member_reports import TimelinePart as TimelinePart
from sparkring.wire.messages.model_reports import CheckpointUsed as CheckpointUsed
from sparkring.wire.messages.model_reports import ModelUsed as ModelUsed
from sparkring.wire.messages.model_reports import TaskScored as TaskScored
from sparkring.wire.messages.orders import Answer as Answer
from sparkring.wire.messages.orders import CellCode as CellCode
from sparkring.wire.messages.orders import EndItem as EndItem
from sparkring.wire.messages.orders import EnterWorld as EnterWorld
from sparkring.wire.messages.orders import FunctionCall as FunctionCall
from sparkring.wire.messages.orders import GiveBack as GiveBack
from sparkring.wire.messages.orders import Handler as Handler
from sparkring.wire.messages.orders import Interrupt as Interrupt
from sparkring.wire.messages.orders import Leave as Leave
from sparkring.wire.messages.orders import Logger as Logger
from sparkring.wire.messages.orders import ModuleFiles as ModuleFiles
from sparkring.wire.messages.orders import NextBatch as NextBatch
from sparkring.wire.messages.orders import NextItem as NextItem
from sparkring.wire.messages.orders import NotebookState as NotebookState
from sparkring.wire.messages.orders import RecordTimeline as RecordTimeline
from sparkring.wire.messages.orders import Release as Release
from sparkring.wire.messages.orders import Run as Run
from sparkring.wire.messages.orders import Script as Script
from sparkring.wire.messages.orders import SetEnvironment as SetEnvironment
from sparkring.wire.messages.orders import Stop as Stop
from sparkring.wire.messages.orders import StreamCode as StreamCode
from sparkring.wire.messages.orders import TakeStack as TakeStack
from sparkring.wire.messages.orders import Work as Work
from sparkring.wire.messages.rank_reports import CodeFrame as CodeFrame
from sparkring.wire.messages.rank_reports import CollectivesEnded as CollectivesEnded
from sparkring.wire.messages.rank_reports import Done as Done
from sparkring.wire.messages.rank_reports import Failed as Failed
from sparkring.wire.messages.rank_reports import Failure as Failure
from sparkring.wire.messages.rank_reports import Importing as Importing
from sparkring.wire.messages.rank_reports import PackedValue as PackedValue
from sparkring.wire.messages.rank_reports import RankNews as RankNews
from sparkring.wire.messages.rank_reports import SourceLine as SourceLine
from sparkring.wire.messages.rank_reports import TrainsAlone as TrainsAlone
from sparkring.wire.messages.run_reports import CheckpointDamaged as CheckpointDamaged
from sparkring.wire.messages.run_reports import CheckpointFailed as CheckpointFailed
from sparkring.wire.messages.run_reports import CheckpointRemoved as CheckpointRemoved
from sparkring.wire.messages.run_reports import CheckpointRestored as CheckpointRestored
from sparkring.wire.messages.run_reports import CheckpointSaved as CheckpointSaved
from sparkring.wire.messages.run_reports import CommandFailed as CommandFailed
from sparkring.wire.messages.run_reports import DataOpened as DataOpened
from sparkring.wire.messages.run_reports import DataPlanned as DataPlanned
from sparkring.wire.messages.run_reports import DataRead as DataRead
from sparkring.wire.messages.run_reports import Displayed as Displayed
from sparkring.wire.messages.run_reports import InputEnded as InputEnded
from sparkring.wire.messages.run_reports import InputRequested as InputRequested
from sparkring.wire.messages.run_reports import ItemMeasured as ItemMeasured
from sparkring.wire.messages.run_reports import Metrics as Metrics
from sparkring.wire.messages.run_reports import Piece as Piece
from sparkring.wire.messages.run_reports import UserMessage as UserMessage

MemberOrder = Stop | Interrupt | GiveBack | TakeStack | RecordTimeline | EnterWorld  # what members carry out
# The driver's orders to ranks, which members pass on.
PassedOn = ModuleFiles | Work | Run | Answer | Release | EndItem | Leave
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
)
RequestEnd = Done | Failed
RankReport = RequestEnd | Importing | CollectivesEnded | TrainsAlone | Told
Report = MemberReport | RankReport
Kept = Output | GpuUsed | RankUsed | TimelinePart | Told  # passed to the run's record unchanged
Message = MemberOrder | RankOrder | Report | ModelUsed
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def never(message: NoReturn) -> NoReturn:
    """End a `match` over the classes of a union: mypy reports the call if the cases leave a class out."""
    raise AssertionError(f"{type(message).__name__} is not handled")
