"""The backend of matplotlib on a rank. It draws like the backend Agg, and plt.show() displays the open figures.

displays.py sets this module's name as the backend. matplotlib then imports it, and uses its `FigureCanvas` and `show`.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from sparkring.worker.rank.displays import display

__all__ = ["FigureCanvas", "forget", "show"]


def show(*, block: bool | None = None) -> None:
    """Pass the open figures to display(), and close them."""
    for number in plt.get_fignums():
        display(plt.figure(number))
    forget()


def forget() -> None:
    """Close the figures that are open."""
    plt.close("all")
