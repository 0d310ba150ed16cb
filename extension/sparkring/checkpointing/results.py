"""Keeps the results of items in a directory: pickled values, each with its item's name, metrics and duration.

    results/KEY.json    signed; also holds the value if the value is small
    results/KEY.bin     the value, if it is large; written before the KEY.json
    items/KEY/          the item's own checkpoints
    code/CODE.json      signed; digests of the code of a run, part by part

A KEY is ITEM-CODE: digests of the item, and of the code under which its result is kept.

Unpickling can run code. So each KEY.json is signed (HMAC-SHA-256) with a secret that only this user has, and contains
the value or its digest. A value that anybody else has written or changed is not unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparkring.checkpointing import folder, tensors
from sparkring.errors import CheckpointError
from sparkring.history.events import Curve, CurvesBy
from sparkring.runtime.storage import Location, for_this_user_only
from sparkring.wire.messages import Buffers

LAYOUT = 1
RESULTS, ITEMS, CODES = "results", "items", "code"
SMALL_BYTES = 64 * 1024
SECRET_BYTES = 32
_SIGNED = re.compile(rb'\{"hmac": "([0-9a-f]{64})", "content": (\{.*\})\}\n', re.DOTALL)


class KeptResult(NamedTuple):
    """An item's value, packed in `parts`, with the item's name, a short string for the value, metrics, and duration.

    `pruned` says whether a search ended the item early. `curves` are the curves of the metrics, as in an ItemRecord.
    """

    parts: Buffers
    name: str = ""
    text: str = ""
    metrics: Mapping[str, float] = {}
    seconds: float = 0.0
    pruned: bool = False
    curves: Mapping[str, Curve] = {}
    by: CurvesBy = "report"


class RunCode(NamedTuple):
    """The code of a run. `parts` are the digests of its parts, by name; `time` is when the run began, in Unix seconds.

    Besides this code's own results, the run uses those of the codes in `others`, because the user has said so. `study`
    is the code under which a search keeps its study: this code, or one of the others.
    """

    key: str
    parts: Mapping[str, str]
    time: float
    others: Sequence[str]
    study: str


def user_secret(home: Path) -> bytes:
    """Return the secret that signs this user's results, from a file in `home`. Make it if it is missing.

    Raises CheckpointError if the file cannot be made or read, or is damaged.
    """
    path = home / "results.secret"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError), open(path, "xb", opener=for_this_user_only) as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        secret = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the secret that protects kept results cannot be saved in {home}: {error.strerror or error}. Set "
            "SPARKRING_HOME to a writable folder."
        ) from error
    if len(secret) != SECRET_BYTES:
        raise CheckpointError(f"{path}, the secret that protects kept results, is damaged: remove it, and use --fresh.")
    return secret


class KeptResults:
    """The results in `directory`. Methods raise CheckpointError if the storage cannot be read or written."""

    def __init__(self, directory: Location, secret: bytes) -> None:
        self.directory = directory
        self._folder = directory / RESULTS
        self._secret = secret
        self._made = set[str]()

    def keys(self) -> set[str]:
        """Return the keys of all results, including damaged ones."""
        names = (name for name, _ in self._listed(RESULTS))
        return {name.removesuffix(".json") for name in names if name.endswith(".json")}

    def items(self) -> set[str]:
        """Return the keys of the items that have a folder for their checkpoints."""
        return {name for name, kind in self._listed(ITEMS) if kind == "directory"}

    def write(self, key: str, result: KeptResult) -> None:
        """Write a result. If a crash interrupts write(), read() treats the result as missing."""
        with folder.in_words(f"a result cannot be kept in {self.directory.written}"):
            self._make(RESULTS)
            sizes = [memoryview(part).nbytes for part in result.parts]
            content: dict[str, Any] = {**result._asdict(), "parts": sizes, "layout": LAYOUT, "key": key}
            if sum(sizes) <= SMALL_BYTES:
                content["value"] = base64.b64encode(b"".join(result.parts)).decode()
            else:
                digest = hashlib.sha256()
                with tensors.open_synced(self._folder / f"{key}.bin") as out:
                    for part in result.parts:
                        digest.update(part)
                        out.write(part)
                content["digest"] = digest.hexdigest()
            self._write_signed(self._folder / f"{key}.json", content)
            folder.sync_folder(self._folder)

    def read(self, key: str) -> KeptResult | None:
        """Return an item's result; None if it is damaged or missing.

        Raises CheckpointError if the result was signed with another secret.
        """
        with folder.in_words(f"the results in {self.directory.written} cannot be read"):
            try:
                content = self._read_signed(self._folder / f"{key}.json")
                if content is None or (content["layout"], content["key"]) != (LAYOUT, key):
                    return None
                is_small = "value" in content
                value = base64.b64decode(content["value"]) if is_small else _cat(self._folder / f"{key}.bin")
            except FileNotFoundError:
                return None
        if "digest" in content and hashlib.sha256(value).hexdigest() != content["digest"]:
            return None
        known = {name: content[name] for name in KeptResult._fields[1:] if name in content}
        known["curves"] = {name: tuple(map(tuple, curve)) for name, curve in known.get("curves", {}).items()}
        return KeptResult(_apart(value, content["parts"]), **known)

    def codes(self) -> list[RunCode]:
        """Return the codes of all runs that kept results. Raises CheckpointError as read() does."""
        return [
            code
            for name, _ in self._listed(CODES)
            if name.endswith(".json") and (code := self.code(name.removesuffix(".json"))) is not None
        ]

    def code(self, key: str) -> RunCode | None:
        """Return the code with this key; None if no run with this code has kept a result."""
        with folder.in_words(f"the results in {self.directory.written} cannot be read"):
            try:
                content = self._read_signed(self.directory / CODES / f"{key}.json")
            except FileNotFoundError:
                return None
        return None if content is None else RunCode(**content)

    def write_code(self, code: RunCode) -> None:
        """Write the code of a run. Results are written after the code."""
        with folder.in_words(f"a result cannot be kept in {self.directory.written}"):
            self._make(CODES)
            self._write_signed(self.directory / CODES / f"{code.key}.json", code._asdict())

    def _make(self, name: str) -> None:
        if name not in self._made:
            folder.make(self.directory, name)
            self._made.add(name)

    def _write_signed(self, file: Location, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        with tensors.open_synced(file) as out:
            out.write(b'{"hmac": "%s", "content": %s}\n' % (self._sign(text).encode(), text))

    def _read_signed(self, file: Location) -> dict[str, Any] | None:
        """Return what _write_signed() wrote, or None."""
        signed = _SIGNED.fullmatch(_cat(file))
        if signed is None:
            return None  # incomplete: the kernel was killed while it wrote this file
        if not hmac.compare_digest(self._sign(signed[2]).encode(), signed[1]):
            raise CheckpointError(
                f"the results in {self.directory.written} were kept by another user, or with another SPARKRING_HOME: "
                "they are not read, since reading them could run code. Use the same SPARKRING_HOME, another "
                "directory, or --fresh to run all items again."
            )
        content: dict[str, Any] = json.loads(signed[2])
        return content

    def _sign(self, text: bytes) -> str:
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def _listed(self, name: str) -> list[tuple[str, str]]:
        """Return the names in one of the two folders, each with its kind; none if the folder does not exist."""
        place = self.directory / name
        with folder.in_words(f"the results in {self.directory.written} cannot be read"):
            place.fs.invalidate_cache()
            try:
                infos = place.fs.ls(place.path, detail=True)
            except FileNotFoundError:
                return []
        return [(info["name"].rstrip("/").rpartition("/")[2], info["type"]) for info in infos]


def _cat(file: Location) -> bytes:
    content: bytes = file.fs.cat_file(file.path)
    return content


def _apart(value: bytes, sizes: list[int]) -> Buffers:
    """Split a value into parts of these sizes. The parts are writable, like those that ranks send."""
    view, at, parts = memoryview(bytearray(value)), 0, []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return tuple(parts)
