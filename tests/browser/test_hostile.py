"""Ranks' output, metrics and names are shown as text, whatever they contain, in the panel and in all saved views.

HTML that ranks display stays HTML, but everything active is removed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbconvert
import pytest
from hostile import PAYLOADS, RAW, SENTINEL
from lab import Notebook, Opened
from playwright.sync_api import Locator, expect

from sparkring.history.lines import plain

SETUP = """%load_ext sparkring
import sys
sys.path.append({folder!r})
from hostile import PAYLOADS, RAW
"""
# A real rank prints all of the strings, and displays some of them.
PRINTED = """%%horovod -n -1 --name '<img src=x onerror="alert(1)">'
import sys
for said in PAYLOADS:
    print(said)
for said in RAW:
    sys.stdout.buffer.write(said + b"\\n")
for said in PAYLOADS[:DISPLAYED]:
    displayHTML(said)
import matplotlib.pyplot as plt
plt.plot([1, 2])
plt.show()
"""
DISPLAYED = 20
# A run that has a hostile string in every other field that can contain a user's text.
EVERYWHERE = """from sparkring.history.events import *
from sparkring.history.record import RunRecord, replay
from sparkring.views import open_view

def show(at, said, live):
    now = 1_700_000_000.0
    record = replay([
        RunStarted(now, f"2026-11-20_14-03-22_{at:04}", said, f"%%horovod -n -2\\n{said}", 2, "local", said, "all",
                   checkpoint_dir=said),
        *(RankStarted(now, rank, said, 4000 + rank) for rank in range(2)),
        *(Metrics({said: step + rank, said + "2": 2.0}, step=step, epoch=1, time=now + 1, rank=rank)
          for step in (1, 2, 3) for rank in range(2)),
        UserMessage(said, time=now + 2),
        *(Displayed(at, form, said.encode("utf-8", "replace"), said, time=now + 2, rank=rank) for rank in range(2)
          for at, form in enumerate(("text/html", "text/markdown", "text/latex", "image/svg+xml"))),
        Notice(now + 2, f"the file {said} is not there"),
        GpuUsed(said, said, 1, 2, 50, time=now + 2),
        DataOpened(0, said, "parquet", (said,), said, said, 1, 1, 1, 1, 1, time=now + 2),
        DataRead(0, 1, 1, 1, 1, place=said, time=now + 3),
        CheckpointSaved(said, said, 1, 1, metrics={said: 1.0}, best=True, time=now + 3),
        CheckpointDamaged(said, said, 1, said, time=now + 3),
        RankFailed(now + 4, 0, Failure("exception", said, (CodeFrame(said, 1, said, True, (SourceLine(1, said),)),),
                                       said, said)),
        *([] if live else [RunFinished(now + 5, "failed", said, 0)]),
    ], RunRecord(log_folder=f"/runs/{said}"))
    view = open_view()
    view.refresh(record)
    return view, record

"""
# Each run gets several strings, since JupyterLab shows only 50 outputs of a cell, and each run has three outputs.
TOGETHER = 18
JOINED = f"""{EVERYWHERE}
views = [show(at, ' '.join(PAYLOADS[at : at + {TOGETHER}]), True) for at in range(0, len(PAYLOADS), {TOGETHER})]
"""
CLOSED = "for view, record in views: view.close(replay([RunFinished(1_700_000_005.0, 'failed', 'ended', 0)], record))"
AT_PRINTED, AT_JOINED, AT_CLOSED = 1, 2, 3

FOREIGN = """(root) => [...root.querySelectorAll('*:not(.sr-shown *)')].filter((element) =>
  !['DIV', 'SPAN', 'B', 'I', 'SMALL', 'BUTTON', 'INPUT', 'PRE', 'MARK', 'DETAILS', 'SUMMARY', 'TABLE', 'CAPTION',
    'THEAD', 'TBODY', 'TR', 'TH', 'TD', 'FIGURE', 'FIGCAPTION', 'UL', 'LI', 'CODE', 'P', 'STYLE', 'svg', 'g', 'path',
    'polyline', 'polygon', 'rect', 'line', 'circle', 'text', 'title', 'IMG', 'CANVAS', 'LABEL', 'SELECT', 'DL', 'DT',
    'DD', 'OPTION'].includes(element.tagName)
  || (element.tagName === 'IMG' && !/^data:image\\/(svg\\+xml|png);base64,/.test(element.src))
  || (element.tagName === 'STYLE' && !element.parentElement.matches('.sr-run'))
  || (element.tagName === 'INPUT' && !['search', 'range'].includes(element.type) && !element.closest('.sr-answer'))
  || [...element.attributes].some((each) => each.name.startsWith('on') || /url\\(|javascript:/.test(
       each.name === 'style' || each.name === 'href' || each.name === 'src' ? each.value : ''))
).map((element) => element.outerHTML.slice(0, 200))"""

# `target` is allowed, since JupyterLab itself makes links open in another tab.
HARMFUL = """(root) => [...root.querySelectorAll('*')].filter((element) =>
  ['SCRIPT', 'STYLE', 'IFRAME', 'OBJECT', 'EMBED', 'FORM', 'INPUT', 'BUTTON', 'LINK', 'META', 'BASE', 'svg', 'math']
    .includes(element.tagName)
  || [...element.attributes].some(({ name, value }) => /^(on|data-)|^(id|class|name|srcset)$/.test(name)
       || (name === 'src' && !value.startsWith('data:image/'))
       || (name === 'href' && !/^(https?|mailto):/.test(value))
       || (name === 'style' && /url|position|expression/.test(value)))
).map((element) => element.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def notebook(opened: Opened) -> Notebook:
    setup = SETUP.format(folder=str(Path(__file__).parent)) + f"DISPLAYED = {DISPLAYED}"
    found = opened("hostile", setup, PRINTED, JOINED, CLOSED)
    found.run(0, wait=True)
    return found


def test_printed_by_a_rank(notebook: Notebook) -> None:
    notebook.run(AT_PRINTED, wait=True)
    panel = notebook.panel(AT_PRINTED)
    expect(panel.locator(".sr-state")).to_have_text("finished")
    expect(panel.locator(".sr-title")).to_have_text('<img src=x onerror="alert(1)">')
    seen = all_rows(panel)
    assert len(PAYLOADS) >= 200
    assert seen[: len(PAYLOADS)] == [plain(said) for said in PAYLOADS]
    assert len(seen) == len(PAYLOADS) + len(RAW) + DISPLAYED + 1
    assert panel.evaluate(FOREIGN) == []
    displays = notebook.page.locator("[data-sparkring-displays]")
    expect(displays).to_be_visible()  # although the static view is hidden while the panel is live
    expect(displays.get_by_alt_text("<Figure size 640x480 with 1 Axes>")).to_be_visible()
    assert displays.evaluate(HARMFUL) == []


def all_rows(panel: Locator) -> list[str]:
    """Scroll the box to its end, and return the text of each line. A line with unexpected elements is marked."""
    found: dict[int, str] = panel.evaluate(
        """async (panel) => {
          const box = panel.querySelector('.sr-lines'), found = {};
          const frame = () => new Promise(requestAnimationFrame);
          for (let top = 0; top <= box.scrollHeight; top += 150) {
            box.scrollTop = top;
            await frame();
            await frame();
            for (const row of box.querySelectorAll('.sr-row')) {
              const said = row.querySelector('.sr-said');
              const odd = [...said.querySelectorAll('*')].filter((each) => each.tagName !== 'SPAN'
                || [...each.attributes].some(({ name }) => name !== 'style'));
              found[row.dataset.line] = odd.length ? `NO TEXT: ${odd[0].outerHTML}` : said.textContent;
            }
          }
          return found;
        }"""
    )
    return [found[at] for at in sorted(found, key=int)]


def test_everywhere_else(notebook: Notebook) -> None:
    notebook.run(AT_JOINED, wait=True)
    panels = notebook.panel(AT_JOINED)
    expect(panels.last).to_be_visible()
    assert panels.count() >= len(PAYLOADS) // TOGETHER
    for panel in panels.all():
        for tab in panel.get_by_role("tab").all():
            if tab.is_visible() and tab.get_attribute("aria-disabled") == "false":
                tab.click()
        tile = panel.locator(".sr-tiles button").first
        assert "§" in (tile.get_attribute("title") or "")
    for panel in panels.all():
        assert panel.evaluate(FOREIGN) == []
        for shown in panel.locator(".sr-shown").all():
            assert shown.evaluate(HARMFUL) == []
    displays = notebook.page.locator("[data-sparkring-displays]")
    assert displays.count() > len(PAYLOADS) // TOGETHER
    for display in displays.all():
        assert display.evaluate(HARMFUL) == []


def test_what_stays(notebook: Notebook, opened: Opened) -> None:
    notebook.run(AT_CLOSED, wait=True)
    kept = notebook.save()
    # The closing cell's views are shown below the cell that opened them, or below the closing cell.
    statics = notebook.page.locator("[data-sparkring-static]")
    assert statics.count() > len(PAYLOADS) // TOGETHER
    for static in statics.all():
        assert static.evaluate(FOREIGN) == []

    body, _ = nbconvert.HTMLExporter().from_notebook_node(kept)
    page = notebook.lab.folder / "hostile.html"
    page.write_text(body, encoding="utf-8")
    shown = opened.page()
    shown.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
    shown.goto(page.as_uri())
    converted = shown.locator("[data-sparkring-static]")
    assert converted.count() >= len(PAYLOADS) // TOGETHER
    said = "\n".join(converted.all_text_contents())
    for at in range(len(PAYLOADS)):
        assert f"§{at}§" in said
    for static in converted.all():
        assert static.evaluate(FOREIGN) == []
    displays = shown.locator("[data-sparkring-displays]")
    assert displays.count() > len(PAYLOADS) // TOGETHER
    for display in displays.all():
        assert display.evaluate(HARMFUL) == []


@pytest.fixture(scope="module", autouse=True)
def nothing_happened(opened: Opened) -> Iterator[Any]:
    """Check at the end that none of the strings has opened a dialog or made a request."""
    yield
    assert opened.errors == []
    assert [url for url in opened.requests if SENTINEL in url] == []
