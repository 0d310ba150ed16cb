"""The page folds lines and tracebacks by the same rules as Python."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Browser

from sparkring.views import panel

FOLDING = Path(__file__).parents[1] / "views" / "folding.json"
FOLDED = """(cases) => cases.map(({ lines }) => {
  const found = new Lines(), filter = new Filter(found);
  found.add({
    start: 0, count: lines.length, noise: [], html: {}, pending: { text: [] },
    rank: lines.map(([rank]) => rank), stream: lines.map(([, stream]) => stream[3]).join(""),
    time: lines.map(() => 0), text: lines.map(([, , text]) => text),
  });
  found.settle();
  while (!filter.done) filter.work();
  return filter.found.map((line) => [rankNumbers(found.ranksOf(line)), found.at(line).text]);
})"""


def test_the_page_folds_as_python_does(browser: Browser) -> None:
    cases = json.loads(FOLDING.read_text(encoding="utf-8"))
    page = browser.new_page()
    source = "".join(Path(panel.__file__).with_name(name).read_text("utf-8") for name in ("elements.js", "lines.js"))
    page.add_script_tag(content=source)
    assert page.evaluate(FOLDED, cases) == [case["folded"] for case in cases]
    page.close()
