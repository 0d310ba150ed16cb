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


class ModelUsed(NamedTuple):
    """The progress of the model process `pid` on `host`, which scores `column`.

    `tasks` are the tasks that have changed since the last report. `load_s` is how long it took to load the model; None
    while the model is being loaded.
    """

    column: str
    host: str
    pid: Count
    load_s: float | None
    tasks: tuple[TaskScored, ...]
