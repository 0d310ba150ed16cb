"""Functions that make pieces of HTML. enclosed() turns the pieces into the form that a notebook saves.

Text from users and ranks is escaped, so that a page shows it and does not act on it.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from sparkring.history.lines import coloured, plain

# Colours of medium brightness, which are readable on light and on dark pages.
BLUE, GREEN, RED, AMBER = "#2f80d0", "#23935a", "#dd4a45", "#b97a10"
RANK_COLOURS = (BLUE, GREEN, AMBER, "#9262d6", "#d0528f", "#16908f", "#7d8a1e", "#cf6a32")

# An image cannot use the text colour of the page, so text in images has one of these colours. GREY is
# readable on white and on black.
GREY, GREY_ON_DARK = "#767676", "#b4b4b4"


def text(value: str) -> str:
    """Return a text as HTML. Colour codes are removed, hidden characters are made visible, and markup is escaped."""
    return escape(plain(value))


def enclosed(body: str, run_id: str = "") -> str:
    """Return the HTML `body` in the form in which a notebook shows and saves it.

    With a `run_id`, the result is marked as the static view of this run. The live panel's script hides the static view
    while the page shows the panel of the same run.

    Untrusted notebooks, and notebooks on the web, lose <style> and <svg>. So the rules of style.css become inline
    styles, and each drawing becomes an image. The classes mathjax_ignore and tex2jax_ignore keep MathJax 3 and 2 from
    showing text between dollar signs as formulas.
    """
    mark = f' data-sparkring-static="{text(run_id)}"' if run_id else ""
    body = _DRAWING.sub(lambda drawing: _image(drawing[0]), body)
    return _inliner()(f'<div class="sr-run mathjax_ignore tex2jax_ignore"{mark}>{body}</div>')


def size_bytes(html: str) -> int:
    """Return how many bytes `html` takes in a notebook. A character that is not ASCII takes up to four."""
    return len(html.encode("utf-8", "replace"))


@functools.cache
def _inliner() -> Callable[[str], str]:
    """Return the function that turns the rules of style.css into inline styles."""
    import css_inline  # not at the top, because this import is slow

    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    inliner = css_inline.CSSInliner(inline_style_tags=False, load_remote_stylesheets=False, minify_css=True)
    return lambda html: inliner.inline_fragment(html, style)


_DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_SVG_STYLE = (
    f"<style>svg{{color:{GREY};font-family:system-ui,sans-serif}}"
    f"@media(prefers-color-scheme:dark){{svg{{color:{GREY_ON_DARK}}}}}</style>"
)


def _image(svg: str) -> str:
    """Return an <svg> as an <img> with an alt text. The titles in the SVG are removed, since an <img> shows none."""
    tag, _, inside = svg.partition(">")
    looks = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
    kept = "".join(f' {name}="{looks[name]}"' for name in _SVG_ATTRIBUTES if name in looks)
    inside = re.sub(r"<title>.*?</title>", "", inside, flags=re.DOTALL)
    inside = re.sub("[\ufffe\uffff]", "\ufffd", inside)  # not allowed in XML
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg"{kept}>{_SVG_STYLE}{inside}'
    data = base64.b64encode(drawn.encode()).decode()
    place = f'width="{looks["width"]}" height="{looks["height"]}"'
    return f'<img alt="{looks.get("aria-label", "")}" {place} src="data:image/svg+xml;base64,{data}">'


_SVG_ATTRIBUTES = ("width", "height", "viewBox", "font-size", "fill")


def svg(width: float, height: float, words: str, parts: Iterable[str], font_size: float = 11) -> str:
    """Return an <svg> that consists of `parts`, in the colour of the text around it. `words` describe the picture."""
    return (
        f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{text(words)}" font-size="{font_size:g}" fill="currentColor">{"".join(parts)}</svg>'
    )


def tint(colour: str) -> str:
    """Return CSS for text in a colour that is mixed with the page's text colour, to be readable on all pages.

    JupyterLab's sanitiser removes `color-mix`. The text then has the plain colour, which is declared first.
    """
    return f"color:{colour};color:color-mix(in srgb,{colour} 65%,currentColor)"


def note(words: str) -> str:
    """Return a line in small type, or '' if `words` is empty."""
    return f"<div><small>{text(words)}</small></div>" if words else ""


def paragraph(words: str) -> str:
    """Return a paragraph in small type for the place below charts, or '' if `words` is empty."""
    return f"<p><small>{text(words)}</small></p>" if words else ""


def warning(words: str) -> str:
    """Return a line with a warning, or '' if `words` is empty."""
    return f'<div><b style="{tint(AMBER)}">⚠ {text(words)}</b></div>' if words else ""


def advised(lines: Iterable[str]) -> str:
    """Return advice as a list with an item for each of the `lines`, or '' if there are no lines."""
    entries = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="sr-advice">{entries}</ul>' if entries else ""


def legend(shapes: Iterable[tuple[str, str]], view_box: str, rest: str = "") -> str:
    """Return a legend: each of the `shapes` is SVG, within `view_box`, and the words beside it. `rest` is more HTML."""
    _, _, width, height = view_box.split()
    box = f'<svg width="{width}" height="{height}" viewBox="{view_box}" fill="currentColor" aria-hidden="true">'
    keys = "".join(f"<span>{box}{shape}</svg>{words}</span> " for shape, words in shapes)
    return f'<div class="sr-legend">{keys}{rest}</div>'


def scrolled(body: str, words: str) -> str:
    """Return `body` in a box that the keyboard can scroll; '' if `body` is empty. `words` is the name of the box."""
    return f'<div class="sr-scroll" role="group" tabindex="0" aria-label="{text(words)}">{body}</div>' if body else ""


def details(title: str, body: str) -> str:
    """Return `body` in a collapsed element with the title `title`, or '' if `body` is empty."""
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""


def log_text(line: str) -> str:
    """Return the HTML of a line that a rank printed. If the colour changes too often, all colours are left out."""
    pieces = coloured(line)
    if len(pieces) > _PIECES:
        return text(line)
    colours = Colours()
    parts = []
    for code, piece in pieces:
        colours.apply(code)
        style = colours.css()
        parts.append(f'<span style="{style}">{escape(piece)}</span>' if style and piece else escape(piece))
    return "".join(parts)


_PIECES = 60
# The eight colours of a terminal, from black to white. Its bright colours are shown in the same way as its normal ones.
# Black is shown as grey, and white ('') in the text colour of the page.
_BASIC = ("#767676", RED, GREEN, AMBER, BLUE, "#b557c8", "#16908f", "")


class Colours:
    """The style that results from SGR codes. Programs use these codes to style text on a terminal."""

    def __init__(self) -> None:
        self._set: dict[str, str] = {}

    def css(self) -> str:
        """Return CSS declarations for a style attribute. They contain no text from the codes except numbers."""
        looks = {name: value for name, value in self._set.items() if value}
        if "color" in looks and (looks["color"] in _BASIC or "background" not in looks):
            looks["color"] = _readable(looks["color"])
            return ";".join(tint(value) if name == "color" else f"{name}:{value}" for name, value in looks.items())
        return ";".join(f"{name}:{value}" for name, value in looks.items())

    def apply(self, parameters: str) -> None:
        """Apply one SGR code. `parameters` is the text between `ESC [` and `m`."""
        if not parameters:
            return
        codes = [int(code[-9:]) if code else 0 for code in parameters.replace(":", ";").split(";")]
        while codes:
            code = codes.pop(0)
            if code == 0:
                self._set.clear()
            elif code in _WEIGHTS:
                name, value = _WEIGHTS[code]
                self._set[name] = value
                if code == 22:
                    self._set.pop("opacity", None)
            elif code in (38, 48):
                self._set["color" if code == 38 else "background"] = _extended(codes)
            elif code in range(30, 38) or code in range(90, 98):
                self._set["color"] = _BASIC[code % 10]
            elif code in range(40, 48) or code in range(100, 108):
                self._set["background"] = _BASIC[code % 10] or "rgba(127,127,127,.25)"
            elif code in (39, 49):
                self._set.pop("color" if code == 39 else "background", None)


@functools.cache
def _readable(colour: str) -> str:
    """Return a colour of the same hue that is readable on white and on black, since the page may be light or dark."""
    if colour in _BASIC:
        return colour
    levels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    light = [level / 12.92 if level <= 0.04 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
    luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
    if luminance > _MEDIUM:
        light = [level * _MEDIUM / luminance for level in light]
    else:
        light = [level + (1 - level) * (_MEDIUM - luminance) / (1 - luminance) for level in light]
    levels = [level * 12.92 if level <= 0.003 else 1.055 * level ** (1 / 2.4) - 0.055 for level in light]
    return "#" + "".join(f"{round(255 * level):02x}" for level in levels)


_MEDIUM = 0.18  # the relative luminance whose contrast with white and with black is the same, about 4.6

_WEIGHTS = {
    1: ("font-weight", "bold"),
    2: ("opacity", ".75"),
    3: ("font-style", "italic"),
    4: ("text-decoration", "underline"),
    9: ("text-decoration", "line-through"),
    22: ("font-weight", ""),
    23: ("font-style", ""),
    24: ("text-decoration", ""),
    29: ("text-decoration", ""),
}


def _extended(codes: list[int]) -> str:
    """Read one of 256 colours (`5;N`) or a 24-bit colour (`2;R;G;B`) from `codes`, remove it there, and return it."""
    kind = codes.pop(0) if codes else 0
    if kind == 2 and len(codes) >= 3:
        red, green, blue = (min(codes.pop(0), 255) for _ in range(3))
    elif kind == 5 and codes:
        number = min(codes.pop(0), 255)
        if number < 16:
            return _BASIC[number % 8]
        if number < 232:
            levels = (0, 95, 135, 175, 215, 255)
            red, green, blue = (levels[(number - 16) // step % 6] for step in (36, 6, 1))
        else:
            red = green = blue = 8 + 10 * (number - 232)
    else:
        codes.clear()  # an invalid code: the numbers after it have no clear meaning
        return ""
    return f"#{red:02x}{green:02x}{blue:02x}"
