"""The sections of a view. The module for each topic has functions that return a section's HTML.

Most modules have a function `html(record, now, form)`, which returns '' if there is nothing to show. A section has
three forms. The form "stacked" is shown during a run, with one section below the other. These sections are redrawn in
place. Therefore, they are short, and their height changes little. The form "tab" is for a tab of the live panel. The
notebook saves the form "final".
"""

from __future__ import annotations

from typing import Literal

Form = Literal["stacked", "tab", "final"]
