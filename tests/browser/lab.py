"""Runs a real JupyterLab on loopback, and opens its notebooks in a real browser, as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import axe_playwright_python
import nbformat
import psutil
from ipykernel.kernelspec import write_kernel_spec
from playwright.sync_api import Browser, Dialog, Error, Locator, Page, expect, sync_playwright
from waiting import DEADLINE_S, PACE

import sparkring

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DONE = re.compile(r"\[\d+\]:")
_SOURCE_ROOT = str(Path(sparkring.__file__).parents[1])
_AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
# Without these settings, JupyterLab would ask questions and look up news on its own.
_QUIET = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
# Otherwise, the server would run node for each page, to find out whether JupyterLab should be built again.
_NO_BUILD = {"buildCheck": False, "buildAvailable": False}


def chromium() -> str | None:
    """Return the browser's path; None if this machine has no browser."""
    return next(filter(None, map(shutil.which, CHROMIUMS)), None)


# ── JupyterLab ────────────────────────────────────────────────────────────────


class Lab(NamedTuple):
    """A running server, and the folder of its notebooks."""

    url: str
    token: str
    folder: Path
    process: psutil.Process

    def write(self, name: str, *cells: str) -> Path:
        """Write a notebook with these code cells."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / f"{name}.ipynb"
        nbformat.write(made, path)
        return path

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the answer of the server's REST API."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read() or b"null")

    @property
    def outcome(self) -> Path:
        """The file to which the quickstart writes its results, as under `make demo`."""
        return self.folder.parent / "outcome.json"

    def session(self, name: str) -> dict[str, Any]:
        """Return the server's session of a notebook that has a kernel."""
        return next(each for each in self.ask("/api/sessions") if each["path"] == f"{name}.ipynb")

    def kernel(self, name: str) -> psutil.Process:
        """Return the process of a notebook's kernel."""
        wanted = f"kernel-{self.session(name)['kernel']['id']}.json"
        return next(each for each in self.process.children() if any(part.endswith(wanted) for part in each.cmdline()))


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[Lab]:
    """Run a separate server with default settings. At the end, all processes that it has started end, too."""
    for name in ("notebooks", "config", "data", "runtime", "home", "ipython", "tmp"):
        (folder / name).mkdir(parents=True)
    write_kernel_spec(folder / "data" / "kernels" / "python3")  # used instead of the user's own kernels
    settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(_QUIET))
    pages = folder / "config" / "labconfig"
    pages.mkdir()
    (pages / "page_config.json").write_text(json.dumps(_NO_BUILD))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_TOKEN": token,
        "IPYTHONDIR": str(folder / "ipython"),
        "SPARKRING_HOME": str(folder / "home"),
        "SPARKRING_DEMO_OUTCOME": str(folder / "outcome.json"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": os.pathsep.join(filter(None, (_SOURCE_ROOT, os.environ.get("PYTHONPATH")))),
    }
    log = folder / "server.log"
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "ServerApp.root_dir": folder / "notebooks",
        "LabApp.expose_app_in_browser": True,  # for JupyterLab's commands that have no button
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    found = Lab(f"http://127.0.0.1:{port}", token, folder / "notebooks", psutil.Process(process.pid))
    try:
        _until_up(found, process, log)
        yield found
    finally:
        started = found.process.children(recursive=True) if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(started, timeout=10 * PACE)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=10 * PACE)


def _until_up(lab: Lab, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            lab.ask("/api/status")
            return
        except (OSError, urllib.error.URLError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text(errors='replace')}") from None
            time.sleep(0.1)


# ── The browser ───────────────────────────────────────────────────────────────


# For each page, Chromium prepares two more pages for the popups of the address bar, which doubles the CPU time.
# Chromium obeys only the last --disable-features, so the popups are added to Playwright's own list.
_WITHOUT_POPUPS = """#!/bin/sh
for argument; do
    shift
    case $argument in --disable-features=*) argument=$argument,WebUIOmniboxPopup,WebUIOmniboxAimPopup ;; esac
    set -- "$@" "$argument"
done
exec {path} "$@"
"""


@contextlib.contextmanager
def browser(path: str, arguments: Sequence[str] = ()) -> Iterator[Browser]:
    """Run the browser at `path`, without a window."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    small_memory = ["--disable-dev-shm-usage"]  # in containers /dev/shm is often too small for a page
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        script = Path(folder, "chromium")
        script.write_text(_WITHOUT_POPUPS.format(path=shlex.quote(path)))
        script.chmod(0o755)
        found = playwright.chromium.launch(executable_path=script, args=[*as_root, *small_memory, *arguments])
        try:
            yield found
        finally:
            found.close()


def axe(page: Page, within: str, *rules: str, leave_out: Sequence[str] = ()) -> list[str]:
    """Return the problems that axe-core finds for people who cannot see or do not use a mouse, by all rules or some."""
    if not page.evaluate("'axe' in window"):
        page.add_script_tag(content=_AXE)
    # Without this option, axe would also describe the ten thousand or so elements that pass.
    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    options["rules"] = {rule: {"enabled": False} for rule in leave_out}
    found = page.evaluate("([within, options]) => axe.run(within, options)", [within, options])
    return [
        f"{each['id']}: {node['html']}: {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


class Notebook:
    """A notebook in a page of the browser, with methods for what a user does with it."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        self.lab = lab
        self.name = name
        self.path = lab.folder / f"{name}.ipynb"

    def open(self, *, kernel: bool = True) -> Notebook:
        """Load the page. `kernel` says whether to start a kernel for the notebook."""
        self.page.goto(f"{self.lab.url}/lab/tree/{self.name}.ipynb?token={self.lab.token}&reset")
        self.wait(kernel=kernel)
        return self

    def reload(self) -> None:
        self.page.reload()
        self.wait(idle=False)

    def wait(self, *, kernel: bool = True, idle: bool = True) -> None:
        """Wait until the cells are visible. Without `kernel`, choose no kernel. With `idle`, wait until one is idle."""
        expect(self.cell(0)).to_be_visible()
        if not kernel:
            self.page.get_by_role("dialog").get_by_role("button", name="No Kernel").click()
        elif idle:
            expect(self.page.locator("#jp-main-statusbar")).to_contain_text("| Idle")

    def cell(self, at: int) -> Locator:
        return self.page.locator(f".jp-Notebook-cell[data-windowed-list-index='{at}']")

    def show(self, at: int) -> None:
        """Scroll to a cell, because only the cells near the visible ones are part of the page."""
        self.page.evaluate("at => window.jupyterapp.shell.currentWidget.content.scrollToItem(at, 'start')", at)
        expect(self.cell(at)).to_be_attached()

    def panel(self, at: int) -> Locator:
        return self.cell(at).locator(".sr-panel")

    def static(self, at: int) -> Locator:
        """Return the static view, which is hidden while the panel is live."""
        return self.cell(at).locator("[data-sparkring-static]")

    def run(self, at: int, *, wait: bool = False) -> None:
        """Run a cell, as with Ctrl+Enter."""
        self.cell(at).locator(".jp-InputArea .cm-content").click()
        self.page.keyboard.press("Control+Enter")
        if wait:
            self.until_done(at)

    def until_done(self, at: int, timeout: float | None = None) -> None:
        expect(self.prompt(at)).to_have_text(_DONE, timeout=timeout)

    def prompt(self, at: int) -> Locator:
        return self.cell(at).locator(".jp-InputPrompt")

    def command(self, name: str, **arguments: Any) -> None:
        """Run one of JupyterLab's own commands."""
        self.page.evaluate(
            "([name, arguments]) => window.jupyterapp.commands.execute(name, arguments).then(() => null)",
            [name, arguments],
        )

    def run_all(self) -> None:
        """Run all cells, without waiting for them."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")

    def structure(self) -> list[str]:
        """Return all that keys might change: whether a cell is being edited, which are selected, and all cells."""
        found: list[str] = self.page.evaluate(
            """() => {
              const { content, model } = window.jupyterapp.shell.currentWidget;
              const selected = content.widgets.filter((each) => content.isSelected(each)).length;
              return [content.mode, `cell ${content.activeCellIndex}, ${selected} selected`,
                      ...Array.from(model.cells, (cell) => `${cell.type} ${cell.sharedModel.source}`)];
            }"""
        )
        return found

    def theme(self, look: str) -> None:
        """Set the theme, "light" or "dark"."""
        self.command("apputils:change-theme", theme=f"JupyterLab {look.title()}")
        light = str(look == "light").lower()
        expect(self.page.locator(f"body[data-jp-theme-light='{light}']")).to_have_count(1)

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook, and read it back from the file."""
        self.command("docmanager:save")
        return nbformat.read(self.path, as_version=4)


class Opened:
    """The notebooks that a module's tests have opened, and the errors and requests of their pages."""

    def __init__(self, browser: Browser, lab: Lab) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser = browser
        self.lab = lab

    def pages(self) -> list[Page]:
        return [page for context in self._browser.contexts for page in context.pages]

    def __call__(self, name: str, *cells: str, kernel: bool = True) -> Notebook:
        """Show a new notebook with `cells`; without `cells`, show the existing notebook of that name."""
        if cells:
            self.lab.write(name, *cells)
        return Notebook(self.page(), self.lab, name).open(kernel=kernel)

    def page(self) -> Page:
        """Return an empty page. Its errors, requests and dialogs are recorded."""
        page = self._browser.new_page(viewport={"width": 1280, "height": 1000}, accept_downloads=True)
        page.on("pageerror", self._error)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._dialog)
        return page

    def _error(self, error: Error) -> None:
        if "/jlab_core." not in (error.stack or ""):  # JupyterLab itself raises some errors
            self.errors.append(f"{error}\n{error.stack}")

    def _dialog(self, dialog: Dialog) -> None:
        if dialog.type != "beforeunload":
            self.errors.append(f"a dialog: {dialog.message}")
        dialog.accept()
