"""Makes HTML in which texts of users and ranks are escaped, and turns it into the form that a notebook saves."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from sparkring.history.lines import coloured, plain

# Mid-tones, which can be read on a light page and on a dark one.
BLUE, GREEN, RED, AMBER = "#2f80d0", "#23935a", "#dd4a45", "#b97a10"
RANK_COLOURS = (BLUE, GREEN, AMBER, "#9262d6", "#d0528f", "#16908f", "#7d8a1e", "#cf6a32")

# The colours of text in images, which cannot have the page's text colour; GREY is readable on white and on black.
GREY, GREY_ON_DARK = "#767676", "#b4b4b4"


def text(value: str) -> str:
    """Any text as HTML: without colours, with hidden characters made visible and markup escaped."""
    return escape(plain(value))


def enclosed(body: str, run_id: str = "") -> str:
    """Wrap HTML as an output of a notebook; the live panel's script finds the output of `run_id`, and hides it.

    Untrusted notebooks, and notebooks on the web, lose <style> and <svg>. So the rules of style.css become inline
    styles, and each drawing becomes an image. The classes keep MathJax 3 and 2 from typesetting text between dollar
    signs.
    """
    mark = f' data-sparkring-static="{text(run_id)}"' if run_id else ""
    body = _DRAWING.sub(lambda drawing: _image(drawing[0]), body)
    return _inliner()(f'<div class="sr-run mathjax_ignore tex2jax_ignore"{mark}>{body}</div>')


@functools.cache
def _inliner() -> Callable[[str], str]:
    """The function that turns the rules of style.css into inline styles; made on first use, as the import is slow."""
    import css_inline

    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    inliner = css_inline.CSSInliner(inline_style_tags=False, load_remote_stylesheets=False, minify_css=True)
    return lambda html: inliner.inline_fragment(html, style)


_DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_SVG_STYLE = (
    f"<style>svg{{color:{GREY};font-family:system-ui,sans-serif}}"
    f"@media(prefers-color-scheme:dark){{svg{{color:{GREY_ON_DARK}}}}}</style>"
)


def _image(svg: str) -> str:
    """A drawing as an <img>, with a text alternative instead of titles, which images cannot show."""
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
    """A drawing in the colour of the text around it; `words` say what it shows."""
    return (
        f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{text(words)}" font-size="{font_size:g}" fill="currentColor">{"".join(parts)}</svg>'
    )


def tint(colour: str) -> str:
    """CSS for text in this colour, mixed with the page's text colour: dark enough on light pages, light enough on dark.

    JupyterLab's sanitiser removes color-mix; the plain colour is left.
    """
    return f"color:{colour};color:color-mix(in srgb,{colour} {TINT},currentColor)"


TINT = "65%"


def note(said: str) -> str:
    """A line in small letters; '' if there is nothing to say."""
    return f"<div><small>{text(said)}</small></div>" if said else ""


def warning(said: str) -> str:
    """A line with a warning; '' if there is nothing to say."""
    return f'<div><b style="{tint(AMBER)}">⚠ {text(said)}</b></div>' if said else ""


def advised(lines: Iterable[str]) -> str:
    """What to do, as a list; '' if there is nothing."""
    told = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="sr-advice">{told}</ul>' if told else ""


def scrolled(body: str, words: str) -> str:
    """A box that scrolls if its content is long, also by keyboard."""
    return f'<div class="sr-scroll" role="group" tabindex="0" aria-label="{text(words)}">{body}</div>' if body else ""


def details(title: str, body: str) -> str:
    """`body`, folded away under `title`; '' if there is no body."""
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""


def log_text(line: str) -> str:
    """A line that a rank printed, with its colours as spans, or without colours if it has too many."""
    pieces = coloured(line)
    if len(pieces) > _PIECES:
        return text(line)
    colours = Colours()
    found = []
    for code, piece in pieces:
        colours.apply(code)
        style = colours.css()
        found.append(f'<span style="{style}">{escape(piece)}</span>' if style and piece else escape(piece))
    return "".join(found)


_PIECES = 60
# The colours of a terminal, normal and bright ones alike. Black becomes grey, and white becomes the text's own colour.
_BASIC = ("#767676", RED, GREEN, AMBER, BLUE, "#b557c8", "#16908f", "")


class Colours:
    """The colours and weights that SGR codes have switched on so far."""

    def __init__(self) -> None:
        self._set: dict[str, str] = {}

    def css(self) -> str:
        """Declarations for a style attribute; made of our own words and of numbers only."""
        return ";".join(
            tint(value) if name == "color" and value in _BASIC else f"{name}:{value}"
            for name, value in self._set.items()
            if value
        )

    def apply(self, parameters: str) -> None:
        """Apply one SGR code, whose parameters are the text between `ESC [` and `m`."""
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
    """One of 256 colours (`5;N`), or a 24-bit colour (`2;R;G;B`); removes from `codes` what it has used."""
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
        codes.clear()  # a broken code: what follows cannot be understood
        return ""
    return f"#{red:02x}{green:02x}{blue:02x}"
