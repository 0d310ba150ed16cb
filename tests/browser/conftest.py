"""JupyterLab in a real browser, for tests of what a user sees."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest
from kinds import kind_of
from playwright.sync_api import Browser, Locator, expect

sys.path.append(str(Path(__file__).parent))  # so that tests can import lab.py, hostile.py and records.py

import lab as labs

PICTURES = Path(__file__).parents[2] / "build" / "browser"
expect.set_options(timeout=1000 * labs.DEADLINE_S)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path. Without a browser, tests that need one are skipped; in CI, they fail."""
    found = labs.chromium()
    if found:
        return found
    why = f"no browser: none of {', '.join(labs.CHROMIUMS)} is on PATH (Debian: apt-get install chromium)"
    if os.environ.get("CI"):
        pytest.fail(f"{why}; in CI these tests must run")
    pytest.skip(why)


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder for screenshots, which are kept for people to look at."""
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    return PICTURES


@pytest.fixture(scope="session")
def lab(
    chromium: str, pictures: Path, lasting_processes: list[psutil.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[labs.Lab]:
    """A JupyterLab that all tests share."""
    with labs.jupyterlab(tmp_path_factory.mktemp("lab")) as found:
        lasting_processes.append(found.process)
        yield found


class SharedBrowser:
    """The browser that all tests share. It ends as soon as the next test does not need it.

    Otherwise, Playwright's event loop would interfere with tests that have one of their own.
    """

    def __init__(self, chromium: str, lasting_processes: list[psutil.Process]) -> None:
        self._chromium = chromium
        self._lasting_processes = lasting_processes
        self._open = contextlib.ExitStack()
        self._browser: Browser | None = None

    def get(self) -> Browser:
        if self._browser is None:
            me = psutil.Process()
            before = {child.pid for child in me.children()}
            self._browser = self._open.enter_context(labs.browser(self._chromium))
            self._lasting_processes.extend(child for child in me.children() if child.pid not in before)
        return self._browser

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None]:
        yield
        if nextitem is None or kind_of(nextitem) != "browser":
            self.stop()

    def stop(self) -> None:
        self._browser = None
        self._open.close()


@pytest.fixture(scope="session")
def shared_browser(
    pytestconfig: pytest.Config, chromium: str, lasting_processes: list[psutil.Process]
) -> Iterator[SharedBrowser]:
    found = SharedBrowser(chromium, lasting_processes)
    pytestconfig.pluginmanager.register(found)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def browser(shared_browser: SharedBrowser) -> Iterator[Browser]:
    """The browser. At the end of the module, its pages are closed."""
    found = shared_browser.get()
    yield found
    for context in found.contexts:
        context.close()


@pytest.fixture(scope="module")
def opened(browser: Browser, lab: labs.Lab) -> labs.Opened:
    return labs.Opened(browser, lab)


@pytest.fixture
def shoot(request: pytest.FixtureRequest, pictures: Path) -> Callable[..., None]:
    """`shoot(notebook, "name", of, check)` takes a screenshot of `of`, or of the whole page, in each theme.

    In each theme, `check` is called, too. Without --pictures, it is only called, in the theme that is set.
    """

    def take(
        notebook: labs.Notebook, name: str, of: Locator | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        if not request.config.getoption("--pictures"):
            check()
            return
        for look in ("dark", "light"):
            notebook.theme(look)
            (of or notebook.page).screenshot(path=pictures / f"{name}-{look}.png", animations="disabled")
            check()

    return take


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """If a test has failed, save screenshots of its pages."""
    report = yield
    opened = getattr(item, "funcargs", {}).get("opened")
    if report.failed and opened is not None:
        for at, page in enumerate(opened.pages()):
            page.screenshot(path=PICTURES / f"failed-{item.name}-{at}.png")
    return report
