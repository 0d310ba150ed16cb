"""The sections of a view: a module for each topic, with a function that returns the section's HTML.

This function, `html(record, now, form)`, returns '' if there is nothing to show. Forms: "stacked" sections are below
each other during a run and are redrawn in place, so they are short and do not move what is below them; "tab" is for a
tab of the live panel; "final" is what the notebook saves.
"""

from __future__ import annotations

from typing import Literal

Form = Literal["stacked", "tab", "final"]
