"""Opens the views of runs: a panel in a notebook, text elsewhere. No other module of the engine opens a view."""

from __future__ import annotations

from sparkring.engine.run.options import SharedOptions
from sparkring.history.view import Controls, View
from sparkring.runtime.kernel import can_ask, in_notebook
from sparkring.views import Quiet, open_view, shown


def view_of(options: SharedOptions, controls: Controls) -> View:
    """Return the view of a run with these options."""
    return open_view(quiet=options.quiet, controls=controls, background=options.background)


def panel_asks(options: SharedOptions) -> bool:
    """Return whether the panel of a run with these options can ask the user a question."""
    return not options.quiet and shown() == "live" and can_ask()


def explains_failures(view: View) -> bool:
    """Return whether a view shows why a run failed, with the lines of code and of the rank."""
    return not isinstance(view, Quiet) and shown() != "text"


def background_view() -> View:
    """Return a view for a run that is recorded in other threads. In a notebook, it is a panel without a Stop button.

    Elsewhere, the view shows nothing.
    """
    return open_view(quiet=not in_notebook(), background=True)
