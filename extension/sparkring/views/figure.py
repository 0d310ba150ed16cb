"""Draws charts with matplotlib as pictures that stay in the notebook: a small PNG for each chart.

JupyterLab removes scripts and inline SVG from a notebook that it does not trust, but it keeps pictures. Some web pages
do the same. Where possible, names that users choose are written beside the picture, since the picture's font may lack
some of their letters.
"""

from __future__ import annotations

import base64
import bisect
import functools
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkring.history.curves import Curve, Mark
from sparkring.history.describe import change, dotted, duration, number
from sparkring.history.metrics import mean
from sparkring.runtime.packages import command
from sparkring.views.charts import best_words, colours, has_band, lacks_means, means, odd_spans, words
from sparkring.views.description import Bars, bars_top
from sparkring.views.markup import GREEN, GREY, RANK_COLOURS, RED, text, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 320, 165  # CSS pixels
POINTS = 100  # the most points of a curve; pictures with more points would be too large
PICTURES_BYTES = 80_000  # the largest size of all pictures together, in base64
# Each pair is the number of pixels per CSS pixel, and the number of colours in a picture's palette. A palette reduces
# the size of the picture to a quarter. The second pair is used if the pictures would otherwise be too large.
_QUALITIES = ((2, 48), (1, 24))
_DOTS_PER_INCH = 96  # CSS pixels per inch
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.5, 0.08, 0.08, 0.36  # inches beside a chart for its labels
FAINT = 0.35  # the opacity of what only the faster ranks have reported; also in panel/src/series.js
_RANK_APART = 0.08  # a rank is named if its line ends farther from the mean than this part of the height
_RC: dict[str, Any] = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "grid.color": GREY,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.5,
    "lines.solid_capstyle": "butt",
    "lines.scale_dashes": False,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
}


class Drawing(NamedTuple):
    """A function that draws into Axes, and the width of the picture in CSS pixels."""

    draw: Callable[[Axes], None]
    width: int = WIDTH


def figures(charts: Sequence[Sequence[Curve]], axis: str, marks: Sequence[Mark] = ()) -> str:
    """Return a <figure> for each chart, with an <img> or, if there is no picture, with a description of the chart."""
    drawn = pictures([Drawing(functools.partial(_chart, curves=curves, axis=axis, marks=marks)) for curves in charts])
    both = zip(charts, drawn, strict=True)
    return "".join(figure(_caption(curves, axis), picture, words(curves, axis)) for curves, picture in both)


def figure(caption: str, picture: str, words: str, width: int = WIDTH) -> str:
    """Return a <figure> with a picture and the HTML `caption`. `words` describe the picture."""
    return f"<figure>{caption}{_image(picture, text(words), width)}</figure>"


def _caption(curves: Sequence[Curve], axis: str) -> str:
    named = []
    for curve, colour in zip(curves, colours(curves), strict=False):
        values = dotted(number(curve.last) + change(curve.last, curve.before), best_words(curve, axis))
        named.append(f'<b style="{tint(colour)}">{text(curve.name)}</b> {values}')
    return f"<figcaption>{'<br>'.join(named)}</figcaption>"


def _image(picture: str, words: str, width: int) -> str:
    if not picture:
        advice = "" if importlib.util.find_spec("matplotlib") else f". {text(command('matplotlib'))} for a picture"
        return f"<div><small>{words}{advice}</small></div>"
    source = f"data:image/png;base64,{picture}"
    return f'<img alt="{words}" class="sr-figure" width="{width}" height="{HEIGHT}" src="{source}">'


def pictures(drawings: Sequence[Drawing]) -> list[str]:
    """Return drawings as PNGs in base64; '' for all of them if they are too large or matplotlib cannot draw them."""
    try:
        for quality in _QUALITIES:
            images = [base64.b64encode(png).decode() for png in _drawn(drawings, *quality)]
            if sum(map(len, images)) <= PICTURES_BYTES:
                return images
    except Exception:  # any error may result from the user's version of matplotlib, settings or fonts
        pass
    return [""] * len(drawings)


def _drawn(drawings: Sequence[Drawing], sharpness: int, colours: int) -> list[bytes]:
    import matplotlib
    import matplotlib.style

    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        matplotlib.style.use(["default", _RC])
        return [_png(drawing, sharpness, colours) for drawing in drawings]


def _png(drawing: Drawing, sharpness: int, colours: int) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    width, height = drawing.width / _DOTS_PER_INCH, HEIGHT / _DOTS_PER_INCH
    canvas = FigureCanvasAgg(Figure((width, height), dpi=_DOTS_PER_INCH * sharpness))
    inside = 1 - (_LEFT + _RIGHT) / width, 1 - (_TOP + _BOTTOM) / height
    drawing.draw(canvas.figure.add_axes((_LEFT / width, _BOTTOM / height, *inside)))
    canvas.draw()  # type: ignore[no-untyped-call]
    out = io.BytesIO()
    pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call]
    drawn = Image.frombuffer("RGBA", canvas.get_width_height(), pixels, "raw", "RGBA", 0, 1)
    drawn.quantize(colours, method=Image.Quantize.FASTOCTREE).save(out, "png", optimize=True)
    return out.getvalue()


def _chart(axes: Axes, curves: Sequence[Curve], axis: str, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.kind == "restart":
            axes.axvline(mark.x, color=RED, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.8)
        else:
            axes.axvline(mark.x, ymax=0.05, color=GREEN, linewidth=1.2)
    for first, last in odd_spans(curves):
        axes.axvspan(first, last, ymin=0.97, color=RED, linewidth=1)
    for curve, colour in zip(curves, colours(curves), strict=False):
        style: Any = (0, (4, 2)) if curve.name.startswith("val_") else "-"
        end = curve.points[-1]
        for rank, points in curve.ranks.items():
            shared = bisect.bisect(points, end.x, key=lambda point: point[0])
            for part, alpha in ((points[:shared], 0.8), (points[max(0, shared - 1) :], FAINT)):
                if part[1:]:
                    axes.plot(*zip(*part, strict=True), color=_rank_colour(rank), lw=0.7, ls=style, alpha=alpha)
        if curve.ghost[1:]:
            axes.plot(*zip(*means(curve.ghost), strict=True), color=colour, lw=1.4, ls=style, alpha=FAINT)
        for undone in curve.undone:
            axes.plot(*zip(*means(undone), strict=True), color=colour, lw=0.9, ls=(0, (1, 1.5)))
        if has_band(curve):
            for some, alpha in ((curve.points, 0.2), ((end, *curve.ahead), 0.2 * FAINT)):
                low, high = [point.value.low for point in some], [point.value.high for point in some]
                axes.fill_between(
                    [point.x for point in some], low, high, color=colour, alpha=alpha, linewidth=lacks_means(curve)
                )
        elif curve.ahead and not curve.ranks:
            axes.plot(*zip(*means((end, *curve.ahead)), strict=True), color=colour, lw=1.4, ls=style, alpha=FAINT)
        axes.plot(*zip(*means(curve.points), strict=True), color=colour, lw=1.4, ls=style)
        if curve.best is not None:
            axes.plot(*curve.best, "o", markersize=4, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1)
    _name_ranks(axes, curves)
    ticked(axes)
    values = {point.value.mean for curve in curves for point in curve.points if math.isfinite(point.value.mean)}
    if len(values) == 1:
        axes.set_yticks([*values])
    axes.set_xlabel(axis, labelpad=1)


def many_curves(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], looks: Sequence[dict[str, Any]]) -> None:
    """Draw the curves of items or trials. A curve consists of pairs of x and y, and each curve has its own look."""
    for curve, look in zip(curves, looks, strict=True):
        dot: dict[str, Any] = {} if curve[1:] else {"marker": "o", "markersize": 2.5}
        axes.plot(*zip(*curve, strict=True), **look, **dot) if curve else None
    ticked(axes)


def stacked_bars(axes: Axes, bars: Bars) -> None:
    """Draw the parts of the bars that are shown, one above the other. The names of the bars are numbers."""
    from matplotlib.ticker import MaxNLocator

    table = bars.table
    names, places = table.column(table.columns[0].name), range(len(table.rows))
    bottoms = [0.0] * len(places)
    for part in bars.parts:
        if part.shown:
            heights = table.column(part.name)
            axes.bar(places, heights, width=0.8, bottom=bottoms, color=part.colour, linewidth=0)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    column, marked = bars.marked
    for at, cell in enumerate(table.column(column)):
        if cell == marked:
            axes.axvspan(at - 0.4, at + 0.4, ymax=0.03, color=RED, linewidth=0)
    top = bars_top(bottoms)
    axes.set_ylim(0, 1.05 * top or 1)
    for at, height in enumerate(bottoms):
        if height > top:
            box = {"facecolor": GREY, "pad": 1, "linewidth": 0}
            axes.text(at, top, duration(height), ha="center", va="top", fontsize=6.5, color="white", bbox=box)
    slots = max(len(places), bars.slots)
    axes.set_xlim(-0.8, slots - 0.2)
    ticked(axes)
    round_names = MaxNLocator(max(1, 5 * len(names) // slots), integer=True).tick_values(min(names), max(names))
    ticks = {at: f"{name}" for at, name in enumerate(names) if name in round_names}
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_xlabel(table.columns[0].title, labelpad=1)


def ticked(axes: Axes) -> None:
    """Give the axes a few ticks at round numbers (whole numbers on the horizontal axis), and horizontal lines."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="y")


def _name_ranks(axes: Axes, curves: Sequence[Curve]) -> None:
    """Name the ranks whose lines end highest and lowest, if these ends are far from the mean."""
    low, high = axes.get_ylim()
    for curve in curves:
        finite = {rank: [point for point in points if math.isfinite(point[1])] for rank, points in curve.ranks.items()}
        ends = sorted((points[-1][1], rank, points[-1][0]) for rank, points in finite.items() if points)
        middle = mean([value for value, *_ in ends]) if ends else 0.0
        for value, rank, x in {ends[0], ends[-1]} if ends else ():
            if abs(value - middle) > _RANK_APART * (high - low):
                axes.annotate(
                    f"rank {rank}", (x, value), (0, 2), textcoords="offset points",
                    ha="right", va="bottom", fontsize=6.5, color=_rank_colour(rank),
                )  # fmt: skip


def _rank_colour(rank: int) -> str:
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
