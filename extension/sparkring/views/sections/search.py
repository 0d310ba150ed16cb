"""The section on a search: pictures of the trials' curves, of the best value so far, and of the trials' parameters."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sparkring.history import describe
from sparkring.history.events import Searched
from sparkring.history.item_records import ItemRecord, SearchRecord
from sparkring.history.record import RunRecord
from sparkring.views.figure import WIDTH, Drawing, figure, many_curves, pictures, ticked
from sparkring.views.markup import AMBER, BLUE, GREEN, GREY, RED, paragraph, text
from sparkring.views.sections import Form

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A value that is more than FAR times as far from the best value as the worse quartile is drawn at the chart's edge.
FAR = 2
EQUAL = 1e-9  # values whose relative difference is at most this are drawn as equal
CURVES_SHOWN = 1_000
_LABEL = 12  # the most characters of a choice that an axis shows
WHOLE = ("finished", "kept")
SLICES = 6  # the most parameters over which the values are drawn
SCALE = "blue is good, red is bad"
# The kinds of trials: the name of the colour, which the legend explains, and the colour. Later kinds are drawn over
# earlier ones.
KINDS = {"pruned": ("grey", GREY), "finished": ("blue", BLUE), "running": ("green", GREEN), "best": ("orange", AMBER)}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the pictures of a search that has ended; '' during the search, because the live panel then draws them."""
    search = None if record.items is None else record.items.search
    if record.items is None or search is None or form != "final":
        return ""
    known = [item for item in record.items.known if item.state != "failed"]
    trials = [item for item in known if math.isfinite(item.metrics.get(search.metric, math.nan))]
    if not trials:
        return ""
    best = -1 if search.best is None else search.best[0]
    order = sorted(trials[-CURVES_SHOWN:], key=lambda trial: [*KINDS].index(kind(trial, best)))
    kinds = [kind(trial, best) for trial in order]
    looks = [_LOOKS.get(name, {"lw": 0.7, "alpha": 0.7}) | {"color": KINDS[name][1]} for name in kinds]
    metric = text(search.metric)
    ended = [trial for trial in order if trial.state in WHOLE]
    sliced = search.parameters[:SLICES] if ended else ()
    curves, history, parameters, *slices = pictures(
        [
            Drawing(lambda axes: _curves(axes, search, order, looks)),
            Drawing(lambda axes: _history(axes, search, trials)),
            Drawing(lambda axes: _parameters(axes, search, order, looks), 2 * WIDTH),
            *(
                Drawing(functools.partial(_slice, search=search, parameter=parameter, trials=ended))
                for parameter in sliced
            ),
        ]
    )
    words = f"{', '.join(parameter.name for parameter in search.parameters)} and {search.metric} of all trials"
    coloured = f", coloured by <b>{metric}</b>: {SCALE}"
    drawn = [
        figure(f"<figcaption>best <b>{metric}</b> by trial</figcaption>", history, describe.best_trial(record)),
        figure(f"<figcaption>parameters{coloured}</figcaption>", parameters, words, 2 * WIDTH),
        *(
            figure(f"<figcaption><b>{metric}</b> by {text(parameter.name)}</figcaption>", picture, "finished trials")
            for parameter, picture in zip(sliced, slices, strict=True)
        ),
    ]
    if any(trial.curves.get(search.metric, ())[1:] for trial in order):  # otherwise, the curves would be points
        caption = f"<figcaption><b>{metric}</b> by step or epoch</figcaption>"
        drawn.insert(0, figure(caption, curves, f"{search.metric} of all trials"))
    code = describe.best_parameters(record)
    words = describe.dotted(describe.best_trial(record), code)
    below = paragraph(describe.importance(record)) + paragraph(legend(kinds))
    return f'<div class="sr-charts">{paragraph(words if code else "")}{"".join(drawn)}{below}</div>'


_LOOKS: dict[str, dict[str, Any]] = {"best": {"lw": 1.6}, "finished": {"lw": 0.8, "alpha": 0.6}}


def kind(trial: ItemRecord, best: int) -> str:
    """Return the kind of a trial, a key of KINDS. `best` is the number of the best trial."""
    if trial.item == best:
        return "best"
    return "finished" if trial.state in WHOLE else "running" if trial.state == "running" else "pruned"


def legend(kinds: Iterable[str]) -> str:
    """Explain the colours of these kinds of trials: `grey: pruned · blue: finished`."""
    shown = set(kinds)
    return describe.dotted(*(f"{colour}: {name}" for name, (colour, _) in KINDS.items() if name in shown))


def extent(values: Sequence[float], mode: str) -> tuple[float, float]:
    """Return the lowest and the highest value that a chart shows. Its twin is in panel/src/search.js."""
    finite = sorted(filter(math.isfinite, values))
    if not finite:
        return 0.0, 1.0
    low, high = finite[0], finite[-1]
    worse = finite[math.floor((0.75 if mode == "min" else 0.25) * (len(finite) - 1) + 0.5)]
    if mode == "min" and worse > low:
        high = min(high, low + FAR * (worse - low))
    if mode == "max" and worse < high:
        low = max(low, high - FAR * (high - worse))
    equal = high - low <= EQUAL * max(abs(low), abs(high))
    return (low - 0.5, high + 0.5) if equal else (low, high)


def curves_extent(curves: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the lowest and the highest value that a chart of curves shows. Its twin is in panel/src/search.js.

    Whole curves are compared, since curves of which most values are near the best one may begin far from it. Only what
    is far outside the range of 95 % of the curves, but of at most all but one, is outside the chart.
    """
    lows, highs = [sorted(pick(curve) for curve in curves if curve) for pick in (min, max)]
    if not lows:
        return extent((), "min")
    last = len(lows) - 1
    low, high = lows[min(last, math.ceil(0.05 * last))], highs[math.floor(0.95 * last)]
    far = FAR * (high - low) if high > low else math.inf
    return extent([max(lows[0], low - far), min(highs[-1], high + far)], "")


def _curves(axes: Axes, search: SearchRecord, trials: Sequence[ItemRecord], looks: Sequence[dict[str, Any]]) -> None:
    curves = [trial.curves.get(search.metric, ()) for trial in trials]
    many_curves(axes, curves, looks)
    axes.set_ylim(*wider(curves_extent([[value for _, value in curve] for curve in curves])))


def _history(axes: Axes, search: SearchRecord, trials: Sequence[ItemRecord]) -> None:
    low, high = extent(_final_values(search, trials), search.mode)
    ended = [trial for trial in trials if trial.state in WHOLE]  # the last values of the others are no final ones
    values = [min(max(trial.metrics[search.metric], low), high) for trial in ended]
    axes.plot([trial.item for trial in ended], values, ls="", marker="o", markersize=2.5, color=BLUE, alpha=0.7)
    better = min if search.mode == "min" else max
    so_far = itertools.accumulate((trial.metrics[search.metric] for trial in ended), better)
    axes.step([trial.item for trial in ended], list(so_far), where="post", color=AMBER, lw=1.4)
    axes.set_ylim(*wider((low, high)))
    ticked(axes)
    axes.set_xlabel("trial", labelpad=1)


def _final_values(search: SearchRecord, trials: Sequence[ItemRecord]) -> list[float]:
    """Return the values of the trials that have finished; if none has, those of all trials."""
    whole = [trial for trial in trials if trial.state in WHOLE]
    return [trial.metrics[search.metric] for trial in whole or trials]


def wider(bounds: tuple[float, float]) -> tuple[float, float]:
    """Return wider bounds, so that curves do not touch the edge of a chart."""
    low, high = bounds
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _parameters(
    axes: Axes, search: SearchRecord, trials: Sequence[ItemRecord], looks: Sequence[dict[str, Any]]
) -> None:
    low, high = extent(_final_values(search, trials), search.mode)
    metric = Searched(search.metric, low, high)
    columns = [*search.parameters, metric]
    for trial, look in zip(trials, looks, strict=True):
        places = [place(parameter, trial.parameters.get(parameter.name, "")) for parameter in search.parameters]
        inside = min(max(trial.metrics[search.metric], low), high)
        colour = look["color"] if look["color"] == AMBER else scale(goodness(search, (low, high), inside))
        axes.plot(range(len(columns)), [*places, place(metric, inside)], **look | {"color": colour})
    for x, column in enumerate(columns):
        axes.plot([x, x], [0, 1], color=GREY, lw=0.8)
        axes.text(x, 1.16, column.name[: 2 * _LABEL], ha="center", va="bottom", weight="bold", parse_math=False)
        small: dict[str, Any] = {"fontsize": 6.5, "parse_math": False}
        if not column.choices:  # the numbers are outside the ends of the axis, where no lines cross them
            axes.text(x, -0.04, describe.number(column.low), ha="center", va="top", **small)
            axes.text(x, 1.03, describe.number(column.high), ha="center", va="bottom", **small)
        for at, choice in enumerate(column.choices):
            height = at / (len(column.choices) - 1) if len(column.choices) > 1 else 0.5
            axes.text(x, height, f"{choice[:_LABEL]} ", ha="right", va="center", **small)
    axes.set_axis_off()
    axes.set_xlim(-0.5 if columns[0].choices else -0.2, len(columns) - 0.8)
    axes.set_ylim(-0.02, 1.28)


def _slice(axes: Axes, search: SearchRecord, parameter: Searched, trials: Sequence[ItemRecord]) -> None:
    """Draw the values of finished trials over one parameter."""
    low, high = extent(_final_values(search, trials), search.mode)
    inside = [min(max(trial.metrics[search.metric], low), high) for trial in trials]
    places = [place(parameter, trial.parameters.get(parameter.name, "")) for trial in trials]
    axes.scatter(
        places, inside, s=8, color=[scale(goodness(search, (low, high), value)) for value in inside], alpha=0.8
    )
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(*wider((low, high)))
    ticked(axes)
    ends = [parameter.low, parameter.high] if not parameter.choices else [*parameter.choices]
    axes.set_xticks([place(parameter, end) for end in ends])
    axes.set_xticklabels(
        [end[:_LABEL] if isinstance(end, str) else describe.number(end) for end in ends], parse_math=False
    )


def goodness(search: SearchRecord, bounds: tuple[float, float], value: float) -> float:
    """Return how good a value is, from 0 (the worst that a chart shows) to 1 (the best)."""
    share = (value - bounds[0]) / (bounds[1] - bounds[0])
    return 1 - share if search.mode == "min" else share


def scale(good: float) -> str:
    """Return the colour of a value: a mixture of BLUE, if it is good, and RED. Its twin is in panel/src/search.js."""
    mixed = (round(int(BLUE[at : at + 2], 16) * good + int(RED[at : at + 2], 16) * (1 - good)) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def place(parameter: Searched, value: float | str) -> float:
    """Return a value's position on a parameter's axis, from 0 (the lower end) to 1; NaN if it is not on the axis."""
    if parameter.choices:
        written = str(value)
        index = next((at for at, choice in enumerate(parameter.choices) if choice == written), None)
        return math.nan if index is None else index / (len(parameter.choices) - 1) if parameter.choices[1:] else 0.5
    if isinstance(value, str):
        return math.nan
    if parameter.low == parameter.high:
        return 0.5
    if parameter.log:
        return math.log(value / parameter.low) / math.log(parameter.high / parameter.low)
    return (value - parameter.low) / (parameter.high - parameter.low)
