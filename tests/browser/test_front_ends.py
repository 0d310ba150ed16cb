"""The panel in front ends that cannot run here, such as Colab: a page does with the widget what they do.

A fake model has the widget's traits and passes on messages, as ipywidgets does. The messages are those that a kernel
sends for the records of records.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import axe
from playwright.sync_api import Browser, Frame, Page, expect
from records import NOW, RECORDS

from sparkring import views
from sparkring.history.record import RunRecord
from sparkring.views.live import whole
from sparkring.views.panel import KEPT

BUNDLE = Path(views.__file__).parent / "panel"
SCRIPT, STYLE = (BUNDLE / f"panel.bundle.{kind}" for kind in ("js", "css"))
# Makes a fake model in the page, and passes it to the widget's script. `view(el)` makes a view, and `leave()`
# removes it, as a front end does.
MODEL = """async ([script, traits]) => {
  const handlers = new Map();
  const model = {
    get: (name) => traits[name],
    on: (name, handler) => handlers.set(name, handler),
    off: () => {},
    send: (message) => { window.sent.push(message); },
  };
  window.sent = [];
  const { default: widget } = await import(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  widget.initialize({ model });
  window.hear = (message) => handlers.get("msg:custom")(message);
  window.view = (el) => { window.leave = widget.render({ model, el }); };
}"""


def messages(name: str, now: float | None = None) -> list[dict[str, Any]]:
    """Return all messages about a record, as they arrive in the page. They are sent at the time `now`, or right now."""
    record: RunRecord = RECORDS[name]
    found: list[dict[str, Any]] = json.loads(json.dumps(whole(record, time.time() if now is None else now)))
    return found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    found = browser.new_page()
    found.on("pageerror", lambda error: pytest.fail(str(error)))
    yield found
    found.close()


def begin(frame: Page | Frame, name: str, **traits: Any) -> None:
    """Load the widget's script into a page or frame, with a model of the run's own."""
    run = RECORDS[name].run_id
    style = STYLE.read_text(encoding="utf-8")
    if isinstance(frame, Page):
        frame.set_content(f"<style>{style}</style><div id='cell'></div>")
    else:
        frame.evaluate(
            "(style) => { document.body.innerHTML = `<style>${style}</style><div id='cell'></div>`; }", style
        )
    traits = {"page": "p", "run": run, "snapshot": [], "_css": style, **traits}
    frame.evaluate(MODEL, [SCRIPT.read_text(encoding="utf-8"), traits])


def redraw(page: Page) -> None:
    """Change a section. Elements inside keep the focus and their scrolling, and text stays while it is selected."""
    page.get_by_role("tab", name="Code").click()
    body, box = page.locator(".sr-tab-code"), page.locator(".sr-tab-code [role=group]")
    change = """([run, html]) => window.hear({ kind: "sections", run, html: { code: html } })"""
    lines = "<br>".join(map(str, range(100)))
    code = f"<details><summary>more</summary><div class='sr-scroll' role='group' tabindex='0'>{lines}</div></details>"
    page.evaluate(change, [RECORDS["running"].run_id, f"<p>one</p>{code}"])
    expect(body).to_contain_text("one")
    body.locator("summary").click()
    box.focus()
    box.evaluate("(box) => { box.scrollTop = 120; }")
    page.evaluate(change, [RECORDS["running"].run_id, f"<p>two</p>{code}"])
    expect(body).to_contain_text("two")
    expect(box).to_be_focused()
    assert box.evaluate("(box) => box.scrollTop") == 120
    body.locator("p").evaluate("(text) => getSelection().selectAllChildren(text)")
    page.evaluate(change, [RECORDS["running"].run_id, f"<p>three</p>{code}"])
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("String(getSelection())") == "two"
    page.evaluate("getSelection().removeAllRanges()")
    expect(body).to_contain_text("three")


def test_a_view_that_comes_late_starts_full(page: Page) -> None:
    """The snapshot has everything. Later messages update the view, and a view that is made again shows the same."""
    begin(page, "running", snapshot=messages("running"))
    page.evaluate("window.view(document.querySelector('#cell'))")
    expect(page.locator(".sr-state")).to_have_text("running")
    expect(page.locator(".sr-tab-overview .sr-row").last).to_contain_text("a message to the notebook")
    expect(page.locator(".sr-tab-overview canvas")).to_have_count(2)
    redraw(page)
    page.evaluate("window.leave()")
    expect(page.locator(".sr-panel")).to_have_count(0)
    for message in messages("finished"):
        page.evaluate("(message) => window.hear(message)", message)
    page.evaluate("window.view(document.querySelector('#cell'))")
    expect(page.locator(".sr-state")).to_have_text("finished")


def test_a_view_in_a_shadow_root_has_its_style(page: Page) -> None:
    begin(page, "finished", snapshot=messages("finished"))
    page.evaluate(
        """() => {
          const inside = document.createElement("div");
          document.querySelector("#cell").attachShadow({ mode: "open" }).append(inside);
          window.view(inside);
        }"""
    )
    state = page.locator(".sr-state")  # Playwright looks into shadow roots
    expect(state).to_have_text("finished")
    expect(state).to_have_css("background-color", "rgb(29, 127, 75)")


def test_an_output_that_is_scrolled_out_of_sight_and_back(page: Page) -> None:
    """A notebook takes distant outputs out of the page. When they come back, they show what has come since.

    Panels whose outputs stay away are removed, and the page keeps as many ended runs without panels as the kernel.
    """
    begin(page, "running", run="")
    place = """(run) => { cell.innerHTML = `<div data-sparkring="${run}" data-page="p"></div>`; }"""
    page.evaluate(place, RECORDS["running"].run_id)
    lines, *others = messages("running")
    # New lines may arrive before the answer to `hello`, which has the earlier lines.
    last = {name: lines[name][-1:] for name in ("rank", "stream", "time", "text")}
    early = {**lines, **last, "start": lines["count"] - 1, "count": 1, "line": [0], "noise": [], "html": {}}
    for message in (*others, early):
        page.evaluate("(message) => window.hear(message)", message)
    expect(page.locator(".sr-state")).to_have_text("running")
    gap = page.locator(".sr-tab-overview .sr-row", has_text="more lines, which are in the log files")
    expect(gap).to_be_visible()
    page.evaluate("(message) => window.hear(message)", lines)
    expect(gap).to_have_count(0)
    expect(page.locator(".sr-tab-overview .sr-row", has_text=last["text"][0])).to_have_count(1)
    page.evaluate("() => { window.away = cell.firstChild; window.away.remove(); }")
    expect(page.locator(".sr-panel")).to_have_count(0)
    for message in messages("finished"):
        page.evaluate("(message) => window.hear(message)", {**message, "run": RECORDS["running"].run_id})
    page.evaluate("() => cell.append(window.away)")
    expect(page.locator(".sr-state")).to_have_text("finished")
    expect(page.locator(".sr-panel")).to_have_count(1)

    panels = "window.away.querySelectorAll('.sr-panel').length"
    state = {**messages("finished")[-1], "run": RECORDS["running"].run_id}
    page.evaluate("(state) => { window.away.remove(); window.hear(state); }", state)
    assert page.evaluate(panels) == 1
    page.evaluate("() => { const { now } = Date; Date.now = () => now() + 70_000; }")
    page.evaluate("(state) => window.hear(state)", state)
    assert page.evaluate(panels) == 0
    page.evaluate("() => cell.append(window.away)")
    expect(page.locator(".sr-state")).to_have_text("finished")
    each = "(state) => { for (let at = 0; at < 30; at++) window.hear({ ...state, run: `run ${at}` }); }"
    page.evaluate(each, state)
    assert page.evaluate("window.sparkringPages.get('p').runs.size") == KEPT + 1
    sent = "() => window.sent.filter(({ run }) => run === 'run 0').length"
    page.evaluate(place, "run 0")
    page.wait_for_function(f"({sent})() === 1")


def test_forced_colours_keep_what_only_colours_show(browser: Browser) -> None:
    """In high contrast, the browser removes backgrounds, and puts its own colours on <mark>."""
    pages = {
        name: browser.new_page(color_scheme="dark", forced_colors="active") for name in ("many", "failed", "running")
    }
    for name, page in pages.items():
        begin(page, name, snapshot=messages(name))
        page.evaluate("window.view(document.querySelector('#cell'))")
        expect(page.locator(".sr-state")).to_be_visible()
    shades = "(all) => new Set(all.map((each) => getComputedStyle(each).backgroundColor)).size"
    expect(pages["many"].locator(".sr-many button").last).to_be_attached()
    assert pages["many"].locator(".sr-many button").evaluate_all(shades) == 2
    color = pages["failed"].locator(".sr-why mark").evaluate("(mark) => getComputedStyle(mark).color")
    assert color == "rgb(255, 255, 255)"
    assert pages["running"].locator(".sr-lanebar, .sr-lanebar span").evaluate_all(shades) == 2
    widths = "(all) => all.map((each) => getComputedStyle(each).borderBottomWidth)"
    assert sorted(pages["running"].get_by_role("tab").evaluate_all(widths))[-2:] == ["0px", "2px"]
    for page in pages.values():
        page.close()


def test_each_frame_shows_only_its_own_run(page: Page) -> None:
    """Colab has a frame and a widget manager for each cell, so a message reaches only the frame of its widget."""
    page.set_content("<iframe srcdoc='<body></body>'></iframe><iframe srcdoc='<body></body>'></iframe>")
    first, second = page.frames[1:]
    for frame, name in ((first, "failed"), (second, "restarted")):
        begin(frame, name)
        frame.evaluate("window.view(document.querySelector('#cell'))")
        expect(frame.locator(".sr-panel")).to_have_count(0)  # nothing is known yet
    for message in messages("failed"):
        first.evaluate("(message) => window.hear(message)", message)
    expect(first.locator(".sr-state")).to_have_text("failed")
    expect(second.locator(".sr-panel")).to_have_count(0)


@pytest.mark.parametrize("now", [NOW, None], ids=["saved long ago", "saved just now"])
def test_a_saved_notebook_shows_the_state_as_of_when_it_was_saved(page: Page, now: float | None) -> None:
    """No kernel sends anything, so a run that was running is not shown as if it were running now."""
    begin(page, "running", snapshot=messages("running", now))
    page.evaluate("window.view(document.querySelector('#cell'))")
    expect(page.locator(".sr-state")).to_have_text("ended with the kernel")
    expect(page.locator(".sr-head")).to_contain_text("as of")
    assert not page.get_by_role("button", name="■ Stop").is_visible()


@pytest.mark.parametrize(
    "name",
    [
        "running",
        "failed",
        *(pytest.param(name, marks=pytest.mark.extended("appearance", "failed")) for name in ("restarted", "many")),
    ],
)
def test_axe_finds_nothing(page: Page, name: str) -> None:
    begin(page, name, snapshot=messages(name))
    page.evaluate("window.view(document.querySelector('#cell'))")
    expect(page.locator(".sr-panel")).to_be_visible()
    assert axe(page, ".sr-panel") == []


def test_what_a_rank_asks_can_be_answered(page: Page) -> None:
    """While the kernel asks itself, there is no field. Each question is answered once, and keys stay in the field.

    After a restart, the requests of a rank have the same numbers again.
    """
    begin(page, "running")
    page.evaluate("window.view(document.querySelector('#cell'))")
    *others, state = messages("running")
    asks = [
        {"rank": rank, "number": 7, "time": 1.5, "prompt": f"name of <b>{rank}</b>?", "hidden": rank == 3}
        for rank in (2, 3)
    ]
    for message in (*others, {**state, "asks": asks}):
        page.evaluate("(message) => window.hear(message)", message)
    expect(page.locator(".sr-prompt")).to_have_text("2 ranks ask (answer in the field below)")
    field = page.locator(".sr-answer input")
    expect(field).to_be_hidden()
    heard = {"run": state["run"], "kind": "heard", "known": True, "stops": True, "answers": True}
    page.evaluate("(message) => window.hear(message)", heard)
    expect(page.locator(".sr-prompt")).to_have_text("rank 2 asks (1 more waiting): name of <b>2</b>?")
    field.fill("Ann")
    field.press("Enter")
    expect(field).to_have_attribute("type", "password")
    assert axe(page, ".sr-panel") == []
    field.fill("secret")
    page.get_by_role("button", name="send").click()
    expect(page.locator(".sr-asks")).to_be_hidden()
    answers = [each for each in page.evaluate("window.sent") if each["kind"] == "answer"]
    assert [(each["rank"], each["number"], each["text"]) for each in answers] == [(2, 7, "Ann"), (3, 7, "secret")]
    page.evaluate("(message) => window.hear(message)", {**state, "asks": [{**asks[0], "time": 9.5}]})
    expect(field).to_be_visible()
    expect(field).to_have_value("")


def test_the_end_is_told_to_those_who_look_elsewhere(page: Page) -> None:
    """The tab's title says how the run ended until the user looks at it; --notify shows a notification, too."""
    begin(page, "running", snapshot=messages("running"))
    page.evaluate(
        """() => {
          document.title = "notebook";
          window.view(document.querySelector("#cell"));
          Object.defineProperty(document, "hidden", { get: () => window.away });
          window.away = true;
          window.shown = [];
          window.Notification = function (title, { body }) { window.shown.push([title, body]); };
          Notification.permission = "granted";
        }"""
    )
    for message in messages("failed"):
        page.evaluate("(message) => window.hear(message)", {**message, "notify": True})
    assert page.title() == "training: failed – notebook"
    [(title, body)] = page.evaluate("window.shown")
    assert (title, body.startswith("1 min")) == ("training: failed", True)
    page.evaluate("() => { window.away = false; document.dispatchEvent(new Event('visibilitychange')); }")
    assert page.title() == "notebook"
