"""What there is to say of a run, topic by topic: a module each, with a function of the record that gives its HTML.

`html(record, now, form)` is '' where there is nothing to say. Forms: "stacked" is one of several that stand below each
other while a run goes on and are redrawn in place, so it is short and does not move what is below; "tab" has a place of
its own in the live panel; "final" is what stays in the notebook.
"""

from __future__ import annotations

from typing import Literal

Form = Literal["stacked", "tab", "final"]
