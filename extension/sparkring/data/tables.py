"""Looks up tables and views by their names, in the catalogue of the notebook's Spark session."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

from sparkring.capture.picklability import type_name
from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.session import active_cluster
from sparkring.errors import DataError
from sparkring.runtime.kernel import tell

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PART = r"(?:`(?:[^`]|``)+`|\w+)"
_NAME = re.compile(rf"{_PART}(?:\.{_PART}){{0,2}}")  # table, schema.table, catalog.schema.table
_NOT_THERE = re.compile("(TABLE_OR_VIEW|SCHEMA|CATALOG)_NOT_FOUND")


def table(name: str) -> DataFrame:
    """Return a table or view of the notebook's Spark session, as a DataFrame.

        %%foreach group in sparkring.table("sales").groupBy("store") -n 4

    name: the name as in Spark, as in "sales" or "catalog.schema.sales". It is the name of a table even if there is a
        file or folder of that name.

    Raises DataError if there is no session, or no table or view of that name.
    """
    if not isinstance(name, str):
        raise DataError(f"table() takes the name of a table, not a `{type_name(name)}`.")
    session = _session()
    if session is None:
        raise DataError(
            f"cannot look up the table `{name}`: there is no Spark session. Create one with "
            "SparkSession.builder.getOrCreate(), or pass the table's folder to shards() or predict()."
        )
    try:
        frame = session.table(name)
        frame.schema  # noqa: B018 - on Spark Connect, this looks the table up
    except Exception as error:  # pyspark and py4j have several classes for this error
        raise DataError(
            f"the Spark session cannot read the table {name}: {_reason(error)}. Check the name, as in "
            "catalog.schema.table, and your permissions."
        ) from error
    return frame


def resolved(source: Any, *, as_frame: bool = False) -> tuple[Any, str]:
    """Return what `source` stands for, and its name if it is the name of a table; otherwise, `source` itself and ''.

    A table stands for its DataFrame or, if it is a Delta table, for its folder, unless `as_frame` is true. A path that
    exists is preferred to a table. Raise DataError if a name is neither.
    """
    if not isinstance(source, str) or not _NAME.fullmatch(source):
        return source, ""
    session, is_path = _session(), os.path.exists(source)
    described, reason = (None, "") if session is None else _described(session, source)
    if is_path:
        if described is not None:
            tell(
                f"{source} is read from {os.path.abspath(source)}; for the table of the same name, use "
                f"sparkring.table({source!r})"
            )
        return source, ""
    if described is not None:
        if described.get("Provider", "").lower() == "delta" and "Location" in described and not as_frame:
            return described["Location"], source
        return table(source), source
    from sparkring.data.dataset import similar_path
    from sparkring.runtime.storage import locate

    close = similar_path(locate(source))
    path = f"there is no such file or folder{f' (did you mean {close}?)' if close else ''}"
    if reason:
        raise DataError(f"cannot look up `{source}`: {path}, and Spark could not check for a table: {reason}.")
    if session is None:
        raise DataError(
            f"`{source}` was not found: {path}, and no Spark session to look for a table. Check the path, or create a "
            "session with SparkSession.builder.getOrCreate()."
        )
    raise DataError(
        f"`{source}` was not found: {path}, and no such table or view in the Spark session. Check the name; for a "
        "table, use catalog.schema.table."
    )


def _session() -> SparkSession | None:
    """Return the notebook's session, if there is one that has not been stopped."""
    if "pyspark" not in sys.modules:
        return None
    cluster = active_cluster()
    return None if cluster is None or cluster.is_stopped() else cluster.session


def _described(session: SparkSession, name: str) -> tuple[dict[str, str] | None, str]:
    """Return what Spark's catalogue says about a table or view.

    If there is none, return None and, unless Spark says just that, why Spark could not look it up.
    """
    try:
        rows = session.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    except Exception as error:  # pyspark and py4j have several classes for this error
        reason = _reason(error)
        if "ClassNotFound" in reason or "DATA_SOURCE_NOT_FOUND" in reason:
            return _listed(session, name), ""
        return None, "" if _NOT_THERE.search(reason) else reason
    details, facts = False, {}
    for key, value, *_ in rows:
        details = details or key.startswith("# Detailed Table")
        if details:
            facts[key] = value
    return facts, ""


def _listed(session: SparkSession, name: str) -> dict[str, str]:
    """Return the same for a table whose format this session cannot read, which Spark 4 does not describe."""
    parts = re.findall(_PART, name)
    within = f" IN {'.'.join(parts[:-1])}" if parts[1:] else ""
    (row,) = session.sql(f"SHOW TABLE EXTENDED{within} LIKE '{parts[-1].strip('`')}'").collect()
    lines = (line.partition(": ") for line in row["information"].splitlines())
    return {key: value for key, colon, value in lines if colon}


def _reason(error: Exception) -> str:
    return root_cause(str(error)).partition(";")[0].rstrip(".")
