"""matplotlib's backend on a rank, set by displays.py. It draws like Agg, and plt.show() displays the open figures."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from sparkring.worker.rank.displays import display

__all__ = ["FigureCanvas", "show"]


def show(*, block: bool | None = None) -> None:
    """Pass the open figures to display(), and close them."""
    for number in plt.get_fignums():
        display(plt.figure(number))
    plt.close("all")
