"""The saved view of a run is accessible, and stays readable if styles and drawings are removed."""

from __future__ import annotations

import re
from pathlib import Path

import bleach
import nbformat
import pytest
from lab import Opened, axe
from playwright.sync_api import Browser, Page
from records import NOW, RECORDS

from sparkring.views.html import bundle

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
LOOKS = {"light": ("#fff", "rgba(0, 0, 0, .87)"), "dark": ("#111", "#fff")}  # JupyterLab's
# Finds style sheets, texts of drawings, addresses of objects, and words that are joined by mistake.
JUMBLE = re.compile(r"\.sr-|[{}]\s*\.|object at 0x|attempt \d+attempt|\d(step|attempt|epoch|rank) |\d s\d|[a-z]\)[a-z]")
UNTAGGED = ["div", "span", "b", "small", "pre", "p", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul",
            "li", "details", "summary", "code", "mark", "figure", "figcaption"]  # fmt: skip


def static(name: str) -> str:
    record = RECORDS[name]
    return bundle(record, now=NOW, final=record.outcome is not None)["text/html"]


def page_of(browser: Browser, body: str, look: str = "light") -> Page:
    ground, colour = LOOKS[look]
    style = f":root{{color-scheme:{look}}}body{{background:{ground};color:{colour};font-family:sans-serif}}"
    page = browser.new_page(viewport={"width": 1150, "height": 900})
    page.set_content(
        f'<!doctype html><html lang="en"><head><title>runs</title><style>{style}</style></head>'
        f"<body><main><h1>Runs</h1>{body}</main></body></html>"
    )
    return page


@pytest.mark.parametrize("look", ["light", pytest.param("dark", marks=pytest.mark.extended("appearance", "light"))])
def test_axe_finds_nothing(request: pytest.FixtureRequest, browser: Browser, pictures: Path, look: str) -> None:
    """axe checks the page with all folds open, then its colours with every box at full height, so that all are visible.

    In the dark look, only the colours differ, and the second check sees all of them.
    """
    folded = "".join(static(name) for name in RECORDS)
    page = page_of(browser, folded.replace("<details", "<details open"), look)
    if look == "light":
        assert axe(page, "main", leave_out=["color-contrast"]) == []
    if request.config.getoption("--pictures"):
        page.screenshot(path=pictures / f"static-{look}.png", full_page=True)
    page.add_style_tag(content=".sr-log, .sr-scroll { max-height: none !important; height: auto !important }")
    assert axe(page, "main", "color-contrast") == []
    assert page.locator("img").count() > 10
    assert page.evaluate("[...document.images].every((each) => each.naturalWidth > 0)")
    page.close()


def test_it_reads_well_without_styles_and_pictures(browser: Browser) -> None:
    """GitHub, for example, removes <style> and <svg> elements and style attributes."""
    body = {name: bleach.clean(static(name), tags=UNTAGGED, attributes=[], strip=True) for name in RECORDS}
    page = page_of(browser, "".join(f'<section id="{name}">{each}</section>' for name, each in body.items()))
    told = {name: page.locator(f"#{name}").inner_text() for name in RECORDS}
    assert {name: found[0] for name, said in told.items() if (found := JUMBLE.search(said))} == {}
    assert "finished training 4 ranks on this machine" in told["finished"]
    assert "0 ✓ 1 ✓ 2 ✓ 3 ✓" in told["finished"]
    assert re.search("7 committed +1 damaged", told["finished"])
    assert re.search(r"✗ attempt 1 .*\n+.*attempt 2", told["restarted"], re.DOTALL)
    assert re.search(r"reducing 3.0 s \(15%\) +copying", told["timeline"])
    assert "0–699 ■ 700 ✗ 701–1023 ■" in told["many"]
    page.close()


def test_the_committed_notebooks_in_a_jupyterlab_that_does_not_trust_them(opened: Opened) -> None:
    """JupyterLab's sanitizer leaves the runs in our notebooks readable.

    The test makes one notebook, with a cell that has the outputs of each of our notebooks. If these outputs are out of
    date, `make notebooks` updates them.
    """
    cells, counts = [], {}
    for name in NAMES:
        made = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
        kept = [output for output in outputs if "sr-run" in output.get("data", {}).get("text/html", "")]
        stripped = [output for output in kept if re.search(r"<(style|svg)\b", output.data["text/html"])]
        assert not stripped, f"{name}: {len(stripped)} outputs contain <style> or <svg>; run `make notebooks`"
        counts[name] = len(kept)
        cells.append(nbformat.v4.new_code_cell(name, outputs=kept))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), opened.lab.folder / "committed.ipynb")
    found = opened("committed", kernel=False)
    for at, name in enumerate(NAMES):
        found.show(at)
        shown = found.cell(at).locator(".sr-run")
        assert shown.count() == counts[name]
        said = found.cell(at).locator(".jp-Cell-outputArea").inner_text()
        assert not (jumble := JUMBLE.search(said)), f"{name}: {jumble} in {said}"
        for state in shown.locator(".sr-state").all():
            assert state.evaluate("(each) => getComputedStyle(each).backgroundColor") != "rgba(0, 0, 0, 0)"
        pictures = shown.locator("img")
        assert pictures.evaluate_all("(all) => all.every((each) => each.complete && each.naturalWidth > 0)")
    found.page.close()
