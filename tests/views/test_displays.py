"""Tests how the notebook shows the ranks' displays."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sparkring.engine.run.recorder import Recorder
from sparkring.history import run_store
from sparkring.history.events import AttemptEnded, AttemptStarted, Displayed, RankStarted, RunFinished
from sparkring.history.events import RunStarted as Started
from sparkring.history.record import RunRecord, apply
from sparkring.runtime.report import DISPLAY_BYTES, DISPLAYS_KEPT
from sparkring.views import displays
from sparkring.views.foreign import body_html
from sparkring.views.terminal import TerminalView

sys.path.append(str(Path(__file__).parents[1] / "browser"))
from hostile import PAYLOADS

PNG = b"\x89PNG\r\n\x1a\n..."


def shown(rank: int, number: int, data: bytes = PNG, mime_type: Any = "image/png", **fields: Any) -> Displayed:
    return Displayed(number, mime_type, data, "<Figure>", len(data), **fields, time=1_700_000_002.0, rank=rank)


def tags(record: RunRecord) -> list[str]:
    """Return the labels in front of the displays."""
    found = displays.bundle(record)
    return [] if found is None else re.findall(r"<b>\[([^]]*)]</b>", found["text/html"])


def test_equal_displays_are_shown_once(replayed: Callable[..., RunRecord]) -> None:
    each = [shown(rank, number, data) for number, data in ((1, b"a"), (2, b"b")) for rank in (2, 0, 1, 3)]
    record = replayed(*each, shown(1, 3, b"c"), shown(1, 4, b"e"), shown(3, 3, b"d"), shown(3, 4, b"e"), size=4)
    assert tags(record) == ["ranks 0–3", "ranks 0–3", "rank 1", "rank 3", "ranks 1, 3"]
    found = displays.bundle(record)
    assert found is not None
    assert found["text/plain"].splitlines()[0] == "[ranks 0–3] <Figure>"
    assert tags(replayed(*each, size=4, logs="rank0")) == ["rank 0", "rank 0"]
    assert displays.bundle(replayed(*each, size=4, logs="callbacks")) is None
    printed = io.StringIO()
    TerminalView(printed).close(apply(record, RunFinished(1_700_000_009.0, "finished")))
    assert "sparkring: 5 outputs: /runs/a1b2/displays\n" in printed.getvalue()


@pytest.mark.parametrize(
    ("mime_type", "data", "text", "expected"),
    [
        (
            "text/html",
            b"<h2>a &lt; b</h2>\n<p>c</p><script>x</script>",
            "<IPython.core.display.HTML object>",
            "a < b c",
        ),
        (
            "text/html",
            b"<script>x</script>",
            "<IPython.core.display.HTML object>",
            "<IPython.core.display.HTML object>",
        ),
        ("text/html", b"<table><td>1</table>", "   a\n0  1", "a"),
        ("text/html", b"<b>done</b>", "<HTML>", "done"),
        ("text/markdown", b"**bold**", "<IPython.core.display.Markdown object>", "**bold**"),
        ("image/png", PNG, "<Figure size 640x480 with 1 Axes: loss>", "<Figure size 640x480 with 1 Axes: loss>"),
    ],
)
def test_the_text_of_a_display_is_its_content(
    replayed: Callable[..., RunRecord], mime_type: Any, data: bytes, text: str, expected: str
) -> None:
    display = Displayed(1, mime_type, data, text, len(data), time=1_700_000_002.0, rank=0)
    found = displays.bundle(replayed(display))
    assert found is not None
    assert found["text/plain"] == f"[rank 0] {expected}"


def test_updates_and_cleared_displays(replayed: Callable[..., RunRecord]) -> None:
    """An update replaces one display of its rank and attempt. A display that clears replaces all displays of a rank."""
    record = replayed(shown(0, 1, b"a"), shown(1, 1, b"x"), shown(0, 2, b"b"), shown(0, 1, b"c"))
    assert [(each.rank, each.data) for each in record.displays] == [(0, b"c"), (1, b"x"), (0, b"b")]
    assert [each.data for each in apply(record, shown(0, 3, b"d", clears=True)).displays] == [b"x", b"d"]
    assert len(apply(record, shown(0, 1, b"e", attempt=2)).displays) == 4


def test_a_rank_that_shows_too_much(
    replayed: Callable[..., RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Displays that exceed a rank's limits are only counted. The others are saved in the run's folder."""
    monkeypatch.setenv("SPARKRING_HOME", str(tmp_path))
    started = Started(1_700_000_000.0, "2026-11-20_14-03-22_a1b2", "t", "%%plain\n", 2, "local", "plain", "all")

    class View:
        def refresh(self, record: RunRecord) -> None: ...
        def close(self, record: RunRecord) -> None: ...

    recorder = Recorder(View(), started)
    recorder.add([AttemptStarted(1_700_000_000.5, 1, 2), *(RankStarted(1_700_000_001.0, at, "a", 1) for at in (0, 1))])
    recorder.add(shown(0, number) for number in range(1, DISPLAYS_KEPT + 4))
    recorder.add([shown(1, 1, b"x" * DISPLAY_BYTES), shown(1, 2), shown(1, 1, b"y")])
    record = recorder.record
    assert [rank.displays_left_out for rank in record.ranks] == [3, 1]
    assert [each.data for each in record.displays if each.rank == 1] == [b"y"]
    bundle = displays.bundle(record)
    assert bundle is not None
    assert f"3 outputs of rank 0 left out: at most {DISPLAYS_KEPT}" in bundle["text/html"]

    recorder.add([AttemptEnded(1_700_000_003.0, 1, "lost"), AttemptStarted(1_700_000_004.0, 2, 2), shown(1, 1, b"z")])
    record = recorder.close("finished")
    folder = Path(record.log_folder)
    assert len(list((folder / run_store.DISPLAYS).iterdir())) == DISPLAYS_KEPT + 2
    assert (folder / run_store.DISPLAYS / "attempt-2-rank-1-1.png").read_bytes() == b"z"
    again = run_store.load(folder)
    assert [each.data for each in again.displays] == [each.data for each in record.displays]


def test_an_output_has_an_end(replayed: Callable[..., RunRecord]) -> None:
    """Displays that do not fit into the notebook are counted, and their folder is named."""
    large = displays.OUTPUT_BYTES // 3
    record = replayed(*(shown(rank, 1, bytes([rank]) * large) for rank in range(4)), size=4)
    found = displays.bundle(record)
    assert found is not None
    assert len(found["text/html"]) < displays.OUTPUT_BYTES + 1_000
    assert tags(record) == ["rank 0", "rank 1"]
    assert "2 more outputs: /runs/a1b2/displays" in found["text/html"]


class Odd(HTMLParser):
    """Collects the elements and attributes that HTML from a rank must not have."""

    TAGS = frozenset(
        (
            "script",
            "style",
            "iframe",
            "object",
            "embed",
            "svg",
            "math",
            "form",
            "input",
            "button",
            "link",
            "meta",
            "base",
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = (value or "").lower()
            if (
                name.startswith(("on", "data-"))
                or name in ("id", "class", "name", "srcdoc", "action", "formaction", "srcset", "background")
                or (name == "src" and not text.startswith("data:image/"))
                or (name == "href" and not text.startswith(("http:", "https:", "mailto:")))
                or (name == "style" and ("url" in text or "expression" in text or "position" in text))
            ):
                self.found.append(f"{tag} {name}={value}")
        if tag in self.TAGS:
            self.found.append(tag)


ATTEMPTS = (
    '<div data-commandlinker-command="x" class="sr-run" id="a">b</div>',
    '<img src="https://example.org/x.png">',
    '<img src="data:text/html,<script>x</script>">',
    '<p style="background:url(https://example.org);color:red;position:fixed">b</p>',
    '<a href="data:text/html,x">b</a>',
    '<table background="https://example.org/x.png"><tr><td>b</td></tr></table>',
)


@pytest.mark.parametrize("mime_type", ["text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png"])
def test_nothing_of_it_can_do_anything(mime_type: Any) -> None:
    for said in (*PAYLOADS, *ATTEMPTS):
        odd = Odd()
        odd.feed(body_html(shown(0, 1, said.encode("utf-8", "replace"), mime_type)))
        assert odd.found == [], said


def test_what_is_harmless_stays() -> None:
    table = '<table border="1"><tbody><tr><th>a</th><td style="color:red">1</td></tr></tbody></table>'
    written = "<style scoped>td {}</style>" + table.replace("<tr>", '<tr class="dataframe">')
    assert body_html(shown(0, 1, written.encode(), "text/html")) == table
    markdown = b"# Title\n\n| a |\n|---|\n| **b** |\n\n[c](https://example.org) ![d](data:image/png;base64,AAAA)"
    found = body_html(shown(0, 1, markdown, "text/markdown"))
    assert "<h1>Title</h1>" in found
    assert "<td><strong>b</strong></td>" in found
    assert '<a href="https://example.org" rel="noopener noreferrer">c</a>' in found
    assert 'src="data:image/png;base64,AAAA"' in found
    # For a widget or a script, only the text form is shown.
    assert body_html(shown(0, 1, b"<div></div><script>draw()</script>", "text/html")) == "<pre>&lt;Figure&gt;</pre>"
