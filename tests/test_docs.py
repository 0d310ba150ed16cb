"""Tests of README.md and docs/: everything that the pages link to, show as code or name exists."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import IPython.core.magics
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import sparkring
from sparkring.checkpointing.store import Store
from sparkring.data.petastorm.converter import SparkDatasetConverter
from sparkring.data.shards import Shards
from sparkring.data.tfrecord import Records
from sparkring.frameworks import FRAMEWORKS
from sparkring.notebook import checkpoints, data, doctor, gang, history, launch
from sparkring.tools import build_horovod
from sparkring.worker.rank.barrier import TaskRows

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = Path(sparkring.__file__).parent
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(DOCS.rglob("*.md"))]
# Folders that are searched for files that a page names without a folder.
FOLDERS = (ROOT, PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir()))
REFERENCE = DOCS / "reference.md"
TROUBLES = DOCS / "troubleshooting.md"

LAUNCH = {each.lesson.magic for each in FRAMEWORKS.values() if each.lesson is not None}
OTHERS_MAGICS = {"px", "autoreload", "bash", "sh", "script"}  # ipyparallel's and IPython's
OTHERS_METHODS = {"cache", "cpu", "run"}  # of Spark, torch and TorchDistributor


class Fence(NamedTuple):
    """A block of code: its language, '' if it has none, and its text."""

    language: str
    text: str


class Page:
    """A page, divided into prose without code, inline code, and blocks of code."""

    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        self.fences: list[Fence] = []
        whole = re.sub(r"(?ms)^```(\w*)\n(.*?)^```\s*?$", self._take, text)
        self.spans = [found[2] for found in re.finditer(r"(?s)(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", whole)]
        self.prose = re.sub(r"(?s)(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", whole)
        self.headings = [re.sub(r"^#+ ", "", line) for line in whole.splitlines() if re.match(r"#+ ", line)]
        # The target of a link counts even if its text is code.
        self.targets = [found[1] for found in re.finditer(r"\]\(([^)\s]+)\)", self.prose)]
        self.targets += re.findall(r'(?:src|srcset|href)="([^"]+)"', self.prose)

    def _take(self, found: re.Match[str]) -> str:
        self.fences.append(Fence(found[1], found[2]))
        return ""

    def anchors(self) -> set[str]:
        """Return the anchors that GitHub makes from the headings."""
        found: set[str] = set()
        for heading in self.headings:
            slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
            again = 0
            while (name := f"{slug}-{again}" if again else slug) in found:
                again += 1
            found.add(name)
        return found


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"), path)


# ── What can be wrong with a page ─────────────────────────────────────────────


def wrong_links(page: Page) -> Iterator[str]:
    for target in page.targets:
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.path.parent / name).resolve()
        if name and not (file.is_relative_to(ROOT) and file.exists()):
            yield f"{target}: there is no such file"
        elif anchor and anchor not in (read(file) if name else page).anchors():
            yield f"{target}: there is no such heading"


def wrong_code(page: Page) -> Iterator[str]:
    for language, text in page.fences:
        if language != "python":
            continue
        first, _, rest = text.partition("\n")
        found = re.match(r"%%(\w+)(.*)", first)
        if found:
            yield from wrong_line(f"%%{found[1]}", found[2])
            text = "\n" + rest
        for line in re.findall(r"(?m)^%(?!%).*", text):
            name, _, arguments = line.partition(" ")
            yield from wrong_line(name, arguments)
        try:
            compile(TransformerManager().transform_cell(text), str(page.path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            yield f"{error.msg} in:\n{text}"


def wrong_line(magic: str, line: str) -> Iterator[str]:
    """Yield what the magic's own parser finds wrong with the line."""
    name = magic.lstrip("%")
    parse: dict[str, Callable[[str], object]] = {
        "%%ranks": lambda text: launch.parse("ranks", launch.parse_ranks(text, size=8)[1]),
        "%gang": gang.parse,
        "%shards": data.OPTIONS.parse,
        "%checkpoints": checkpoints.parse,
        "%doctor": doctor.OPTIONS.parse,
        "%logs": history.LOGS.parse,
        "%runs": history.parse_runs,
    }
    if magic.startswith("%%") and name in LAUNCH:
        parse[magic] = functools.partial(launch.parse, name)
    try:
        if magic in parse:
            parse[magic](line)
        elif name not in known_magics():
            yield f"{magic}: there is no such magic"
    except sparkring.errors.OptionsError as error:
        yield str(error)


def wrong_magics(page: Page) -> Iterator[str]:
    for span in page.spans:
        for name in re.findall(r"(?<![\w%])%%?([a-z_]\w*)", span):
            if name not in known_magics() | OTHERS_MAGICS:
                yield f"`{span}`: there is no magic {name}"


def wrong_options(page: Page) -> Iterator[str]:
    for span in page.spans:
        named = re.findall(r"""(?<![\w"'-])--[a-z][a-z-]*""", span)
        if not named or any(f"%{other}" in span for other in OTHERS_MAGICS):
            continue
        found = re.search(r"%%?(\w+)", span)
        if found and found[1] == "run":
            continue  # the words after the path are the script's arguments
        if found:
            known = options_of(found[1])
        elif "sparkring-build-horovod" in span:
            known = build_options()
        else:
            known = set[str]().union(build_options(), *(options_of(magic) for magic in our_magics()))
        yield from (f"`{span}`: there is no option {name}" for name in named if name not in known)


def wrong_names(page: Page) -> Iterator[str]:
    code = [*page.spans, *(fence.text for fence in page.fences if fence.language == "python")]
    for text in code:
        for name in re.findall(r"(?<![\w./-])sparkring(?:\.[A-Za-z_]\w*)+", text):
            if not exists(name):
                yield f"`{text}`: there is no {name}"
        for module, names in re.findall(r"from (sparkring[\w.]*) import ([\w, ]+)", text):
            for name in filter(None, (name.strip() for name in names.split(","))):
                if not exists(f"{module}.{name}"):
                    yield f"`{text}`: there is no {module}.{name}"


def wrong_methods(page: Page) -> Iterator[str]:
    """Yield inline code that begins with a dot, but does not name a method or attribute of a public object."""
    for span in page.spans:
        found = re.match(r"\.(?!venv)([a-z]\w*)\b", span)  # .venv and .venv-current are folders that make creates
        if found and found[1] not in methods() | OTHERS_METHODS and not (ROOT / span).exists():
            yield f"`{span}`: nothing of ours has that"


def wrong_files(page: Page) -> Iterator[str]:
    """Yield inline code that looks like a file or folder of this repository, but does not exist."""
    for span in page.spans:
        looks = re.fullmatch(r"[\w/]+(\.(py|js|css)|/)", span)
        if looks and not any((folder / span).exists() for folder in FOLDERS):
            yield f"`{span}`: there is no such file"


def wrong_commands(page: Page) -> Iterator[str]:
    lines = [*page.spans, *(line for fence in page.fences for line in fence.text.splitlines())]
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    for line in lines:
        for target in re.findall(r"^make ([a-z-]+)", line):
            if target not in targets:
                yield f"`{line}`: the Makefile has no {target}"
        for extras in re.findall(r"pip install '(?:\.|sparkring)\[([^]]+)\]'", line):
            missing = set(extras.split(",")) - set(setup["options.extras_require"])
            yield from (f"`{line}`: there is no extra {name}" for name in sorted(missing))
        for script in re.findall(r"^sparkring-[a-z-]+", line):
            if script not in setup["options.entry_points"]["console_scripts"]:
                yield f"`{line}`: there is no {script}"


def wrong_settings(page: Page) -> Iterator[str]:
    named = re.findall(r"(?:SPARKRING_|spark\.sparkring\.)[\w.]*\w", "\n".join(page.spans))
    of_checks = settings_in((ROOT / "tests" / "plugins" / "gpu_machine.py").read_text(encoding="utf-8"))
    yield from (f"{name}: nothing reads that" for name in named if name not in settings() | of_checks)


def wrong_messages(page: Page) -> Iterator[str]:
    """Yield quoted messages that the code does not contain; `…` stands for anything."""
    for line in re.findall(r"(?m)^> .*", page.path.read_text(encoding="utf-8")):
        for message in re.findall(r"`([^`]+)`", line):
            if not any(is_like(message, text) for text in texts()):
                yield f"`{message}`: the code says no such thing"


CHECKS = (
    wrong_links,
    wrong_code,
    wrong_magics,
    wrong_options,
    wrong_names,
    wrong_methods,
    wrong_files,
    wrong_commands,
    wrong_settings,
)


def complaints(page: Page) -> list[str]:
    return [found for check in CHECKS for found in check(page)]


# ── What is there ─────────────────────────────────────────────────────────────


@functools.cache
def helps() -> dict[str, str]:
    """Return the help of sparkring's magics from the reference, by name."""
    text = REFERENCE.read_text(encoding="utf-8")
    return dict(re.findall(r"(?ms)^### `%%?(\w+)`\n\n```text\n(.*?)^```$", text))


def our_magics() -> set[str]:
    return set(helps())


@functools.cache
def known_magics() -> set[str]:
    owners = [getattr(IPython.core.magics, name) for name in dir(IPython.core.magics) if name.endswith("Magics")]
    return our_magics() | {name for owner in owners for kind in (owner.magics or {}).values() for name in kind}


def options_of(magic: str) -> set[str]:
    """Return the options that a magic takes, according to its parser or, if it has none, its help."""
    if magic in LAUNCH | {"ranks"}:
        return launch.options_table(magic).flags
    return set(re.findall(r"--[a-z][a-z-]*", helps().get(magic, "")))


def build_options() -> set[str]:
    return {name for action in build_horovod.parser()._actions for name in action.option_strings}


def exists(name: str) -> bool:
    """Return whether a dotted name can be imported, or is an attribute of something that can be imported."""
    thing: object = sparkring
    path = "sparkring"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if path == name and part in dir(thing):
            return True  # Petastorm's names are listed, but raise an error on Python 3.13
        if hasattr(thing, part):
            thing = getattr(thing, part)
            continue
        try:
            thing = importlib.import_module(path)
        except ImportError:
            return path == "sparkring.last_result.values"  # there is no last result in this process
    return True


@functools.cache
def methods() -> set[str]:
    """Return the methods and attributes of the objects that notebooks use."""
    found: set[str] = set()
    public = [each for name in sparkring.__all__ if inspect.isclass(each := getattr(sparkring, name))]
    for owner in (*public, Shards, Store, TaskRows, Records, SparkDatasetConverter):
        found |= {*dir(owner), *re.findall(r"self\.(\w+)", inspect.getsource(owner))}
    return found


@functools.cache
def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def settings() -> set[str]:
    """Return the variables and Spark settings that the package reads."""
    return settings_in("\n".join(sources()))


def settings_in(source: str) -> set[str]:
    return set(re.findall(r"""["']((?:SPARKRING_|spark\.sparkring\.)[\w.]*\w)["']""", source))


@functools.cache
def texts() -> list[str]:
    """Return every string in the package, with … instead of inserted values."""
    found = []
    for source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append(" ".join("".join(map(str, parts)).split()))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
    return found


def is_like(message: str, text: str) -> bool:
    """Return whether all parts of a message are in the text, in the same order."""
    at = 0
    for part in message.split("…"):
        at = text.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


# ── Tests ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_wrong_with_a_page(path: Path) -> None:
    assert complaints(read(path)) == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (wrong_links, "[a page](nowhere.md)"),
        (wrong_links, "[`code`](nowhere.md)"),
        (wrong_links, "[a heading](cluster.md#nothing-of-that-name)"),
        (wrong_links, "[here](#nothing-of-that-name)\n\n## Another"),
        (wrong_links, "[outside](../../elsewhere.md)"),
        (wrong_links, '<img src="images/nothing.png">'),
        (wrong_code, "```python\nmodel.fit(\n```"),
        (wrong_code, "```python\n%%horovod -n -2\nmodel.fit(\n```"),
        (wrong_code, "```python\n%%horovod --no-such-option\n1\n```"),
        (wrong_code, "```python\n%%horovod --fresh\n1\n```"),
        (wrong_code, "```python\n%%no_such_magic\n1\n```"),
        (wrong_code, "```python\n%gang begin\n```"),
        (wrong_code, "```python\n%%ranks -n 2\n1\n```"),
        (wrong_magics, "`%horovot`"),
        (wrong_magics, "after `%no_such DIR`"),
        (wrong_options, "`--no-such-option`"),
        (wrong_options, "`%%horovod --idle 3`"),
        (wrong_options, "`%checkpoints DIR --tail 3`"),
        (wrong_options, "`sparkring-build-horovod --uninstall`"),
        (wrong_names, "`sparkring.shard(…)`"),
        (wrong_names, "```python\nsparkring.data.tfrecord.nothing()\n```"),
        (wrong_names, "`from sparkring import shards, shard`"),
        (wrong_names, "`sparkring.data.nothing`"),
        (wrong_methods, "`.as_tensorflow()`"),
        (wrong_files, "`views/nothing.py`"),
        (wrong_files, "`nothing/`"),
        (wrong_commands, "```\nmake nothing   # does nothing\n```"),
        (wrong_commands, "`make nothing`"),
        (wrong_commands, "`pip install '.[spark,nothing]'`"),
        (wrong_commands, "`sparkring-build-nothing --install`"),
        (wrong_settings, "`SPARKRING_NOTHING`"),
        (wrong_settings, "`spark.sparkring.driver.nothing`"),
    ],
)
def test_what_is_wrong_is_noticed(check: Callable[[Page], Iterator[str]], text: str) -> None:
    assert len(list(check(Page(text, DOCS / "page.md")))) == 1


def test_what_is_right_is_let_pass() -> None:
    text = (
        "# Two words\n\n[there](cluster.md#gpus) and [here](#two-words) and [elsewhere](https://example.org/)\n"
        "`%%horovod -n -2 --timeout S`, `%logs RUN --tail 20`, `sparkring.shards(…)`, `.as_tf()`, `make demo`\n"
        "```python\n%%horovod -n -2 --timeout 3\n!ls\nx = 1\n```\n```\n%%horovod is not looked at here\n```\n"
    )
    assert complaints(Page(text, DOCS / "page.md")) == []


def test_messages_are_those_of_the_code(tmp_path: Path) -> None:
    assert not list(wrong_messages(read(TROUBLES)))
    page = tmp_path / "page.md"
    page.write_text(
        "> `needs … task slots…, but there are … in all`\n\n> `needs … task slots, but … in vain`\n", encoding="utf-8"
    )
    assert len(list(wrong_messages(read(page)))) == 1


def test_the_index_names_every_page() -> None:
    linked = {(DOCS / target).resolve() for target in read(DOCS / "README.md").targets}
    assert {path for path in DOCS.rglob("*.md") if path.name != "README.md"} <= linked


def test_the_map_names_every_room() -> None:
    rooms = {
        path.parent.name for folder in (".", "engine", "worker") for path in (PACKAGE / folder).glob("*/__init__.py")
    }
    assert rooms - set(read(DOCS / "how-it-works.md").spans) == set()


def test_every_setting_is_in_the_reference() -> None:
    _, _, told = REFERENCE.read_text(encoding="utf-8").partition("\n## Settings\n")
    assert {name for name in settings() if f"`{name}`" not in told} == set()


def test_the_reference_is_what_the_tool_writes(tmp_path: Path) -> None:
    """If this test fails, run `make docs`."""
    written = tmp_path / "reference.md"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, DOCS / "write_reference.py", written], env=environment, check=True)
    assert REFERENCE.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")
