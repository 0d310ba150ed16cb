"""The settings of Sphinx for `make docs-site`.

The folder of the sources is the repository, so that the links between docs/, notebooks/ and README.md are those that
work on GitHub, too. The notebooks are shown with their saved outputs; nothing is executed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pygments.lexer import bygroups, inherit
from pygments.lexers.python import PythonLexer
from pygments.lexers.special import TextLexer
from pygments.token import Comment, Keyword, Text
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

ROOT = Path(__file__).resolve().parent.parent

project = "sparkring"
copyright = author = "The sparkring developers"
PACKAGE = ROOT / "extension" / "sparkring" / "__init__.py"
release = re.findall(r'__version__ = "(.+)"', PACKAGE.read_text(encoding="utf-8"))[0]

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "docs/**.md",
    "notebooks/**.ipynb",
]
exclude_patterns = [".*", "build", "dist", "extension", "tests"]  # folders that need not be searched
nitpicky = True
suppress_warnings = ["myst.header"]  # the reference has entries of members directly below those of sections

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["attrs_inline"]
# Links to headings have the same anchors as on GitHub.
myst_heading_anchors = 6

html_theme = "furo"
html_title = f"sparkring {release}"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"
pygments_dark_style = "github-dark"


class CellLexer(PythonLexer):
    """Python in which a line may be a magic or a shell command; the lines below a cell magic are still Python."""

    name = "Cell"
    aliases = ("cell",)
    tokens = {  # noqa: RUF012 (Pygments' classes declare them like this)
        "root": [
            (r"^(%%?\w+\??)(.*\n)", bygroups(Keyword, Text)),
            (r"^!.*\n", Comment.Preproc),
            inherit,
        ]
    }


PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>')


def pictures(_app: Sphinx, _docname: str, content: list[str]) -> None:
    """Replace pictures for two themes by two images, because the theme of a page need not be that of the browser."""
    content[0] = PICTURE.sub(r"![\2](\3){.only-light} ![\2](\1){.only-dark}", content[0])


def unsearched(_app: Sphinx, docname: str, content: list[str]) -> None:
    """Leave pages out of the search that mention everything, and would come before the page that explains it."""
    if docname in ("CHANGELOG", "benchmarks/RESULTS"):
        content[0] = f"---\nnosearch: true\n---\n{content[0]}"


def contents(_app: Sphinx, docname: str, content: list[str]) -> None:
    """Add the table of contents to the front page: the pages in the order of docs/README.md, then the notebooks."""
    if docname != root_doc:
        return
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    trees = {"": ["docs/README"]}
    for caption, pages in re.findall(r"(?ms)^\*\*([^*\n]+)\*\*\n(.*?)(?=^\*\*|\Z)", index):
        if names := re.findall(r"(?m)^- \[.+?\]\(([\w/-]+)\.md\)", pages):
            trees[caption] = [f"docs/{name}" for name in names]
    notebooks = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "notebooks").glob("**/*.ipynb"))
    trees["Notebooks"] = sorted(map(str, notebooks))
    trees["Project"] = ["CHANGELOG", "benchmarks/RESULTS", "CONTRIBUTING", "SECURITY"]
    for caption, pages in trees.items():
        content[0] += "\n```{toctree}\n:hidden:\n" + (f":caption: {caption}\n" if caption else "")
        content[0] += "\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what the settings above cannot say."""
    for name in ("python", "py", "ipython", "ipython3"):
        lexers[name] = CellLexer(stripnl=False)
    lexers["ipythontb"] = TextLexer()  # errors of runs are sentences
    for change in (pictures, unsearched, contents):
        app.connect("source-read", change)
    return {"parallel_read_safe": True}
