"""Finds out which front end shows the notebook, and which view of a run the front end can show.

No single sign is reliable. A kernel on another machine lacks the environment variables of the front end. A kernel that
was started in a terminal of VS Code has VS Code's variables, even if another front end shows the notebook. If a wrong
guess could hide the run, the view that works in both front ends is chosen.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, NamedTuple, get_args

from sparkring.errors import OptionsError
from sparkring.runtime.kernel import in_notebook

FrontEnd = Literal["jupyter", "vscode", "colab", "databricks"]
Shown = Literal["live", "static", "text"]

_VARIABLES: dict[FrontEnd, tuple[str, ...]] = {
    "databricks": ("DATABRICKS_RUNTIME_VERSION",),
    "colab": ("COLAB_RELEASE_TAG", "COLAB_JUPYTER_IP"),
    "vscode": ("VSCODE_PID", "VSCODE_CWD"),
}


def front_end(names: dict[str, Any]) -> FrontEnd:
    """Return the front end, as far as the kernel can tell. `names` are the user's names in the notebook.

    VS Code puts `__vsc_ipynb_file__` into these names. It sets VSCODE_PID and VSCODE_CWD only if the kernel is on its
    machine.
    """
    if "__vsc_ipynb_file__" in names:
        return "vscode"
    if "google.colab" in sys.modules:
        return "colab"
    for name, variables in _VARIABLES.items():
        if any(variable in os.environ for variable in variables):
            return name
    return "jupyter"


class Choice(NamedTuple):
    """The form in which runs are shown, and why."""

    form: Shown
    reason: str


def shown() -> Shown:
    """Return the form in which a run is shown: a live panel, a static view that is redrawn, or plain text.

    Raise OptionsError if SPARKRING_VIEW has another value.
    """
    return choice().form


def choice() -> Choice:
    """Return the form in which a run is shown, and why this form was chosen.

    SPARKRING_VIEW selects the form. Otherwise, it is the live panel in a notebook, except on Databricks, which does
    not save widgets; outside a notebook, it is text. Raise OptionsError if SPARKRING_VIEW has another value.
    """
    wanted = os.environ.get("SPARKRING_VIEW", "").strip().lower()
    if wanted and wanted not in get_args(Shown):
        raise OptionsError(f"SPARKRING_VIEW={wanted!r}: expected live, static or text.")
    if not in_notebook():
        return Choice("text", "not a notebook")
    for form in get_args(Shown):
        if form == wanted:
            return Choice(form, f"SPARKRING_VIEW={wanted}")
    if os.environ.get("SPARKRING_PANEL") == "0":  # the name of the setting in version 0.1
        return Choice("static", "SPARKRING_PANEL=0")
    if front_end({}) == "databricks":
        return Choice("static", "Databricks does not save widgets")
    return Choice("live", "a notebook")
