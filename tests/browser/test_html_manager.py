"""The panel in html-manager, which shows widgets in exported pages, and is the base of what Voilà and others use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

import html_manager
import ipywidgets
import pytest
from ipywidgets.embed import embed_minimal_html
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output
from playwright.sync_api import Browser, expect
from records import NOW, RECORDS
from test_front_ends import messages

from sparkring.views import panel
from sparkring.views.html import bundle

VIEW, STATE = (f"application/vnd.jupyter.widget-{kind}+json" for kind in ("view", "state"))
STATIC = "[data-sparkring-static]"
ERRORS = ".jupyter-widgets-error-widget"
# Opens the models in a new HTMLManager, each with a comm that a test controls. `show(el)` makes a view of the last one.
MANAGER = """async (models) => {
  const load = (name) => new Promise((done, failed) => requirejs([name], (module) => done(module), failed));
  requirejs.config({ paths: { anywidget: "/anywidget@0/dist/index" } });
  const { HTMLManager } = await load("@jupyter-widgets/html-manager");
  window.manager = new HTMLManager({ loader: load });
  window.sent = [];
  let comm;
  for (const [id, state] of models) {
    comm = {
      comm_id: id, target_name: "jupyter.widget", open() {}, close() {},
      on_msg(handler) { this.heard = handler; }, on_close(handler) { this.closed = handler; },
      send(data) { window.sent.push(data.content); return ""; },
    };
    const content = { comm_id: id, data: { state, buffer_paths: [] } };
    await manager.handle_comm_open(comm, { content, metadata: { version: "2.1.0" } });
  }
  window.hear = (content) => comm.heard({ content: { comm_id: comm.comm_id, data: { method: "custom", content } } });
  window.leave = () => comm.closed({ content: {} });
  window.show = async (el) => {
    const view = await manager.create_view(await manager.get_model(comm.comm_id));
    await manager.display_view(view, el);
  };
}"""
LIVE = '<script src="require.min.js"></script><script src="libembed-amd.js"></script>'


@pytest.fixture(scope="session")
def scripts() -> dict[str, bytes]:
    """html-manager and requirejs. Without npm, the tests are skipped, as `make check` skips the panel's checks."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which downloads html-manager, is not on PATH (Debian: apt-get install npm)")
    return html_manager.scripts(npm)


@pytest.fixture
def widgets() -> Iterator[None]:
    """Close all widgets after the test."""
    yield
    ipywidgets.Widget.close_all()


def page_of(name: str, *, own: bool) -> panel.Page:
    """Return the widget of a kernel that has one for all runs, or one of its own for each, after a run."""
    record = RECORDS[name]
    page = panel.Page(record.run_id if own else "")
    page.begin(record, None)
    if own:
        page.snapshot = messages(name, NOW)
    return page


def exported(name: str, page: panel.Page) -> str:
    """Return the page that nbconvert makes of a notebook with a run, and with the state of all widgets."""
    record = RECORDS[name]
    static = bundle(record, now=NOW, final=record.outcome is not None)
    place = {"text/html": f'<div data-sparkring="{record.run_id}" data-page="{page.page}"></div>', "text/plain": ""}
    outputs = [{VIEW: page.get_view_spec(), "text/plain": ""} if page.run else place, static]
    cell = new_code_cell("%%horovod", outputs=[new_output("display_data", data) for data in outputs])
    models = {
        each.model_id: {
            "model_name": each._model_name,
            "model_module": each._model_module,
            "model_module_version": each._model_module_version,
            "state": each.get_state(),
        }
        for each in (page.layout, page)
    }
    state = {STATE: {"version_major": 2, "version_minor": 0, "state": models}}
    found: str = HTMLExporter().from_notebook_node(new_notebook(cells=[cell], metadata={"widgets": state}))[0]
    return found


@pytest.mark.usefixtures("widgets")
def test_a_page_of_ipywidgets(browser: Browser, scripts: dict[str, bytes]) -> None:
    """Who exports all widgets gets the static views, even if the page cannot load the script of anywidget."""
    page_of("finished", own=False)
    page_of("finished", own=True)
    page_of("running", own=True)
    ipywidgets.IntSlider(value=7)
    file = StringIO()
    embed_minimal_html(file, views=None)
    page = html_manager.shown(browser, file.getvalue(), scripts, reaches_anywidget=False)
    expect(page.locator(".widget-readout")).to_have_text("7")
    expect(page.locator(".sr-run .sr-state")).to_have_text(["finished", "running"])
    expect(page.locator(ERRORS)).to_have_count(0)
    for_all = page.locator(".widget-subarea").first
    assert (for_all.inner_text(), for_all.bounding_box()["height"] < 5) == ("", True)  # type: ignore[index]
    page.close()


@pytest.mark.usefixtures("widgets")
@pytest.mark.parametrize("reached", [False, True], ids=["without anywidget", "with anywidget"])
def test_a_page_of_nbconvert(browser: Browser, scripts: dict[str, bytes], reached: bool) -> None:
    """The notebook of a killed kernel shows the static view. Its widget finds nothing to show."""
    html = exported("running", page_of("running", own=False))
    page = html_manager.shown(browser, html, scripts, reaches_anywidget=reached)
    page.wait_for_function("window.sparkringPages?.size === 1" if reached else "window.requirejs")
    expect(page.locator(f"{STATIC} .sr-state")).to_be_visible()
    expect(page.locator(".sr-panel")).to_have_count(0)
    expect(page.locator(ERRORS)).to_have_count(0)
    page.close()


@pytest.mark.usefixtures("widgets")
def test_a_page_of_nbconvert_where_each_run_has_a_widget(browser: Browser, scripts: dict[str, bytes]) -> None:
    """The panel replaces the static view. If a page cannot load the script of anywidget, it shows the static view."""
    html = exported("running", page_of("running", own=True))
    page = html_manager.shown(browser, html, scripts)
    expect(page.locator(".sr-panel .sr-state")).to_have_text("ended with the kernel")
    expect(page.locator(f"{STATIC} .sr-state")).to_be_hidden()
    page.close()
    page = html_manager.shown(browser, html, scripts, reaches_anywidget=False)
    expect(page.locator(ERRORS)).to_have_count(1)  # html-manager's own
    expect(page.locator(f"{STATIC} .sr-state")).to_be_visible()
    page.close()


def opened(page: panel.Page) -> list[list[Any]]:
    return [[each.model_id, each.get_state()] for each in (page.layout, page)]


@pytest.mark.usefixtures("widgets")
def test_views_of_a_live_model(browser: Browser, scripts: dict[str, bytes]) -> None:
    """Two views show the same run, the second starts full, and both learn that the kernel is gone."""
    page = html_manager.shown(browser, f"{LIVE}<div id='first'></div><div id='second'></div>", scripts)
    page.evaluate(MANAGER, opened(page_of("running", own=True)))
    page.evaluate("show(first)")
    for message in messages("running"):
        page.evaluate("(message) => hear(message)", message)
    page.evaluate("show(second)")
    expect(page.locator(".sr-state")).to_have_text(["running", "running"])
    expect(page.locator("#second .sr-tab-overview .sr-row").last).to_contain_text("a message to the notebook")
    expect(page.locator("#second .sr-tab-overview canvas")).to_have_count(2)
    assert {message["kind"] for message in page.evaluate("sent")} == {"hello"}
    page.evaluate("manager.disconnect()")
    expect(page.locator(".sr-state")).to_have_text(["ended with the kernel"] * 2)
    page.close()


@pytest.mark.usefixtures("widgets")
def test_a_live_model_for_all_runs(browser: Browser, scripts: dict[str, bytes]) -> None:
    """The panel appears in the run's element, and the static view returns when the model is closed."""
    widget, run = page_of("running", own=False), RECORDS["running"].run_id
    static = bundle(RECORDS["running"], now=time.time(), final=False)["text/html"]
    place = f"<div data-sparkring='{run}' data-page='{widget.page}'></div>"
    page = html_manager.shown(browser, f"{LIVE}{place}{static}", scripts)
    page.evaluate(MANAGER, opened(widget))
    page.wait_for_function("sent.length")
    assert page.evaluate("sent[0]") == {"kind": "hello", "run": run}
    for message in messages("running"):
        page.evaluate("(message) => hear(message)", message)
    expect(page.locator(".sr-panel .sr-state")).to_have_text("running")
    expect(page.locator(f"{STATIC} .sr-state")).to_be_hidden()
    page.evaluate("leave()")
    expect(page.locator(".sr-panel")).to_have_count(0)
    expect(page.locator(f"{STATIC} .sr-state")).to_be_visible()
    page.close()
