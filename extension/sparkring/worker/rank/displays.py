"""Implements display(), plt.show() and displayHTML() on ranks.

The text of a displayed value is printed to the rank's stdout, so it appears in the log. The richest form of the value
that a notebook can show, such as HTML or an image, is sent to the driver. IPython, matplotlib and tqdm are patched when
the cell imports them.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sparkring.runtime.report import DISPLAY_BYTES, DISPLAY_TEXT_CHARACTERS
from sparkring.wire.messages import Displayed, DisplayType
from sparkring.worker.rank.imports import when_imported

Send = Callable[[Displayed], None]

# The forms that can be shown, in order of preference, and the method that IPython calls to get a value in each form.
_METHODS: dict[DisplayType, str] = {
    "text/html": "_repr_html_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "image/gif": "",  # IPython has no method for this; an IPython.display.Image returns it from _repr_mimebundle_()
    "image/webp": "",
    "image/svg+xml": "_repr_svg_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
}
# The forms that are bytes. The methods of a value may also return them as base64 text.
_BINARY = frozenset(kind for kind in _METHODS if kind.startswith("image/") and kind != "image/svg+xml")
_BACKEND = "module://sparkring.worker.rank.figures"

_send: Send | None = None
_shown = 0  # how many displays this request has had
_numbers: dict[str, int] = {}  # for each display_id, the number of the display that has it
_clears = False  # whether the next display replaces all earlier displays


def connect(send: Send) -> None:
    """From now on, call `send(message)` for everything that is displayed."""
    global _send
    _send = send
    when_imported("IPython.core.display_functions", _replace_ipythons)
    when_imported("tqdm.notebook", _print_bars)


def draw_figures() -> None:
    """Make matplotlib pass its figures to display() once the cell imports it, unless the user chose a backend.

    Processes that the rank starts inherit the environment variable, but cannot display anything. So the variable names
    Agg, which only draws into files, and the rank itself changes to its own backend.
    """
    chosen = os.environ.get("MPLBACKEND", "")
    if not chosen or chosen.startswith("module://"):
        os.environ["MPLBACKEND"] = "Agg"
        when_imported("matplotlib", _use_our_backend)


def begin() -> None:
    """Begin a request: count its displays from 1, and close the figures that earlier requests left open."""
    global _shown, _clears
    _shown, _clears = 0, False
    _numbers.clear()
    figures = sys.modules.get("sparkring.worker.rank.figures")
    if figures is not None:
        figures.plt.close("all")


def finish() -> None:
    """Show the figures that are still open at the end of the cell, as a notebook does. Print drawing errors."""
    figures = sys.modules.get("sparkring.worker.rank.figures")
    if figures is not None:
        try:
            figures.show()
        except Exception:  # drawing may raise any error
            import traceback

            _print(traceback.format_exc())


# ── What the cell calls ───────────────────────────────────────────────────────────────────────────────────────────────


class DisplayHandle:
    """The result of display(…, display_id=…). Its update() shows another value in place of the first."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def display(self, value: object, **options: Any) -> None:
        display(value, display_id=self.display_id, **options)

    def update(self, value: object, **options: Any) -> None:
        update_display(value, display_id=self.display_id, **options)


def display(
    *values: Any,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    raw: bool = False,
    display_id: str | bool | None = None,
    update: bool = False,
    clear: bool = False,
    **_: Any,
) -> DisplayHandle | None:
    """Show values in the notebook, marked with this rank's number. The arguments are those of IPython's display()."""
    if clear:
        clear_output()
    handle = None
    if display_id:
        handle = DisplayHandle(display_id if isinstance(display_id, str) else os.urandom(16).hex())
    for value in values:
        if not raw and hasattr(type(value), "_ipython_display_"):
            value._ipython_display_()
            continue
        forms = dict(value) if raw else _bundle(value, include)
        kept = {
            kind: data
            for kind, data in forms.items()
            if kind == "text/plain" or ((not include or kind in include) and kind not in (exclude or ()))
        }
        _show(kept, handle.display_id if handle else "", update=update)
    return handle


def update_display(value: object, *, display_id: str, **options: Any) -> None:
    """Replace what was shown with this `display_id`."""
    display(value, display_id=display_id, update=True, **options)


def clear_output(wait: bool = False) -> None:
    """Clear this rank's displays as soon as the rank displays something new. `wait` is ignored."""
    global _clears
    _clears = True


def publish_display_data(data: Mapping[str, Any], *_: Any, transient: Any = None, **options: Any) -> None:
    """Show one value. `data` holds the forms of the value, by MIME type."""
    display_id = (transient or {}).get("display_id")
    display(data, raw=True, display_id=display_id, update=bool(options.get("update")))


def display_html(html: str) -> None:
    """Show HTML, as displayHTML() does on Databricks."""
    display({"text/html": html, "text/plain": "<HTML>"}, raw=True)


# ── The forms of a value ──────────────────────────────────────────────────────────────────────────────────────────────


def _bundle(value: object, include: Collection[str] | None) -> dict[str, Any]:
    """Return the forms of a value by MIME type. A form is left out if the value's method for it raises an error."""
    forms: dict[str, Any] = {"text/plain": _repr(value)}
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if figure is not None and isinstance(value, figure):
        forms["image/png"] = png(value)
        forms["text/plain"] = _titled(forms["text/plain"], value)
        return forms
    bundle = _call(value, "_repr_mimebundle_", include=include, exclude=None)
    if isinstance(bundle, Mapping):
        forms.update(bundle)
    for kind, method in _METHODS.items():
        if method and kind not in forms:
            data = _call(value, method)
            if data is not None:
                forms[kind] = data
                if not _has_scripts(forms):
                    break  # _richest() would not choose the forms that follow
    return forms


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as a PNG image, drawn as the notebook's inline backend draws it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=figure.dpi, bbox_inches="tight")
    return picture.getvalue()


def _titled(text: str, figure: Any) -> str:
    """Return the repr of a matplotlib figure with the figure's titles: `<Figure size 640x480 with 1 Axes: loss>`.

    It becomes the alt text of the picture.
    """
    titles = [figure.get_suptitle()] if hasattr(figure, "get_suptitle") else []  # since matplotlib 3.8
    titles += [axes.get_title() for axes in figure.axes]
    joined = "; ".join(dict.fromkeys(" ".join(title.split()) for title in titles if title.strip()))
    return f"{text[:-1]}: {joined}>" if joined and text.endswith(">") else text


def _call(value: object, method: str, **arguments: Any) -> Any:
    form = getattr(type(value), method, None)
    if form is None:
        return None
    try:
        data = form(value, **arguments)
    except Exception:  # this is the user's own code; the value's other forms remain
        return None
    return data[0] if isinstance(data, tuple) and data else data  # the second item of a pair is metadata


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # the user's own __repr__
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"


def _has_scripts(bundle: Mapping[str, Any]) -> bool:
    """Return whether the bundle's HTML contains scripts, which the notebook would not run."""
    return "<script" in str(bundle.get("text/html", "")).lower()


def _richest(bundle: Mapping[str, Any]) -> tuple[DisplayType, bytes] | None:
    """Return the most preferred form in the bundle, as its MIME type and bytes; None if no form can be shown.

    HTML that contains scripts is chosen only if there is no other form, such as a picture.
    """
    kinds = [kind for kind in _METHODS if bundle.get(kind)]
    if _has_scripts(bundle):
        kinds = [*kinds[1:], "text/html"]
    for kind in kinds:
        data = bundle[kind]
        if kind in _BINARY and isinstance(data, str):
            try:
                return kind, base64.b64decode(data)
            except binascii.Error:
                continue
        return kind, bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else str(data).encode()
    return None


def _show(bundle: Mapping[str, Any], display_id: str, *, update: bool) -> None:
    global _shown, _clears
    text = str(bundle.get("text/plain", "")) or f"<{', '.join(bundle)}>"
    richest = _richest(bundle)
    if richest is None or not update:  # for an update, the text is printed only if the driver gets no other form
        _print(text)
    if richest is None or _send is None:
        return
    known = _numbers.get(display_id) if update else None
    if known is None:
        known = _shown = _shown + 1
        if display_id:
            _numbers[display_id] = known
    kind, data = richest
    sent = data if len(data) <= DISPLAY_BYTES else b""
    message = Displayed(known, kind, sent, text[:DISPLAY_TEXT_CHARACTERS], len(data), _clears)
    _clears = False
    _send(message)


def _print(text: str) -> None:
    if sys.stdout is not None:
        try:
            print(text, flush=True)
        except (OSError, ValueError):
            pass  # the user closed the stream


# ── Other libraries' ways to show something ───────────────────────────────────────────────────────────────────────────


def _replace_ipythons(module: Any) -> None:
    """Replace IPython's display functions. On a rank, IPython has no shell, so its own functions would only print."""
    for ours in (display, update_display, clear_output, publish_display_data):
        setattr(module, ours.__name__, ours)


def _use_our_backend(module: Any) -> None:
    if os.environ.get("MPLBACKEND") == "Agg":  # otherwise, the cell has chosen a backend
        module.rcParams["backend"] = _BACKEND


def _print_bars(module: types.ModuleType) -> None:
    """Replace tqdm's bars for notebooks, which are widgets and need a kernel, with tqdm's bars for terminals."""
    std: Any = module.std_tqdm

    class tqdm_notebook(std):  # type: ignore[misc]
        """tqdm's bar as text."""

        def __init__(self, *arguments: Any, display: bool = True, **options: Any) -> None:
            super().__init__(*arguments, **options)

    module.__dict__.update(tqdm_notebook=tqdm_notebook, tqdm=tqdm_notebook)
