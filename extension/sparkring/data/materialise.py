"""Writes a Spark DataFrame as Parquet once, so that every later run that needs the same rows can reuse the files.

    CACHE/<key>/<random>/
        _owner.json         the process that writes the folder; written first
        part-*.parquet      the rows, written by Spark
        _sparkring.json     the files, their rows and sizes; written last: a copy without this file is incomplete
        _used               the time at which the copy was last used

The key is computed from the DataFrame's version (frames.py) and from the settings for writing it. The folder is not
renamed when the copy is finished, because not every mount supports renaming. Before a process writes a copy, it removes
incomplete copies that killed kernels have left, and copies that have not been used for a month.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.cluster.java_errors import root_cause
from sparkring.cluster.jobs import interruptibly
from sparkring.cluster.slots import slots
from sparkring.data.folders import entries, has_ended, read_json, storage_errors, this_process, write_json
from sparkring.data.frames import cluster_behind, for_arrays, proleptic, same_names, version_of
from sparkring.errors import DataError, OptionsError
from sparkring.history.describe import ago, size
from sparkring.runtime.interrupts import interrupted
from sparkring.runtime.storage import Location, locate, user_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkring.cluster.base import Cluster

CACHE = "SPARKRING_CACHE"
KEEP_DAYS = 30.0
ROW_GROUP_BYTES = 32_000_000
COMMIT, OWNER, USED = "_sparkring.json", "_owner.json", "_used"
BESIDE = "beside"
LAYOUT = 1
# After this time, an unfinished copy counts as abandoned even if its process, on another host, cannot be checked.
ABANDONED_AFTER_S = 24 * 3600
_KEY, _COPY = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
_LAST_TASKS_S = 2.0  # how long _remove() waits for Spark's last tasks to stop writing

Say = Callable[[str], None]


class Copy(NamedTuple):
    """A DataFrame's rows as Parquet files, with the DataFrame's `version`.

    `reused` says whether the files existed already. `files` has the name and the number of rows of each file, and
    `facts` holds the result of the `note` function of the copy's Form.
    """

    location: Location
    version: str
    rows: int
    size_bytes: int
    reused: bool
    files: tuple[tuple[str, int], ...] = ()
    facts: Mapping[str, Any] = {}


class Form(NamedTuple):
    """The form in which a copy stores the rows. Each form has its own `kind`: a DataFrame can have a copy in each form.

    `version` computes the version of a DataFrame, and `written` makes the DataFrame that is written. After writing,
    `note` is called with this DataFrame and the folder. `note` returns facts, as plain values, which are stored with
    the copy. The fact BESIDE names the files that `note` has written to the folder. `may_be_empty` says whether a copy
    may have no rows. `row_group_bytes` is the size of a row group before compression.
    """

    kind: str
    version: Callable[[DataFrame], str]
    written: Callable[[DataFrame], DataFrame]
    note: Callable[[DataFrame, Location], dict[str, Any]] = lambda frame, copy: {}
    may_be_empty: bool = False
    row_group_bytes: int = ROW_GROUP_BYTES


def materialise(
    frame: DataFrame,
    *,
    cache: str | os.PathLike[str] | None = None,
    row_group_bytes: int = ROW_GROUP_BYTES,
    name: str = "",
    say: Say | None = None,
) -> Copy:
    """Return the copy of a Spark DataFrame in `cache`. If the cache has no copy yet, write one first.

    `cache` is any path that both Spark's executors and this process can reach; the default is cache_folder().
    Row groups have about `row_group_bytes` bytes before compression. MLlib's vectors become arrays of doubles. Times
    are in the session's time zone, as in toPandas(). `name` is the DataFrame's name in the notebook. `say` is called
    with messages for the user. An interrupt ends Spark's job, and incomplete files are removed.
    Raise DataError if the DataFrame is empty or cannot be computed, or if the cache cannot be used.
    """
    called = f"`{name}`" if name else "the DataFrame"
    cluster_behind(frame, called)
    if row_group_bytes < 1:
        raise OptionsError(f"row_group_bytes={row_group_bytes}: expected at least 1.")
    _check_columns(frame, called)
    form = Form("", version_of, for_arrays, row_group_bytes=row_group_bytes)
    return in_form(frame, form, cache=cache, called=called, say=say)


def in_form(
    frame: DataFrame,
    form: Form,
    *,
    cache: str | os.PathLike[str] | None = None,
    called: str = "the DataFrame",
    say: Say | None = None,
) -> Copy:
    """Return the copy of a Spark DataFrame in the form `form`. If the cache has no such copy yet, write one first.

    `called` is the DataFrame's name in messages. `cache`, `say` and the errors are those of materialise().
    """
    tell: Say = say or (lambda text: None)
    cluster = cluster_behind(frame, called)
    home = cache_folder(cache, cluster.session)
    version = _computed(cluster, called, "looking for changes in", lambda: form.version(frame), tell)
    settings = " ".join(filter(None, [str(LAYOUT), form.kind, str(form.row_group_bytes), version]))
    key = hashlib.sha256(settings.encode()).hexdigest()[:32]
    with _usable(home):
        copy = _find(home / key, version, tell)
    if copy:
        return copy
    with _usable(home):
        home.fs.makedirs(home.path, exist_ok=True)
        gone = clean(home)
    if gone:
        tell(f"removed {len(gone)} old or unfinished {'copies' if len(gone) > 1 else 'copy'} from {home.written}")
    tell(f"writing {called} to {home.written} once; later runs reuse it")
    return _write(cluster, frame, form, home, key, version, called, tell)


def cache_folder(cache: str | os.PathLike[str] | None = None, session: SparkSession | None = None) -> Location:
    """Return the folder in which copies are kept: `cache`, if it is given.

    The default is the folder `dataframes` in $SPARKRING_CACHE. If this variable is not set, `dataframes` is in the
    user's cache folder or, on Databricks, in dbfs:/tmp/sparkring/<user>, which the executors can reach, too.
    """
    if cache is not None:
        return locate(cache)
    named = os.environ.get(CACHE)
    if named:
        return locate(named) / "dataframes"
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return locate(f"dbfs:/tmp/sparkring/{_user(session)}/dataframes")
    return locate(user_folder("cache") / "dataframes")


def clean(home: Location) -> list[str]:
    """Remove the copies in a cache that have not been used for KEEP_DAYS days, and abandoned unfinished copies.

    Other folders are kept, and so are unfinished copies whose process is still alive. Return the paths of the removed
    folders.
    """
    gone = []
    for key in _folders(home, _KEY):
        for copy in _folders(key, _COPY):
            commit = read_json(copy / COMMIT, LAYOUT)
            unused_s = time.time() - _used(copy, commit) if commit else 0.0
            if unused_s > KEEP_DAYS * 24 * 3600 or (not commit and _abandoned(copy)):
                _remove(copy)
                gone.append(copy.written)
        with contextlib.suppress(OSError):  # rmdir() fails if the folder still has another copy
            home.fs.rmdir(key.path)
    return gone


# ── Finding ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _find(folder: Location, version: str, tell: Say) -> Copy | None:
    """Return a complete copy in `folder`, if there is one. Damaged copies are removed."""
    for copy in _folders(folder, _COPY):
        commit = read_json(copy / COMMIT, LAYOUT)
        if not commit:
            continue
        damage = _damage(copy, commit)
        if damage:
            tell(f"the copy in {copy.written} is damaged ({damage}); rewriting it")
            with contextlib.suppress(OSError):  # a copy that cannot be removed stays, but no run uses it
                _remove(copy)
            continue
        with contextlib.suppress(OSError):  # this fails if the cache is read-only, but the copy can still be used
            copy.fs.pipe_file((copy / USED).path, repr(time.time()).encode())
        tell(f"reused {copy.written}, written {ago(time.time() - commit['created'])}")
        return _copy(copy, version, commit, reused=True)
    return None


def _damage(copy: Location, commit: dict[str, Any]) -> str:
    """Return a description of the damage to a copy, or '' if no file is missing or has the wrong size."""
    sizes = _sizes(copy)
    for file in commit["files"]:
        size = sizes.get(file["name"])
        if size is None:
            return f"{file['name']} is missing"
        if size != file["size_bytes"]:
            return f"{file['name']} has {size:,} bytes instead of {file['size_bytes']:,}"
    missing = [name for name in commit.get("facts", {}).get(BESIDE, ()) if not copy.fs.exists((copy / name).path)]
    return f"{missing[0]} is missing" if missing else ""


def _folders(parent: Location, pattern: re.Pattern[str]) -> list[Location]:
    """Return the folders in `parent` whose names match `pattern`. A cache may also contain other folders."""
    with contextlib.suppress(FileNotFoundError):
        names = sorted(name for name, entry in entries(parent).items() if entry["type"] == "directory")
        return [parent / name for name in names if pattern.fullmatch(name)]
    return []


def _sizes(copy: Location) -> dict[str, int]:
    sizes = {name: int(entry["size"]) for name, entry in entries(copy).items() if entry["type"] == "file"}
    return {name: size for name, size in sorted(sizes.items()) if name.endswith(".parquet") and name[0] not in "._"}


def _used(copy: Location, commit: dict[str, Any]) -> float:
    """Return when a copy was last used, in seconds since 1970."""
    try:
        return float(copy.fs.cat_file((copy / USED).path))
    except (FileNotFoundError, ValueError):
        return float(commit["created"])


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write(
    cluster: Cluster, frame: DataFrame, form: Form, home: Location, key: str, version: str, called: str, tell: Say
) -> Copy:
    copy = home / key / secrets.token_hex(8)
    try:
        with _usable(home):
            copy.fs.makedirs(copy.path)
            write_json(copy / OWNER, LAYOUT, {"created": time.time(), **this_process()})
        _check_executors(cluster, copy, home, called)

        def write() -> dict[str, Any]:
            # Without "append", Spark would refuse to write to this folder, because the folder exists already. Spark
            # ignores files whose names begin with _, such as _owner.json.
            written = form.written(proleptic(frame))
            writer = written.write.mode("append").option("parquet.block.size", form.row_group_bytes)
            writer.parquet(copy.for_spark())
            return form.note(written, copy)

        started = time.time()
        facts = _computed(cluster, called, f"writing {home.written} from", write, tell)
        with _usable(home):
            sizes = _sizes(copy)
            counts = [_rows(copy / name) for name in sizes]
            # Spark's first task writes part-00000 even if there are no rows. If this process does not see that file,
            # the executor has written it to another disk.
            if not any(name.startswith("part-00000") for name in sizes):
                raise _own_disks("an executor", home)
            rows, size_bytes = sum(counts), sum(sizes.values())
            if not (rows or form.may_be_empty):
                raise DataError(f"{called} has no rows: check its filters and joins.")
            files = [
                {"name": name, "size_bytes": sizes[name], "rows": count}
                for name, count in zip(sizes, counts, strict=True)
            ]
            commit = {"created": time.time(), "spark": cluster.session.version, "version": version, "rows": rows}
            commit |= {"facts": facts, "size_bytes": size_bytes, "files": files}
            write_json(copy / COMMIT, LAYOUT, commit)
        tell(f"wrote {rows:,} rows, {size(size_bytes)}, in {time.time() - started:.1f} s")
        return _copy(copy, version, commit, reused=False)
    except BaseException:  # an interrupt, too, must not leave files behind
        with contextlib.suppress(OSError):
            _remove(copy)
        with contextlib.suppress(OSError):  # rmdir() fails if the folder still has another copy
            copy.fs.rmdir((home / key).path)
        raise


def _copy(copy: Location, version: str, commit: Mapping[str, Any], *, reused: bool) -> Copy:
    files = tuple((file["name"], file["rows"]) for file in commit["files"])
    return Copy(copy, version, commit["rows"], commit["size_bytes"], reused, files, commit.get("facts", {}))


def _computed(cluster: Cluster, called: str, doing: str, ask: Callable[[], Any], tell: Say) -> Any:
    """Return the result of ask(). If ask() fails, raise DataError with Spark's reason.

    An interrupt ends the Spark jobs of ask().
    """
    try:
        return interruptibly(cluster, f"{doing} {called}", ask, tell)
    except KeyboardInterrupt:
        raise interrupted("and incomplete files were removed") from None
    except Exception as error:  # pyspark and py4j have several classes for this error
        reason = root_cause(str(error))
        raise DataError(f"Spark could not compute or write {called}: {reason}{_advice(reason)}") from error


def _advice(reason: str) -> str:
    """Return advice for the user if Spark could not write to the cache, otherwise ''."""
    if re.search(r"No space left|File too large|[Qq]uota|Permission denied|Mkdirs failed|Read-only", reason):
        return f". Free up some space, or set another folder with cache=… or {CACHE}."
    return ""


def _check_columns(frame: DataFrame, called: str) -> None:
    same = same_names(frame)
    several = next((columns for name in frame.columns if len(columns := same(name)) > 1), None)
    if several:
        names = " and ".join(repr(name) for name in dict.fromkeys(several))
        raise DataError(
            f"{called} has several columns called {names}, which a Parquet file cannot have: rename or drop all but "
            "one."
        )


def _check_executors(cluster: Cluster, copy: Location, home: Location, called: str) -> None:
    """Raise DataError if an executor does not see the folder `copy`: the executor would write to its own disk."""
    if cluster.is_local or not copy.for_spark().startswith("file:"):
        return
    path = (copy / OWNER).path

    # Spark sends a nested function as code, not as a reference to this module, which executors may not have.
    def look(rows: Iterable[Any]) -> Iterator[tuple[str, bool]]:
        import os

        yield socket.gethostname(), os.path.exists(path)

    def ask() -> list[tuple[str, bool]]:
        return cluster.collect(max(1, slots(cluster).likely), look)

    answers = _computed(cluster, called, "checking the executors for", ask, lambda text: None)
    blind = sorted({host for host, sees in answers if not sees})
    if blind:
        raise _own_disks(f"the executor on {blind[0]}", home)


def _own_disks(who: str, home: Location) -> DataError:
    return DataError(
        f"{home.written} is on this machine only: {who} has another disk at this path. Set a folder that all of "
        f"Spark's machines share (dbfs:/…, s3://…, a network mount) with cache=… or {CACHE}."
    )


def _rows(file: Location) -> int:
    from pyarrow import parquet

    with file.fs.open(file.path, "rb") as opened:
        return int(parquet.read_metadata(opened).num_rows)


def _usable(home: Location) -> contextlib.AbstractContextManager[None]:
    failed = f"the cache for DataFrames in {home.written} cannot be used"
    return storage_errors(failed, f" Choose a different folder with cache=… or {CACHE}.")


def _remove(copy: Location) -> None:
    """Remove a folder. Try again if it reappears: a task that Spark is ending may still write to it for a moment."""
    deadline = time.monotonic() + _LAST_TASKS_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            copy.fs.rm(copy.path, recursive=True)
        copy.fs.invalidate_cache()
        if not copy.fs.exists(copy.path) or time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _abandoned(copy: Location) -> bool:
    """Return whether an unfinished copy's process has ended or, if this cannot be checked, whether the copy is old."""
    owner = read_json(copy / OWNER, LAYOUT)
    ended = has_ended(owner) if owner else None
    if ended is not None:
        return ended
    created = owner["created"] if owner else _modified(copy)
    return time.time() - created > ABANDONED_AFTER_S


def _modified(copy: Location) -> float:
    """Return when a folder last changed, in seconds since 1970, or the current time if this is unknown."""
    try:
        return float(copy.fs.modified(copy.path).timestamp())
    except Exception:  # many file systems do not know the time, and each raises its own error
        return time.time()


def _user(session: SparkSession | None) -> str:
    """Return the user's name, from Spark if possible: on Databricks, the notebooks of all users run as root."""
    import getpass

    from pyspark.sql import SparkSession

    user, session = "", session or SparkSession.getActiveSession()
    if session is not None:
        row = session.sql("SELECT current_user()").first()
        user = str(row[0]) if row else ""
    return re.sub(r"[^A-Za-z0-9._@-]", "_", user or getpass.getuser())
