"""Writes what the panel's script needs to know of Python: `python -m sparkring.views.page_constants`.

The result is panel/src/constants.js, which is committed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkring.views import charts, live, markup, tables
from sparkring.views.description import RIGHT, Column
from sparkring.views.sections import items, ranks, search, stream

PATH = Path(__file__).parent / "panel" / "src" / "constants.js"


def script() -> str:
    """Return the text of panel/src/constants.js."""
    constants: dict[str, Any] = {
        "BLUE": markup.BLUE,
        "GREEN": markup.GREEN,
        "RED": markup.RED,
        "GREY": markup.GREY,
        "AMBER": markup.AMBER,
        "RANK_COLOURS": markup.RANK_COLOURS,
        "CURVE_COLOURS": charts.COLOURS,
        "DASHED": charts.DASHED,
        "RIGHT": RIGHT,
        "RANK_STATES": ranks.STATES,
        "RANK_FACTS": ranks.FACTS,
        "SILENT_S": ranks.SILENT_S,
        "MOST_LANES": live.MOST_LANES,
        "ITEM_COLUMNS": items.COLUMNS,
        "ITEM_DETAILS": live.ITEM_DETAILS,
        "TRIAL_KINDS": search.KINDS,
        "TRIALS_LEGEND": search.legend(search.KINDS),
        "WHOLE": search.WHOLE,
        "SCALE": search.SCALE,
        "SLICES": search.SLICES,
        "CURVES_SHOWN": search.CURVES_SHOWN,
        "METRICS_SHOWN": tables.METRICS_SHOWN,
        "FAR": search.FAR,
        "EQUAL": search.EQUAL,
        "BATCH_COLUMNS": stream.COLUMNS,
        "BATCH_PARTS": stream.COLOURS,
        "BATCH_TITLE": stream.TITLE,
        "BATCH_SLOTS": stream.FEWEST_SLOTS,
    }
    lines = [
        f"export const {name} = {json.dumps(value, default=_plain, ensure_ascii=False)};"
        for name, value in constants.items()
    ]
    return "\n".join(["// Made by views/page_constants.py.", *lines, ""])


def _plain(column: Column) -> dict[str, Any]:
    usual = Column("", "")
    return {name: value for name, value in asdict(column).items() if name == "width" or value != getattr(usual, name)}


if __name__ == "__main__":
    PATH.write_text(script(), encoding="utf-8")
