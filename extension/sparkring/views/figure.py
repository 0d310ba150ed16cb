"""The curves of a run as a picture that stays in the notebook: an SVG that matplotlib draws.

A page that strips inline SVG, as JupyterLab does with a notebook that it does not trust, keeps a picture.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkring.history.describe import first_line, number
from sparkring.history.lines import plain
from sparkring.history.metrics import Curve, Mark
from sparkring.views.curves import COLOURS, words
from sparkring.views.markup import GREEN, GREY, RED, image, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_BYTES = 40_000  # as it stands in the page
NAME_CHARACTERS = 28
_COLUMNS, _WIDTH, _HEIGHT = 2, 3.4, 2.1  # inches of 72 points
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.52, 0.1, 0.26, 0.38  # what a chart leaves for its labels
_POINTS = (1_200, 400)  # of all lines together; fewer where those take too much room
_RANK_APART = 0.08  # of the height: a rank whose line ends so far from the mean is named
_RC: dict[str, Any] = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "grid.color": GREY,
    "grid.alpha": 0.22,
    "grid.linewidth": 0.5,
    "lines.solid_capstyle": "butt",
    "lines.scale_dashes": False,
    "svg.fonttype": "none",  # text as text: small, and every script has its letters
    "svg.hashsalt": "sparkring",
    "text.color": GREY,
    "text.parse_math": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
}


def figure(charts: Sequence[Sequence[Curve]], axis: str, marks: Sequence[Mark] = ()) -> str:
    """An <img> of one chart beside the other; '' if it would be too large, or matplotlib cannot draw it."""
    said = text("; ".join(words(curves, axis) for curves in charts))
    for points in _POINTS:
        try:
            drawn = _small(_svg(charts, axis, marks, points))
        except Exception:  # its version, its settings and its fonts are the user's
            return ""
        found = image(drawn, said, ' class="sr-figure"')
        if len(found) <= FIGURE_BYTES:
            return found
    return ""


def _svg(charts: Sequence[Sequence[Curve]], axis: str, marks: Sequence[Mark], points: int) -> str:
    import matplotlib
    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    lines = sum(len(curve.ranks) or 2 for curves in charts for curve in curves) + sum(map(len, charts))
    most = max(6, points // lines)
    out = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")  # of letters that its own font lacks: the reader's will have them
        matplotlib.style.use(["default", _RC])
        drawn = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows))
        FigureCanvasSVG(drawn)
        for at, curves in enumerate(charts):
            row, column = divmod(at, columns)
            left, bottom = (column + _LEFT / _WIDTH) / columns, (rows - 1 - row + _BOTTOM / _HEIGHT) / rows
            width, height = 1 - (_LEFT + _RIGHT) / _WIDTH, 1 - (_TOP + _BOTTOM) / _HEIGHT
            _chart(drawn.add_axes((left, bottom, width / columns, height / rows)), curves, axis, marks, most)
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue().decode()


def _chart(axes: Axes, curves: Sequence[Curve], axis: str, marks: Sequence[Mark], most: int) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    for mark in marks:
        if mark.kind == "restart":
            axes.axvline(mark.x, color=RED, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.8)
        else:
            axes.axvline(mark.x, ymax=0.05, color=GREEN, linewidth=1.2)
    for curve, colour in zip(curves, COLOURS, strict=False):
        style: Any = (0, (4, 2)) if curve.name.startswith("val_") else "-"
        for rank in curve.ranks:
            axes.plot(*zip(*_some(rank.points, most), strict=True), color=colour, lw=0.5, ls=style, alpha=0.6)
        for undone in curve.undone:
            axes.plot(*zip(*_some(_means(undone), most), strict=True), color=colour, lw=0.9, ls=(0, (1, 1.5)))
        points = _some(curve.points, most)
        if not curve.ranks and any(point.value.differs for point in points):
            low, high = [point.value.low for point in points], [point.value.high for point in points]
            axes.fill_between([point.x for point in points], low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(*zip(*_means(points), strict=True), color=colour, lw=1.4, ls=style)
    _name_ranks(axes, curves)
    for at, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        said = f"{first_line(curve.name, NAME_CHARACTERS)} {number(curve.last)}"
        place: Any = ("left", "right")[at]
        axes.set_title(said, loc=place, color=colour, fontsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    values = {mean for curve in curves for _, mean in _means(curve.points)}
    axes.yaxis.set_major_locator(MaxNLocator(4) if len(values) > 1 else FixedLocator([*values]))
    axes.grid(axis="y")
    axes.set_xlabel(plain(axis), labelpad=1)


def _name_ranks(axes: Axes, curves: Sequence[Curve]) -> None:
    """Say at its end which rank a line is, if it ends well apart from the mean."""
    low, high = axes.get_ylim()
    for curve, colour in zip(curves, COLOURS, strict=False):
        ends = sorted((rank.points[-1][1], rank.rank, rank.points[-1][0]) for rank in curve.ranks)
        for value, rank, x in {ends[0], ends[-1]} if ends else ():
            if abs(value - curve.points[-1].value.mean) > _RANK_APART * (high - low):
                axes.annotate(
                    f"rank {rank}", (x, value), (0, 2), textcoords="offset points",
                    ha="right", va="bottom", fontsize=6.5, color=colour,
                )  # fmt: skip


def _means(points: Sequence[Any]) -> list[tuple[float, float]]:
    return [(point.x, point.value.mean) for point in points]


def _some(points: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the points, the last among them."""
    stride = -(-len(points) // most)
    return list(points[::-stride][::-1])


def _small(svg: str) -> str:
    """The picture without what a page has no need of: a tenth of a pixel is seen, a millionth is not."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    looks: dict[str, str] = {}
    svg = re.sub(r"<[^>]+>", lambda tag: _small_tag(tag[0], looks), svg)  # what stands between them is a user's
    # The reader may have other fonts.
    rules = "".join(f".{name}{{{look}}}" for look, name in looks.items())
    svg = svg.replace("*{", f"{rules}*{{font-family:'DejaVu Sans',Verdana,sans-serif;", 1)
    return re.sub(r">\s+<", "><", svg)


def _small_tag(tag: str, looks: dict[str, str]) -> str:
    tag = re.sub(r" id=\"[a-z2._]+_\d+\"| transform=\"rotate\(-?0 [^\"]*\"|font-family: 'DejaVu Sans'; ?", "", tag)
    tag = re.sub(r"(\.\d\d)\d+", r"\1", tag)
    tag = re.sub(r'style="([^"]+)"', lambda style: f'class="{looks.setdefault(style[1], f"c{len(looks)}")}"', tag)
    return re.sub(r'(?<= d=")[^"]+', lambda path: _small_path(path[0]), tag)


def _small_path(path: str) -> str:
    path = re.sub(r"(\.\d)\d", r"\1", " ".join(path.split()))
    return path if re.search("[CQS]", path) else path.replace(" L", "")  # lines are what follows M
