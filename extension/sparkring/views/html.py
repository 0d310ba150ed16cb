"""crude"""

from __future__ import annotations

import secrets
import time
from html import escape

from sparkring.record import RunRecord
from sparkring.views import lines, summary


class HtmlView:
    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._shown = False
        self._at = 0.0

    def refresh(self, record: RunRecord) -> None:
        if time.monotonic() - self._at > 0.2:
            self._at = time.monotonic()
            self._show(record)

    def close(self, record: RunRecord) -> None:
        self._show(record)

    def _show(self, record: RunRecord) -> None:
        from IPython.display import display

        texts = [f"[{line.rank}] {lines.plain(line.text)}" for line in lines.visible(record.recent, record.logs)[-30:]]
        text = "\n".join([summary.outcome(record), *texts])
        display({"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}, raw=True, display_id=self._id,
                update=self._shown)
        self._shown = True
