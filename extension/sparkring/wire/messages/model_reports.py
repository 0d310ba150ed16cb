"""What a model process of predict() reports to the driver while a query uses the model."""

from typing import Literal, NamedTuple

from sparkring.wire.messages.fields import Count


class TaskScored(NamedTuple):
    """What has been scored for a Spark task over one connection.

    `connection` is the number of the connection. `task` is Spark's id of the attempt of the task. `query` is Spark's id
    of the query, '' for none; `stage` and `partition` say which part of it the task computes. `nulls` of the rows have
    no prediction. `seconds` is the time since the first request. A task that is `finished` has sent all its rows. One
    that is `closed` has ended, or has been ended, without that. If it has `failed`, `error` says why.
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


class ModelUsed(NamedTuple):
    """What the process `pid` on `host` has scored with the model of the column `column`: the tasks that have changed.

    `load_s` is how long it took to load the model; None while the model is being loaded.
    """

    column: str
    host: str
    pid: Count
    load_s: float | None
    tasks: tuple[TaskScored, ...]
