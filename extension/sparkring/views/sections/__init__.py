"""The sections of a view. There is a module for each topic, with functions that return a section's HTML.

Most of these modules have a function `html(record, now, form)`, which returns '' if there is nothing to show. A section
has three forms. In the form "stacked", sections are below each other during a run. They are redrawn in place, so they
are short and do not move what is below them. The form "tab" is for a tab of the live panel, and the form "final" is
what the notebook saves.
"""

from __future__ import annotations

from typing import Literal

Form = Literal["stacked", "tab", "final"]
