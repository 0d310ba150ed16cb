"""Which messages each end sends."""

from typing import get_args

from sparkring.wire.messages.member_reports import Beat, Exited, GivenBack, GpuUsed, Hello, Output, Stack, TimelinePart
from sparkring.wire.messages.model_reports import ModelUsed
from sparkring.wire.messages.orders import (
    EndItem,
    EnterWorld,
    Interrupt,
    Leave,
    RecordTimeline,
    Release,
    Run,
    SetEnvironment,
    Stop,
    TakeStack,
    Work,
)
from sparkring.wire.messages.rank_reports import CollectivesEnded, Done, Failed, Importing
from sparkring.wire.messages.run_reports import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointRemoved,
    CheckpointRestored,
    CheckpointSaved,
    DataOpened,
    DataPlanned,
    DataRead,
    Displayed,
    ItemMeasured,
    Metrics,
    UserMessage,
)

MemberOrder = Stop | Interrupt | TakeStack | RecordTimeline
RankOrder = EnterWorld | Work | Run | Release | EndItem | Leave | SetEnvironment
MemberReport = Hello | Beat | Output | GpuUsed | Stack | GivenBack | TimelinePart | Exited
# What a rank reports while it runs a request.
Told = (
    UserMessage
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
RankReport = Done | Failed | Importing | CollectivesEnded | Told
Report = MemberReport | RankReport
Kept = Output | GpuUsed | TimelinePart | Told  # passed to the run's record unchanged
Message = MemberOrder | RankOrder | Report | ModelUsed
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
