"""The messages that a model process of predict() sends to the driver while a query is using the model."""

from typing import Literal, NamedTuple

from sparkring.wire.messages.fields import Count


class TaskScored(NamedTuple):
    """The work that was done for a Spark task over one connection.

    `connection` is the number of the connection. `task` is Spark's id of the task attempt. `query` is Spark's id of the
    query, '' for none; `stage` and `partition` say which part of the query the task computes. `rows` is the number of
    scored rows, and `nulls` is how many of them have no prediction. `seconds` is the time since the first request. A
    `finished` task has sent all its rows. If the task is `closed`, the connection ended before that. If the task has
    `failed`, `error` says why.
    """

    connection: Count
    task: Count
    query: str
    stage: Count
    partition: Count
    rows: Count
    nulls: Count
    seconds: float
    state: Literal["running", "finished", "failed", "closed"]
    error: str


class CheckpointUsed(NamedTuple):
    """The checkpoint of a model process that takes up new checkpoints while it is serving a stream.

    `step` is the checkpoint's step, `load_s` is how long it took to load, and `earlier` is the number of checkpoints
    that the process has used before. Since it was started, the process has scored `rows` rows, `nulls` of which have no
    prediction. `problem` says why a newer checkpoint is not used; '' if there is none. `stream` is Spark's id of the
    streaming query that has used the process last; '' before the first one.
    """

    step: Count
    load_s: float
    earlier: Count
    rows: Count
    nulls: Count
    problem: str
    stream: str


class ModelUsed(NamedTuple):
    """The progress of the model process `pid` on `host`, which scores `column`.

    `tasks` are the tasks that have changed since the last report. `load_s` is how long it took to load the model; None
    while the model is being loaded. `checkpoint` is None unless the process takes up new checkpoints.
    """

    column: str
    host: str
    pid: Count
    load_s: float | None
    tasks: tuple[TaskScored, ...]
    checkpoint: CheckpointUsed | None = None
