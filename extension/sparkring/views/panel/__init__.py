"""The live panel. One widget per kernel sends the updates of all runs to the page, where the code in src/ draws them.

Without a kernel, the notebook would show an error instead of a widget's view. Therefore, the output of a cell is only
HTML: an empty element, and the static view below it. While there is a kernel, the widget's script puts the live panel
into the element and hides the static view. A notebook that is saved, exported or reopened shows the static view.
"""

from __future__ import annotations

import contextvars
import functools
import queue
import secrets
import threading
import time
from collections import OrderedDict
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from sparkring.history import describe, run_store
from sparkring.history.record import RunRecord
from sparkring.history.view import Controls
from sparkring.views import compare
from sparkring.views.front_end import FrontEnd, front_end
from sparkring.views.html import PAUSE_PER_WORK, WARM_PAUSE_S, HtmlView, bundle
from sparkring.views.live import Feed, Message, size_bytes, state_message, whole
from sparkring.views.markup import enclosed, paragraph

PAUSE_S = 0.044  # the pause between two messages; a printed line must be visible in the page within 150 ms
BYTES_PER_S = 500_000  # Jupyter's server drops output above 1 MB/s
# During a run, only pages without widgets show the static view, so it is redrawn rarely. But it must not become too
# old, because the notebook keeps it if the kernel is killed.
STATIC_AFTER_S = STATIC_PAUSE_S = 2.0
SNAPSHOT_PAUSE_S = 5.0
BUSY_EVERY_S = 1.0
AGAIN_AFTER_S = (1.5, 4.0, 10.0)  # when messages are sent again that a page may have missed, since it was not ready yet
# The number of ended runs that a page can still show after it has been loaded again. src/runs.js has the same number.
KEPT = 20
SAVED = "saved "  # the prefix of the id of a saved run in a page, whose outputs may have a static view of the same run

_HERE = Path(__file__).parent
_VIEW = "application/vnd.jupyter.widget-view+json"


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    """The connection to the pages that show this notebook.

    The kernel sends the messages of views/live.py to pages. A page sends `stop` to stop a run, `answer` with the user's
    answer to a request of a rank, and `hello` when it first finds an empty element for the panel of a run. The kernel
    answers `hello` with the whole run, and with a message `heard`, which says whether the kernel knows the run, can
    stop it, and takes answers. In JupyterLab, the messages of a page arrive while a cell is running, in a thread of the
    kernel. In other front ends, they arrive after the cell has ended.
    """

    # Built by build.js from src/.
    _esm = (_HERE / "panel.bundle.js").read_text(encoding="utf-8")
    _css = (_HERE / "panel.bundle.css").read_text(encoding="utf-8")
    page = traitlets.Unicode().tag(sync=True)
    # If a front end isolates the outputs of cells, each run has its own widget, and `run` is the id of the run. The
    # panel is then a view of this widget. A view that is made late, or from a saved notebook, begins with `snapshot`.
    run = traitlets.Unicode().tag(sync=True)
    snapshot = traitlets.List(traitlets.Dict()).tag(sync=True)

    def __init__(self, run: str = "") -> None:
        self._guard = threading.Lock()
        self._records: OrderedDict[str, RunRecord] = OrderedDict()
        self._controls: dict[str, Controls] = {}
        self._listings: OrderedDict[str, list[Message]] = OrderedDict()
        self._asked: set[str] = set()  # the runs in progress that a page has asked for
        self._snapshot_due = 0.0
        self._sender: ipywidgets.Widget = self  # the widget whose model gets the messages
        super().__init__(page=secrets.token_hex(8), run=run)
        self.on_msg(self._heard)

    def begin(self, record: RunRecord, controls: Controls | None) -> None:
        """Remember a run that has begun, and its controls."""
        with self._guard:
            self._records[record.run_id] = record
            if controls is not None:
                self._controls[record.run_id] = controls

    def tell(self, record: RunRecord, news: list[Message]) -> None:
        """Send the messages `news` about a run to all pages."""
        with self._guard:
            self._records[record.run_id] = record
            for message in news:
                self._post(message)
            if self.run and (record.outcome is not None or time.monotonic() >= self._snapshot_due):
                self._snapshot_due = time.monotonic() + SNAPSHOT_PAUSE_S
                _apart.copy().run(self._take_snapshot, record)

    def _take_snapshot(self, record: RunRecord) -> None:
        self.snapshot = whole(record, time.time())

    def end(self, record: RunRecord) -> None:
        """Record that the run has ended. Pages can still ask for it until KEPT other runs have ended."""
        with self._guard:
            self._controls.pop(record.run_id, None)
            self._asked.discard(record.run_id)
            self._records.move_to_end(record.run_id)
            for run in [run for run, record in self._records.items() if record.outcome is not None][:-KEPT]:
                del self._records[run]

    def forget(self, record: RunRecord) -> None:
        """Remove the panel of a quick run from all pages. The static view, which the notebook saves, is sufficient."""
        with self._guard:
            self._controls.pop(record.run_id, None)
            self._asked.discard(record.run_id)
            del self._records[record.run_id]
            self._post({"run": record.run_id, "kind": "gone"})

    def _get_embed_state(self, drop_defaults: bool = False) -> dict[str, Any]:
        """Return what ipywidgets.embed writes into a page: the static view of the widget's run, if it has one.

        A page that is exported in this way has no kernel, often cannot load the script of anywidget, and lacks the
        traits that have their default values, such as the panel's script. The widgets below are part of ipywidgets.
        """
        with self._guard:
            record = self._records.get(self.run)
        layout = {"layout": self.get_state("layout")["layout"]}
        shown: dict[str, Any] = {"model_name": "BoxModel", "state": layout}  # an empty box takes no room
        if record is not None:
            now = describe.last_known(record)
            static = bundle(record._replace(run_id=""), now=now, final=record.outcome is not None)["text/html"]
            shown = {"model_name": "HTMLModel", "state": {**layout, "value": static}}
        return {"model_module": "@jupyter-widgets/controls", "model_module_version": "2.0.0", **shown}

    def repeat(self, run: str) -> None:
        """Send the whole run again, unless a page has asked for it.

        A page misses the messages that arrive before it has loaded the widget's script, and its question may reach the
        kernel only after the cell has ended. Without the run's state, the page would show no panel until then.
        """
        with self._guard:
            record = self._records.get(run)
            if record is not None and run not in self._asked:
                for message in whole(record, time.time()):
                    self._post(message)

    def announce(self, foreground: str) -> None:
        """Announce this widget's model to all pages again, and send them every run that is in progress.

        A page that is loaded while a cell is running cannot ask the kernel for the model, so it needs the announcement.
        The kernel would not receive the page's messages either, so the page is told that the run `foreground` belongs
        to the running cell: Stop then interrupts this cell. A page that already knows the model replaces it with the
        announced model.
        """
        self._sender = self
        for widget in (self.layout, self):
            opened = {"state": widget.get_state(), "buffer_paths": []}
            _apart.copy().run(widget.comm.open, opened, {"version": ipywidgets._version.__protocol_version__})
        with self._guard:
            for record in self._records.values():
                if record.outcome is None:
                    for message in whole(record, time.time()):
                        self._post(message)
            self._post({"run": foreground, "kind": "foreground"})

    def _post(self, message: Message) -> None:
        # Each run sends messages from its own thread. Context.run() raises an error if another thread is using the same
        # context, so each message is sent in a copy of the context.
        _apart.copy().run(self._sender.send, message)

    def keep(self, name: str, messages: list[Message]) -> None:
        """Keep what `%runs` shows, for the pages that ask for it."""
        with self._guard:
            self._listings[name] = messages
            while len(self._listings) > KEPT:
                self._listings.popitem(last=False)

    def with_places(self, message: Message) -> Message:
        """Return the message with the name of each listed run's place. Runs that this page follows have live panels."""
        runs = message.get("runs", ())
        return {**message, "places": [run if run in self._records else f"{SAVED}{run}" for run in runs]}

    def record(self, name: str) -> RunRecord | None:
        """Return the record of a run that the page has asked for; None if it is not known, or no longer saved."""
        run_id = name.removeprefix(SAVED)
        record = self._records.get(run_id)
        path = run_store.home() / run_id
        if record is not None or run_id != path.name or not (path / run_store.EVENTS).is_file():
            return record
        return _load(path, (path / run_store.EVENTS).stat().st_mtime_ns)

    def _compare(self, run: str, names: list[str]) -> None:
        """Send the comparison of the runs that the user has selected in a list."""
        records = [record for record in map(self.record, names) if record is not None]
        compared = compare.message(records[: compare.MOST_RUNS])
        with self._guard:
            self._post({"run": run, **compared})

    def _heard(self, _: Any, message: Message, buffers: Any) -> None:
        run = str(message.get("run"))
        controls = self._controls.get(run)
        match message.get("kind"):
            case "compare":
                self._compare(run, [str(name) for name in message["runs"]])
                return
            case "stop":
                if controls is not None:
                    controls.stop()
                return
            case "answer":
                if controls is not None and controls.answer is not None:
                    controls.answer(int(message["rank"]), int(message["number"]), str(message["text"]))
                return
        saved = self.record(run) if run.startswith(SAVED) else None  # outside the guard, because this may take seconds
        with self._guard:
            if message.get("again"):  # the page may have missed the answer: anywidget drops it if the page was too busy
                self._sender = self.layout
            for listing in self._listings.get(run, ()):
                self._post({**listing, "run": run})
            record = self._records.get(run)
            if record is not None and record.outcome is None:
                self._asked.add(record.run_id)
            record = record or saved
            for news in () if record is None else whole(record, time.time()):
                self._post({**news, "run": run})
            if saved is not None and saved.outcome is None:
                self._post({"run": run, **_unfinished(saved)})
            elif saved is None and run.startswith(SAVED):
                missing = "This run is not shown, because it is no longer saved."
                self._post({"run": run, "kind": "compared", "html": enclosed(paragraph(missing)), "charts": {}})
            stops, answers = controls is not None, controls is not None and controls.answer is not None
            self._post({"run": run, "kind": "heard", "known": record is not None, "stops": stops, "answers": answers})


_page: Page | None = None
# Each message of a kernel has a parent: the request to which the message belongs. Messages to pages are sent in this
# context, which has no parent. If the request to run the cell were their parent, the kernel would hold back its answers
# to pages until the cell has ended.
_apart = contextvars.Context()


def _open_page() -> Page:
    """Return the kernel's Page. Make a new one if there is none, or if the notebook has closed all widgets."""
    global _page, _apart
    if _page is None or _page.comm is None:
        _apart = contextvars.copy_context()
        parent = getattr(getattr(get_ipython(), "kernel", None), "_shell_parent", None)
        if isinstance(parent, contextvars.ContextVar):  # in ipykernel 7
            _apart.run(parent.set, {})
        _page = _apart.copy().run(Page)
    return _page


def _page_of(run: str) -> Page:
    """Return a new Page for a single run, for front ends that isolate the outputs of cells from one another."""
    _open_page()  # sets the context in which messages are sent
    return _apart.copy().run(Page, run)


def show_listing(messages: list[Message], html: str, words: str) -> None:
    """Show what `%runs` lists or compares: the page draws the messages, and a saved notebook shows the HTML."""
    name = f"runs {secrets.token_hex(8)}"
    page = _open_page()
    page.keep(name, [page.with_places(message) for message in messages])
    _display_saved(page, name, html, words)


def show_saved(record: RunRecord) -> None:
    """Show the panel of a saved run that has ended, and its static view in pages without widgets."""
    shown = bundle(record._replace(run_id=""), now=describe.last_known(record), final=True)
    _display_saved(_open_page(), f"{SAVED}{record.run_id}", shown["text/html"], shown["text/plain"])


def _display_saved(page: Page, name: str, html: str, words: str) -> None:
    """Display an empty element for what the page draws, and `html`, which the page then hides."""
    place = f'<div class="sr-place" data-sparkring="{escape(name)}" data-page="{page.page}"></div>'
    shown = {"text/html": f'{place}<div data-sparkring-static="{escape(name)}">{html}</div>', "text/plain": words}
    display(shown, raw=True)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=2)
def _load(path: Path, _: int) -> RunRecord:
    return run_store.load(path)


def _unfinished(record: RunRecord) -> Message:
    """Return the state of a saved run without an end: it is in progress elsewhere, or its kernel was killed."""
    last = describe.last_known(record)
    over = {
        "state": "unfinished",
        "look": "",
        "ended": last,
        "took": describe.took(record, last),
        "left": "",
        "waiting": "",
    }
    return {**state_message(record, last), "now": last, **over}


class _Foreground:
    """Tells front ends the kernel's state, and sends again what a page may have missed, while a cell shows a run.

    While the cell is running, a subshell of the kernel can answer messages, for example from a widget. JupyterLab then
    shows the kernel as idle, so the busy state is sent repeatedly. A page that is loaded while the cell is running gets
    no answer when it asks for the kernel's widgets. Therefore, the model is announced again when the kernel's socket
    shows that a page has connected.
    """

    def __init__(self, page: Page, run: str) -> None:
        self._page, self._run = page, run
        self._kernel: Any = getattr(get_ipython(), "kernel", None)
        now = time.monotonic()
        self._due = now + BUSY_EVERY_S
        self._repeat_at = [now + after_s for after_s in AGAIN_AFTER_S]
        self._announce_at: list[float] = []
        self._connections = _watch_connections(self._kernel)

    def tell(self) -> None:
        """Send the busy state, the run and the announcement if they are due. The cell's thread calls this often."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + BUSY_EVERY_S
        kernel, parent = self._kernel, self._kernel.get_parent("shell")
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": "busy"}, parent=parent)
        if self._repeat_at and now >= self._repeat_at[0]:
            self._repeat_at.pop(0)
            self._page.repeat(self._run)
        if self._connections is None:
            return
        while self._connections.poll(0):
            self._connections.recv_multipart()
            self._announce_at = [now + after_s for after_s in AGAIN_AFTER_S]
        if self._announce_at and now >= self._announce_at[0]:
            self._announce_at.pop(0)
            self._page.announce(self._run)

    def close(self) -> None:
        if self._connections is not None:
            thread = self._kernel.iopub_thread
            thread.schedule(thread.socket.disable_monitor)
            self._connections.close(0)


def _watch_connections(kernel: Any) -> Any:
    """Return a socket that reports when a page connects to the kernel's output; None if this is not possible."""
    thread: Any = getattr(kernel, "iopub_thread", None)
    if not hasattr(thread, "schedule"):
        return None
    import zmq

    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Only the thread of the output may use the output's socket, so this thread makes the monitor socket.
    thread.schedule(lambda: made.put(thread.socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)))
    try:
        return made.get(timeout=1.0)
    except queue.Empty:
        return None


class PanelView:
    """Updates the panel of a run many times a second, and its static view every few seconds and when the run ends."""

    def __init__(self, controls: Controls | None = None, *, background: bool = False) -> None:
        self._controls = controls
        self._feed = Feed()
        # The static view is shown late, when the page already shows the panel. Otherwise, the output would jump when
        # the panel replaces the static view. But a run in the background must show its static view at once: a later
        # view would appear in the output of another cell, which the kernel is running by then.
        after_s = 0.0 if background else STATIC_AFTER_S
        self._static = HtmlView(after_s=after_s, pause_s=STATIC_PAUSE_S, early=background)
        self._page: Page | None = None
        self._foreground: _Foreground | None = None
        self._background = background
        self._views: list[Any] = []  # the handles of views that are needed only to load the widget's script
        self._over = False
        self._due: float | None = None

    def refresh(self, record: RunRecord) -> None:
        """Send the updates to the pages, unless the last messages are too recent."""
        began = time.monotonic()
        if self._due is None:
            self._due = began + (WARM_PAUSE_S if record.warm and not self._background else 0.0)
        if began < self._due:
            return
        sent = self._tell(record)
        if self._foreground is not None:
            self._foreground.tell()
        took = time.monotonic() - began
        self._due = began + max(PAUSE_S, PAUSE_PER_WORK * took, sent / BYTES_PER_S)
        self._static.refresh(record)

    def close(self, record: RunRecord) -> None:
        """Show how the run ended: in the panel, if there is one, and in the static view."""
        if self._foreground is not None:
            self._foreground.close()
        quick = describe.quick(record)
        if not quick:
            self._tell(record)  # before the static view, which can take seconds to draw
            assert self._page is not None
            self._page.end(record)
        self._static.close(record)
        if quick and self._page is not None:
            self._page.forget(record)
        self._over = True
        self._remove_views()

    def again(self, record: RunRecord) -> None:
        """Show the panel and the static view in the output of the current cell, too."""
        if self._page is not None:
            self._display_place(self._page, record)
        if self._over:  # close() may have been called in another thread since `record` was made
            self._remove_views()
        self._static.again(record)

    def _tell(self, record: RunRecord) -> int:
        """Send the updates to the pages, and return the approximate number of bytes that were sent."""
        if self._page is None:
            self._page = _open_page() if _front_end() != "colab" else _page_of(record.run_id)
            self._page.begin(record, self._controls)
            self._display_place(self._page, record)
            if not self._background and record.outcome is None:
                self._foreground = _Foreground(self._page, record.run_id)
        news = self._feed.news(record, time.time())
        self._page.tell(record, news)
        return sum(size_bytes(message) for message in news)

    def _display_place(self, page: Page, record: RunRecord) -> None:
        """Display the empty element for the run's panel.

        VS Code and Colab load a widget's script only if a view of the widget is displayed, so a view is displayed
        there, too. In Colab, which isolates the outputs of cells from one another, this view is the panel itself.
        """
        if page.run:
            _display_view(page)
            return
        place = f'<div class="sr-place" data-sparkring="{escape(record.run_id)}" data-page="{page.page}"></div>'
        display({"text/html": place, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
        if _front_end() != "jupyter":
            self._views.append(_display_view(page))

    def _remove_views(self) -> None:
        """Remove the views that were needed only to load the widget's script.

        If they were saved with the notebook, JupyterLab would show an error when there is no kernel. After the run,
        they are removed at once: a page that has shown the run has loaded the script, and others show the static view.
        """
        while self._views:
            self._views.pop().update({"text/plain": ""}, raw=True)


def _display_view(page: Page) -> Any:
    """Display a view of the widget, and return its handle.

    Pages without widgets show the text, so it is empty. If the widget displayed itself, such pages would show the
    widget's repr.
    """
    view = {"version_major": 2, "version_minor": 1, "model_id": page.model_id}
    return display({_VIEW: view, "text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _front_end() -> FrontEnd:
    return front_end(getattr(get_ipython(), "user_ns", {}))
