"""Ways to show a run. Everything that a view shows comes from a RunRecord.

Ranks also import this module, on executors that may lack the libraries for drawing. Therefore, modules that draw are
imported only when they are used.
"""

from __future__ import annotations

import sys

from sparkring.history.record import RunRecord
from sparkring.history.view import Controls
from sparkring.history.view import View as View
from sparkring.runtime.kernel import write
from sparkring.views.front_end import shown as shown


class Quiet:
    """Shows nothing, for users who only want the run's result or exception."""

    def refresh(self, record: RunRecord) -> None:
        """Show nothing."""

    def close(self, record: RunRecord) -> None:
        """Show nothing."""

    def again(self, record: RunRecord) -> None:
        """Show the run, because the user has asked for this."""
        show_run(record)


def open_view(*, quiet: bool = False, controls: Controls | None = None, background: bool = False) -> View:
    """Return a new view of the form that front_end.shown() selects.

    The view is a Quiet one if `quiet` is set, or if there is no stdout for text.

    A live panel offers the `controls` to the user. With `background`, the run's thread calls refresh() and close(),
    except that the thread that starts the run calls the first refresh(). Raise OptionsError if SPARKRING_VIEW is not
    valid.
    """
    form = shown()
    if quiet:
        return Quiet()
    if form == "static":
        from sparkring.views.html import HtmlView

        return HtmlView(early=background)
    if form == "live":
        from sparkring.views.panel import PanelView

        return PanelView(controls, background=background)
    if sys.stdout is None or getattr(sys.stdout, "closed", False):  # a service may have none
        return Quiet()
    from sparkring.views.terminal import TerminalView

    return TerminalView(sys.stdout, progress=not background)


def show_run(record: RunRecord) -> None:
    """Show the state of a run once. Raise OptionsError if SPARKRING_VIEW is not valid."""
    form = shown()
    if form == "live" and record.outcome is not None:
        from sparkring.views.panel import show_saved

        show_saved(record)
    elif form != "text":
        from sparkring.views.html import show

        show(record)
    else:
        from sparkring.history import describe

        notices = [f"sparkring: {notice}" for notice in describe.notices(record, len(record.notices))]
        write("\n".join([describe.short(record, describe.last_known(record)), *notices]) + "\n")
