"""Shows, before a run starts, which part of a data set each rank will read: in a picture and a table, with advice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparkring.data.epoch_plan import GETS_PER_S, USD_PER_GET, Outlook
from sparkring.history.describe import counted, dotted, duration, first_line, named, rank_list, rank_numbers, size, span
from sparkring.history.lines import plain
from sparkring.views.markup import RANK_COLOURS, advised, enclosed, svg, text
from sparkring.views.tables import bare_table, show, table_text

ROWS_SHOWN = 32  # if there are more ranks, each line of the table and of a picture stands for several ranks
BAND, LABEL, NUMBERS, PITCH, TALL = 260, 84, 110, 17, 13  # measures of a picture, in pixels
CELLS = 32  # the width of a band in the text picture, in characters
FILES_MARKED = 64
COLUMNS_NAMED = 8
SHADES = 20
_EVEN, _IN_TURN = "shards(): even split", "Petastorm: row groups in turn"

LARGE_GROUP_BYTES = 256_000_000
GROUP_BYTES = 64_000_000
FILE_BYTES = 128_000_000
SMALL_FILE_BYTES, MANY_FILES = 1_000_000, 100
UNEVEN = 1.1  # advice is given if one rank gets at least this many times as many rows as another


def show_shards(found: Outlook) -> None:
    """Show which rows each rank will read."""
    show(shards_text(found), lambda: shards_html(found))


def shards_html(found: Outlook) -> str:
    """Return the picture, the table and the advice as one block of HTML."""
    counts = [f"<div>{text(line)}</div>" for line in (epoch_words(found), *request_words(found)) if line]
    parts = [
        f'<div class="sr-head"><span class="sr-title">{text(first_line(found.dataset.name, 120))}</span> '
        f"<small>{text(data_words(found))}</small></div>",
        *counts,
        f'<div class="sr-charts">{"".join(_picture(found, each) for each in _layouts(found))}</div>',
        bare_table(HEADERS, table_rows(found)),
        advised(advice(found)),
    ]
    return enclosed("".join(parts))


def shards_text(found: Outlook) -> str:
    """Return the picture, the table and the advice as text for a terminal."""
    parts = [
        f"{first_line(found.dataset.name, 120)}: {plain(data_words(found))}",
        "\n".join([epoch_words(found), *map(plain, request_words(found))]),
        _text_picture(found),
        table_text(HEADERS, table_rows(found)),
        "\n".join(f"→ {plain(line)}" for line in advice(found)),
    ]
    return "\n\n".join(part for part in parts if part)


# ── Words ─────────────────────────────────────────────────────────────────────


def data_words(found: Outlook) -> str:
    """Describe the data set: `1,000,000 rows in 8 files, 32 row groups, 40.1 MB · columns a, b · where x > 3`."""
    data = found.dataset
    whole = len(data.stored_schema.names) == len(data.columns)
    return dotted(
        f"{counted(data.rows, 'row')} in {counted(len(data.files), 'file')}, "
        f"{counted(data.row_groups, 'row group')}, {size(data.size_bytes)}",
        "" if whole else f"columns {named(data.columns, COLUMNS_NAMED)}",
        f"where {data.where}" if data.where else "",
        f"version {data.version}" if data.version else "",
    )


def epoch_words(found: Outlook) -> str:
    """Say how many steps an epoch takes, and what happens to rows that do not fill a batch."""
    steps = [share.steps for share in found.ours]
    taken = f"{min(steps):,}" + (f" to {max(steps):,}" if max(steps) > min(steps) else "")
    of = f"{taken} step{'' if max(steps) == 1 else 's'} of {counted(found.batch_size, 'row')} on each"
    said = f"An epoch on {counted(found.size, 'rank')}: {of}"
    match found.remainder:
        case "drop":
            left_out = counted(found.rows_unread, "row")
            return f"{said}; {left_out} left out so that all ranks take the same number of steps (drop)."
        case "pad":
            twice = counted(found.rows_twice, "row")
            return f"{said}; {twice} read twice so that all ranks take the same number of steps (pad)."
    return f"{said}, but a rank's last step may be smaller; end each epoch with hvd.join() (join)."


def request_words(found: Outlook) -> list[str]:
    """Return sentences about the number, price and rate limit of requests to an object store; [] for local files."""
    if found.dataset.local:
        return []
    asked = found.requests
    price = f"{asked.price_usd(found.epochs):,.2f} USD at {USD_PER_GET * 1000:g} USD per 1,000"
    words = [
        f"GET requests: {asked.opening:,} to open the data set and {asked.per_epoch:,} per epoch; "
        f"{counted(found.epochs, 'epoch')}: {price}."
    ]
    if asked.throttled_below_s >= 1:
        limit = duration(float(asked.throttled_below_s))
        words.append(
            f"S3 serves {GETS_PER_S:,} GETs per second for each prefix. An epoch that would take less than {limit} is "
            f"slowed down ({asked.busiest:,} GETs go to {first_line(asked.folder, 120)}). Larger files, or several "
            "prefixes, help."
        )
    return words


def advice(found: Outlook) -> list[str]:
    """Return a few sentences about each problem and its solution. The most serious problem comes first."""
    told = [_few_rows(found), _few_groups(found), _uneven(found), _large_groups(found), _small_files(found)]
    return [line for line in [*told, _selective(found)] if line]


def _few_rows(found: Outlook) -> str:
    rows = [share.rows for share in found.ours]
    if not max(rows):
        return ""
    if not min(rows):
        idle = rank_list(rank for rank, count in enumerate(rows) if not count)
        return (
            f"{counted(sum(rows), 'row')} for {counted(found.size, 'rank')}: {idle} would have no rows. Use at most "
            f"{counted(sum(rows), 'rank')}."
        )
    if found.remainder == "drop" and not min(share.steps for share in found.ours):
        return (
            f"{counted(min(rows), 'row')} per rank cannot fill a batch of {found.batch_size:,}, so an epoch has no "
            f"steps: use --batch-size {min(rows)} or less, fewer ranks, or --remainder pad."
        )
    return ""


def _few_groups(found: Outlook) -> str:
    groups = found.dataset.row_groups
    if groups >= found.size:
        return ""
    idle = rank_list(rank for rank, share in enumerate(found.petastorms) if not share.row_groups)
    return (
        f"{counted(groups, 'row group')} for {counted(found.size, 'rank')}: Petastorm assigns whole row groups, so "
        f"{idle} would get none, and Petastorm raises NoDataAvailableError. Use shards(), which divides row groups, or "
        f"write at least {found.size} row groups: df.repartition({found.size})."
    )


def _uneven(found: Outlook) -> str:
    shares = found.petastorms
    least, most = (pick(shares, key=lambda share: share.rows) for pick in (min, max))
    if not least.rows:
        filtered = [rank for rank, share in enumerate(shares) if share.row_groups and not share.rows]
        if not filtered:
            return ""
        return f"With Petastorm's shards, {rank_list(filtered)} would get only row groups without matching rows."
    if most.rows < UNEVEN * least.rows and most.steps == least.steps:
        return ""
    ranks = shares.index(least), shares.index(most)
    ratio = most.rows / least.rows
    times = f"{ratio:.{0 if ratio >= 10 else 1 if ratio >= 1.2 else 2}f}"
    waits = (
        f": {counted(most.steps, 'step')} instead of {least.steps:,}, so an allreduce in step {least.steps + 1:,} "
        "waits for ranks that have no batches left"
    )
    return (
        f"Petastorm's shards are uneven: rank {ranks[1]} gets {most.rows:,} rows, {times} times as many as rank "
        f"{ranks[0]}, which gets {least.rows:,}{waits if most.steps > least.steps else ''}. With shards(), every rank "
        "takes the same number of steps."
    )


def _large_groups(found: Outlook) -> str:
    files = found.dataset.files
    every = [(group.stored_bytes, number, file) for file in files for number, group in enumerate(file.row_groups, 1)]
    largest, number, file = max(every, key=lambda each: each[0])
    if largest < LARGE_GROUP_BYTES:
        return ""
    many = sum(each[0] >= LARGE_GROUP_BYTES for each in every)
    more = f" ({many:,} are larger than {size(LARGE_GROUP_BYTES)})" if many > 1 else ""
    where = f"{first_line(file.path.rpartition('/')[2], 80)}, row group {number} of {len(file.row_groups)}"
    return (
        f"One row group has {size(largest)} ({where}){more}. A reader of whole row groups, such as Petastorm's, holds "
        f"it in memory once for each worker. Write row groups of {size(GROUP_BYTES)} with "
        f".option('parquet.block.size', {GROUP_BYTES}), or use shards(), which reads ranges of rows in bounded memory."
    )


def _small_files(found: Outlook) -> str:
    files = found.dataset.files
    mean = sum(file.size_bytes for file in files) / len(files)
    if len(files) < MANY_FILES or mean >= SMALL_FILE_BYTES:
        return ""
    wanted = max(found.size, round(mean * len(files) / FILE_BYTES), 1)
    return (
        f"{len(files):,} files of {size(mean)} on average: opening these files takes longer than reading them. "
        f"Write {counted(wanted, 'file')}: df.repartition({wanted})."
    )


def _selective(found: Outlook) -> str:
    data = found.dataset
    groups = [group for file in data.files for group in file.row_groups]
    there, read = sum(group.rows_in_file for group in groups), sum(group.rows_in_file for group in groups if group.rows)
    if not data.where or data.rows >= read / 2:
        return ""
    return (
        f"The filter keeps {counted(data.rows, 'row')} of {there:,}, but {read:,} must be read to find them. To "
        "read less, sort or partition the data by the columns of the filter, or save only the filtered rows."
    )


# ── The table ─────────────────────────────────────────────────────────────────

HEADERS = ("rank", "rows", "bytes", "files", "row groups", "steps", "Petastorm: rows", "row groups ", "steps ")
_OURS, _PETASTORMS = ("rows", "size_bytes", "files", "row_groups", "steps"), ("rows", "row_groups", "steps")


def blocks(count: int) -> list[range]:
    """Divide ranks into at most ROWS_SHOWN blocks of neighbours. If there is room, each block has only one rank."""
    length = -(-count // ROWS_SHOWN)
    return [range(begin, min(begin + length, count)) for begin in range(0, count, length)]


def table_rows(found: Outlook) -> list[tuple[str, ...]]:
    """Return a row for each rank or block of ranks. In the row of a block, the cells have ranges of numbers."""
    columns = [(found.ours, name) for name in _OURS] + [(found.petastorms, name) for name in _PETASTORMS]
    rows: list[tuple[str, ...]] = []
    for ranks in blocks(found.size):
        values = (([getattr(split[rank], name) for rank in ranks], name) for split, name in columns)
        cells = (span(each, size if name == "size_bytes" else "{:,}".format) for each, name in values)
        rows.append((rank_numbers(ranks), *cells))
    return rows


# ── The picture ───────────────────────────────────────────────────────────────


class Stretch(NamedTuple):
    """The rows from `begin` up to, but not including, `end`. Rows are counted through all files of the data set."""

    begin: int
    end: int


class Layout(NamedTuple):
    """A split to draw. For each block of ranks, `bands` holds the stretches, and `rows` holds the number of rows."""

    title: str
    bands: tuple[tuple[Stretch, ...], ...]
    rows: tuple[int, ...]


def _layouts(found: Outlook) -> list[Layout]:
    shown = blocks(found.size)
    groups = _groups(found)
    even = tuple((Stretch(found.stretches[ranks[0]][0], found.stretches[ranks[-1]][1]),) for ranks in shown)
    in_turn = tuple(tuple(sorted(group for rank in ranks for group in groups[rank :: found.size])) for ranks in shown)
    return [
        Layout(_EVEN, even, tuple(sum(found.ours[rank].rows for rank in ranks) for ranks in shown)),
        Layout(_IN_TURN, in_turn, tuple(sum(found.petastorms[rank].rows for rank in ranks) for ranks in shown)),
    ]


def _groups(found: Outlook) -> list[Stretch]:
    counts = (group.rows for file in found.dataset.files for group in file.row_groups)
    return [Stretch(*ends) for ends in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def covered(stretches: Iterable[Stretch], rows: int, cells: int) -> list[float]:
    """Divide `rows` rows into `cells` equal cells. Return the fraction of each cell that the stretches cover."""
    found = [0.0] * cells
    scale = cells / max(1, rows)
    for begin, end in stretches:
        low, high = begin * scale, end * scale
        for cell in range(int(low), min(cells, int(high) + 1)):
            found[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
    return found


def _picture(found: Outlook, layout: Layout) -> str:
    shown = blocks(found.size)
    wide, tall = LABEL + BAND + NUMBERS, PITCH * (len(shown) + 1) + 8
    parts = [_label("row groups", 0), *_band_of_data(found), _number(counted(found.dataset.row_groups, "row group"), 0)]
    for line, (ranks, band, rows) in enumerate(zip(shown, layout.bands, layout.rows, strict=True), 1):
        colour = RANK_COLOURS[(line - 1) % len(RANK_COLOURS)]
        parts.append(_label(rank_list(ranks), line))
        parts.append(f'<path d="M{LABEL} {_y(line)}h{BAND}v{TALL}h-{BAND}z" fill="currentColor" fill-opacity=".07"/>')
        parts += _band(band, found.dataset.rows, line, colour)
        parts.append(_number(f"{rows:,}" if rows else "nothing", line, missing=not rows))
    counts = (f"{rank_list(ranks)} {rows:,} rows" for ranks, rows in zip(shown, layout.rows, strict=True))
    words = f"{layout.title}: {', '.join(counts)}"
    caption = f'<figcaption style="padding-left:{LABEL}px"><b>{text(layout.title)}</b></figcaption>'
    return f"<figure>{caption}{svg(wide, tall, words, parts)}</figure>"


def _y(line: int) -> int:
    return PITCH * line + (6 if line else 0)


def _label(said: str, line: int) -> str:
    return f'<text x="{LABEL - 6}" y="{_y(line)}" dy="10" text-anchor="end">{text(said)}</text>'


def _number(said: str, line: int, *, missing: bool = False) -> str:
    look = ' fill="#dd4a45" font-weight="bold"' if missing else ""
    return f'<text x="{LABEL + BAND + 6}" y="{_y(line)}" dy="10"{look}>{text(said)}</text>'


def _band_of_data(found: Outlook) -> list[str]:
    """Draw all row groups, side by side. If there are at most FILES_MARKED files, mark where each file begins."""
    groups = [group for group in _groups(found) if group.end > group.begin]
    parts = [_path(groups, found.dataset.rows, 0, "currentColor", 0.4)]
    ends = itertools.accumulate(sum(group.rows for group in file.row_groups) for file in found.dataset.files)
    if 1 < len(found.dataset.files) <= FILES_MARKED:
        marks = "".join(f"M{LABEL + BAND * end / found.dataset.rows:.1f} 0v{TALL + 4}" for end in list(ends)[:-1])
        parts.append(f'<path d="{marks}" stroke="currentColor" stroke-opacity=".8"/>')
    return parts


def _band(band: Sequence[Stretch], rows: int, line: int, colour: str) -> list[str]:
    if len(band) <= BAND // 4:
        return [_path([each for each in band if each.end > each.begin], rows, line, colour, 0.9)]
    # There are too many stretches to draw them all. Divide the data set into equal parts instead. A part's shade shows
    # how much of the part is covered by the band.
    cells = max(8, min(BAND // 4, len(band) // 8))
    shades: dict[int, list[Stretch]] = {}
    for cell, share in enumerate(covered(band, rows, cells)):
        if share:
            shades.setdefault(round(SHADES * share), []).append(Stretch(cell, cell + 1))
    return [_path(_joined(same), cells, line, colour, 0.1 + 0.8 * shade / SHADES, 0) for shade, same in shades.items()]


def _path(
    stretches: Sequence[Stretch], rows: int, line: int, colour: str, opacity: float, gap: float | None = None
) -> str:
    """Draw all stretches as one path, with `gap` pixels between two neighbouring stretches.

    If `gap` is None, the gap is one pixel, or there is no gap if there are too many stretches.
    """
    if gap is None and len(stretches) > BAND // 4:
        stretches, gap = _joined(stretches), 0
    scale = BAND / max(1, rows)
    drawn = []
    for begin, end in stretches:
        left, wide = LABEL + begin * scale, max(0.7, (end - begin) * scale - (1 if gap is None else gap))
        drawn.append(f"M{left:.1f} {_y(line)}h{wide:.1f}v{TALL}h-{wide:.1f}z")
    return f'<path d="{"".join(drawn)}" fill="{colour}" fill-opacity="{opacity:.2g}"/>' if drawn else ""


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    found: list[Stretch] = []
    for each in stretches:
        if found and found[-1].end == each.begin:
            found[-1] = Stretch(found[-1].begin, each.end)
        else:
            found.append(each)
    return found


def _text_picture(found: Outlook) -> str:
    layouts, shown, rows = _layouts(found), blocks(found.size), found.dataset.rows
    labels = ["row groups", *(rank_list(ranks) for ranks in shown)]
    width = max(map(len, labels))
    groups = _groups(found)
    # Neighbouring row groups alternate between two shades, if there is room to show all row groups.
    odd = covered(groups[1::2], rows, CELLS) if len(groups) <= CELLS // 2 else [0.0] * CELLS
    data = "".join("▓" if share > 0.5 else "█" for share in odd)
    lines = ["  ".join(["".ljust(width), *(layout.title.ljust(CELLS) for layout in layouts)])]
    lines.append("  ".join([labels[0].ljust(width), *[data] * len(layouts)]))
    for label, *bands in zip(labels[1:], *(layout.bands for layout in layouts), strict=True):
        lines.append("  ".join([label.ljust(width), *(_shaded(covered(band, rows, CELLS)) for band in bands)]))
    return "\n".join(line.rstrip() for line in lines)


def _shaded(shares: Iterable[float]) -> str:
    return "".join("·" if share < 1e-6 else "░▒▓█"[min(3, int(share * 4))] for share in shares)
