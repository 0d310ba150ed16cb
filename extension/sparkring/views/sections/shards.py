"""The section on reading data: the row groups that each rank has read, is reading and will read, and the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkring.history import reading
from sparkring.history.describe import counted, rank_numbers
from sparkring.history.reading import Block, DataSet, Mark, Strip
from sparkring.history.record import RunRecord
from sparkring.views.markup import AMBER, BLUE, GREEN, details, legend, note, text, tint, warning
from sparkring.views.sections import Form

# The width and the height of a strip in pixels, and the height of the space above the strip. A mark in this space shows
# how much the rank has read.
WIDTH, TALL, TOP = 220, 9, 6
STRIPS: dict[Form, int] = {"stacked": 0, "tab": 64, "final": 16}  # at most this many strips for all data sets together
BLOCKS: dict[Form, int] = {"stacked": 0, "tab": 280, "final": 150}  # at most this many blocks in all strips together
# The smallest and the largest number of blocks in one strip. More blocks would be too small to see.
LEAST_BLOCKS, MOST_BLOCKS = 4, WIDTH // 6
MANY_STRIPS = 24  # the most strips of a data set if there is no room for the strips of all its ranks

_RIGHT = ' class="sr-n" align="right"'
_COLOURS: dict[Mark, str] = {"starves": AMBER, "early": GREEN, "": BLUE}


def html(record: RunRecord, now: float, form: Form) -> str:
    """Return the last data sets (at most reading.NAMED) that the ranks read, and each rank's progress in them."""
    sets = reading.data_sets(record, now)
    parts = []
    if len(sets) > reading.NAMED:
        parts.append(note(f"{counted(len(sets) - reading.NAMED, 'earlier data set')} not shown"))
    shown = sets[-reading.NAMED :]
    for data_set in shown:
        table = _tables(data_set, form, len(shown), record.outcome is not None)
        heading = note(f"{'read' if form == 'final' else 'reads'} {reading.data_words(data_set)}")
        heading += note(reading.balance_words(data_set)) if form != "stacked" and table else ""
        wrong = warning(reading.notes(data_set))
        if form == "final" and table:  # problems stay visible, and the table is in a collapsed element
            parts.append(f"{heading}{wrong}{details('Reading by rank', table)}")
        else:  # problems come below the table, so that it does not move
            parts.append(f"{heading}{table}{wrong}")
    return "".join(parts)


def _tables(data_set: DataSet, form: Form, sets: int, over: bool) -> str:
    """Return a table with a line for each rank, and with strips for as many ranks as fit.

    If there are too many ranks, each line stands for a block of ranks, and a second table has the strips of some ranks.
    """
    room = STRIPS[form] // sets
    lines = [line for line in reading.lines(data_set, max(room, reading.RANKS_ALONE)) if line.rows]
    strips = _strips(data_set, room, BLOCKS[form] // sets, over)
    parts = [_read_table(lines, strips)] if lines else []
    if strips and not any(len(line.ranks) == 1 for line in lines):
        some = [data_set._replace(ranks=(rank,)) for rank in data_set.ranks if rank.rank in strips]
        which = f"{counted(len(strips), 'rank')} of {len(data_set.ranks):,}: those with a warning, then the slowest"
        parts += [note(which), _read_table([reading.line(one) for one in some], strips)]
    return "".join(parts) + (_legend(over) if strips else "")


def _strips(data_set: DataSet, room: int, blocks: int, over: bool) -> dict[int, str]:
    """Return the strips of at most `room` ranks, by rank, with about `blocks` blocks in all.

    A rank gets no strip if it is not known what the rank reads.
    """
    if not room:
        return {}
    some = reading.telling(data_set, room if len(data_set.ranks) <= room else min(room, MANY_STRIPS))
    most = max(LEAST_BLOCKS, min(MOST_BLOCKS, blocks // len(some)))
    made = {rank.rank: (reading.strip(rank, most, over=over), _COLOURS[rank.mark]) for rank in some}
    return {rank: _picture(strip, colour) for rank, (strip, colour) in made.items() if strip is not None}


def _read_table(lines: Sequence[reading.Line], strips: Mapping[int, str]) -> str:
    head = f'<th{_RIGHT}>rank</th><th{_RIGHT}>epoch</th><th align="left">read</th>'
    head += "".join(f"<th{_RIGHT}>{name}</th>" for name in ("rows", "rows/s", "bytes/s", "waits for data"))
    where = any(line.place for line in lines)
    head += '<th align="left">position</th>' if where else "<td></td>"
    body = "".join(_read_row(line, strips) for line in lines)
    return f'<table class="sr-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _read_row(line: reading.Line, strips: Mapping[int, str]) -> str:
    bar = strips.get(line.ranks[0], "") if len(line.ranks) == 1 else ""
    if not bar and line.fraction is not None:
        part = f"{100 * line.fraction:.0f}%"
        colour = _COLOURS[line.mark]
        bar = f'<div class="sr-bar sr-read" title="{part}"><div style="width:{part};background:{colour}"></div></div>'
    numbers = (line.rows, line.rows_per_s, line.bytes_per_s, line.waiting)
    sign = f'<b style="{tint(AMBER)}" title="{text(line.notes)}">⚠</b> ' if line.notes else ""
    return (
        f"<tr><td{_RIGHT}>{rank_numbers(line.ranks)}</td><td{_RIGHT}>{line.epoch}</td><td>{bar}</td>"
        + "".join(f"<td{_RIGHT}>{text(value)}</td>" for value in numbers)
        + f"<td>{sign}{text(line.place)}</td></tr>"
    )


# ── Strips ────────────────────────────────────────────────────────────────────


def _picture(strip: Strip, colour: str) -> str:
    """Draw a rank's epoch from left to right. A box is filled as far as it has been read."""
    at = "" if strip.at is None else f'<path d="M{WIDTH * strip.at:.1f} {TOP}l-4 -6h8z" fill="currentColor"/>'
    return (
        f'<svg class="sr-strip" width="{WIDTH + 8}" height="{TOP + TALL + 1}" '
        f'viewBox="-4 0 {WIDTH + 8} {TOP + TALL + 1}" role="img" aria-label="{text(strip.words)}">'
        f"{_boxes(strip.blocks, colour)}{at}</svg>"
    )


def _boxes(blocks: Sequence[Block], colour: str) -> str:
    full = "".join(map(_box, (block for block in blocks if block.state == "read")))
    empty = "".join(map(_box, (block for block in blocks if block.state != "read")))
    parts = "".join(_filled(block) for block in blocks if block.state == "reading")
    return (
        (f'<g fill="{colour}" stroke="{colour}">{full}</g>' if full else "")
        + (f'<g fill="transparent" stroke="{colour}">{empty}</g>' if empty else "")
        + (f'<path d="{parts}" fill="{colour}" pointer-events="none"/>' if parts else "")
    )


def _box(block: Block) -> str:
    x, wide = _across(block)
    title = f"<title>{text(block.words)}</title>" if block.words else ""
    return f'<path d="M{x:g} {TOP + 0.5}h{wide:g}v{TALL - 1}h-{wide:g}z">{title}</path>'


def _filled(block: Block) -> str:
    """Fill the box of a block from below, as far as the block has been read, but always visibly."""
    x, wide = _across(block)
    high = round(max(1.5, block.share * TALL), 1)
    return f"M{x:g} {TOP + TALL - high:g}h{wide:g}v{high:g}h-{wide:g}z"


def _across(block: Block) -> tuple[float, float]:
    """Return a block's left edge and width, in pixels. The width leaves a gap before the next block if possible."""
    begin, end = round(WIDTH * block.begin, 1), round(WIDTH * block.end, 1)
    gap = 2.0 if end - begin > 4 else 0.5
    return begin + 0.5, round(max(0.5, end - begin - gap), 1)


def _legend(over: bool) -> str:
    """Return the legend of the boxes."""
    states = reading.state_words(over).items()
    shapes = [(_boxes([Block(state, 0.0, 18 / WIDTH, "", 0.5)], BLUE), words) for state, words in states]
    width = "<span>filled as far as it is read; its width shows the rows; a box can stand for several row groups</span>"
    return legend(shapes, f"0 {TOP - 1} 18 {TALL + 2}", f"<span>▾ so far</span> {width}")
