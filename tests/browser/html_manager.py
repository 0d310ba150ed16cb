"""The scripts with which pages outside Jupyter show widgets, and pages that load them.

npm downloads the scripts once, in the versions that are pinned here. No page of the tests reaches the internet.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import anywidget
from playwright.sync_api import Browser, Page, Route
from waiting import DEADLINE_S

KEPT = Path(__file__).parents[2] / "build" / "npm"
ADDRESS = "http://exported.test/"


class Script(NamedTuple):
    """A script in a package of npm: the package, its version, its SHA-512 (as npm states it), and the script's path."""

    package: str
    version: str
    sha512: str
    path: str


HTML_MANAGER = (
    "@jupyter-widgets/html-manager",
    "1.0.15",
    ("5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA=="),
)
SCRIPTS = {
    "embed-amd.js": Script(*HTML_MANAGER, "dist/embed-amd.js"),
    "libembed-amd.js": Script(*HTML_MANAGER, "dist/libembed-amd.js"),
    "require.min.js": Script(
        "requirejs",
        "2.3.7",
        "DouTG8T1WanGok6Qjg2SXuCMzszOo0eHeH9hDZ5Y4x8Je+9JB38HdTLT4/VA8OaUhBa0JPVHJ0pyBkM1z+pDsw==",
        "require.js",
    ),
}
# The build of anywidget for requirejs, which is also the one that CDNs have.
ANYWIDGET = Path(anywidget.__file__).parent / "nbextension" / "index.js"


def scripts(npm: str) -> dict[str, bytes]:
    """Return the scripts by their names. Raise an error if npm cannot download them or has other ones."""
    return {name: _script(npm, script) for name, script in SCRIPTS.items()}


def _script(npm: str, script: Script) -> bytes:
    kept = KEPT / f"{script.package.rpartition('/')[2]}-{script.version}.tgz"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            wanted = f"{script.package}@{script.version}"
            subprocess.run(
                [npm, "pack", "--silent", wanted], cwd=folder, check=True, timeout=DEADLINE_S, capture_output=True
            )
            [packed] = Path(folder).glob("*.tgz")
            packed.replace(kept)
    found = base64.b64encode(hashlib.sha512(kept.read_bytes()).digest()).decode()
    assert found == script.sha512, f"{kept} is not the package that was pinned: its SHA-512 is {found}"
    with tarfile.open(kept) as archive:
        member = archive.extractfile(f"package/{script.path}")
        assert member is not None
        return member.read()


def shown(browser: Browser, html: str, scripts: dict[str, bytes], *, reaches_anywidget: bool = True) -> Page:
    """Show a page that loads html-manager and requirejs, wherever it expects them, and perhaps the script of anywidget.

    Other requests of the page fail.
    """
    html = re.sub(r' integrity="[^"]*"', "", html)  # pages name the minified requirejs, which npm does not have

    def answer(route: Route) -> None:
        url = route.request.url.partition("?")[0]
        name = url.rpartition("/")[2]
        if url == ADDRESS:
            route.fulfill(body=html, content_type="text/html; charset=utf-8")
        elif name in scripts:
            allowed = {"Access-Control-Allow-Origin": "*", "Content-Type": "text/javascript; charset=utf-8"}
            route.fulfill(body=scripts[name], headers=allowed)
        elif "/anywidget@" in url and reaches_anywidget:
            route.fulfill(path=ANYWIDGET, content_type="text/javascript; charset=utf-8")
        else:
            route.abort()

    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.route("**/*", answer)
    page.goto(ADDRESS)
    return page
