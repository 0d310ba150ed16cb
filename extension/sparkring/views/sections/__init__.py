"""The sections of a view. The module for each topic has functions that return a section's HTML.

Most modules have a function `html(record, now, form)`, which returns '' if there is nothing to show. A section has
three forms. In the form "stacked", the sections stand below each other during a run. They are redrawn in place, so they
are short, and they do not move what is below them. The form "tab" is for a tab of the live panel, and the form "final"
is what the notebook saves.
"""

from __future__ import annotations

from typing import Literal

Form = Literal["stacked", "tab", "final"]
