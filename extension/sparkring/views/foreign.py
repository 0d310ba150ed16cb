"""Turns HTML, Markdown and pictures from ranks into harmless HTML.

Everyone who opens the notebook sees the result, and the content may come from data that a rank has read. Therefore, the
result has no scripts, style sheets, forms, ids or classes, and no attributes that Jupyter acts on. It loads nothing
from other hosts.
"""

from __future__ import annotations

import base64
import functools
import re
from html import escape, unescape

import markdown_it
import nh3

from sparkring.history.events import Displayed
from sparkring.history.lines import shown

_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
# SVG is allowed as a picture, since an SVG in an <img> runs no scripts and loads nothing.
_PICTURE = re.compile(rf"data:({'|'.join(map(re.escape, _PICTURES))})(;charset=[\w-]+)?[;,]", re.IGNORECASE)
_STYLES = frozenset(
    ("background-color", "border", "border-collapse", "color", "font-family", "font-size", "font-style", "font-weight")
    + ("height", "margin", "max-height", "max-width", "padding", "text-align", "text-decoration", "vertical-align")
    + ("white-space", "width")
)
_ATTRIBUTES = {tag: set(names) for tag, names in nh3.ALLOWED_ATTRIBUTES.items()}
_ATTRIBUTES["*"] = {"style", "title", "lang", "dir"}
_ATTRIBUTES["table"] |= {"border"}
_DROPPED_WHOLE = {"script", "style", "template", "title", "noscript", "iframe", "object", "svg", "math"}


def _attribute(element: str, name: str, value: str) -> str | None:
    if name == "src":
        return value if _PICTURE.match(value) else None
    if name in ("href", "cite"):
        return value if re.match(r"(https?|mailto):", value, re.IGNORECASE) else None
    if name == "style" and re.search(r"url|expression|\\|var\(|/\*", value, re.IGNORECASE):
        return None
    return value


_cleaner = nh3.Cleaner(
    tags=set(nh3.ALLOWED_TAGS) - {"area", "map"},
    clean_content_tags=_DROPPED_WHOLE,
    attributes=_ATTRIBUTES,
    attribute_filter=_attribute,
    filter_style_properties=set(_STYLES),
    url_schemes={"http", "https", "mailto", "data"},
)
_markdown = markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


@functools.lru_cache(maxsize=256)
def body_html(display: Displayed) -> str:
    """Return a display as harmless HTML, or as plain text if nothing visible remains after cleaning."""
    text = display.data.decode("utf-8", "replace") if display.mime_type not in _PICTURES[:4] else ""
    match display.mime_type:
        case "text/html":
            html = _cleaner.clean(text)
        case "text/markdown":
            html = _cleaner.clean(_markdown.render(text))
        case "text/latex":
            html = _pre(text)
        case _:
            data = base64.b64encode(display.data).decode()
            about = escape(shown(display.text))
            return f'<img src="data:{display.mime_type};base64,{data}" alt="{about}" style="max-width:100%">'
    return html if "<img" in html or re.search(r"\S", re.sub(r"<[^>]*>", "", html)) else _pre(display.text)


def words(display: Displayed) -> str:
    """Return a display as text. If the rank's text only names a class, such as one of IPython's, return the content."""
    if not _NAMES_A_CLASS.fullmatch(display.text) or display.mime_type.startswith("image/"):
        return display.text
    text = display.data.decode("utf-8", "replace")
    if display.mime_type == "text/html":
        text = unescape(re.sub(r"<[^>]*>", " ", body_html(display)))
    return " ".join(text.split()) or display.text


_NAMES_A_CLASS = re.compile(r"<IPython\.core\.display\.\w+ object>|<[\w/+, -]+>")


def _pre(text: str) -> str:
    lines = "\n".join(map(shown, text.split("\n")))
    return f"<pre>{escape(lines)}</pre>"
