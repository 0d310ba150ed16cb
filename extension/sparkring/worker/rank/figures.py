"""matplotlib's backend on a rank: it draws like Agg, and plt.show() passes the open figures to display().

matplotlib imports this module by its name, and uses its `FigureCanvas` and `show`.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from sparkring.worker.rank.displays import display

__all__ = ["FigureCanvas", "forget", "show"]


def show(*, block: bool | None = None) -> None:
    """Show the figures that are open, and close them."""
    for number in plt.get_fignums():
        display(plt.figure(number))
    forget()


def forget() -> None:
    """Close the figures that are open."""
    plt.close("all")
