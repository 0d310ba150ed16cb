"""Shows, before a run starts, which part of a data set each rank will read: in a picture and a table, with advice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparkring.data.epoch_plan import GETS_PER_S, USD_PER_GET, Outlook
from sparkring.history.describe import counted, dotted, duration, first_line, named, rank_list, rank_numbers, size, span
from sparkring.history.events import DataOpened, RunStarted
from sparkring.history.lines import plain
from sparkring.views.markup import RANK_COLOURS, advised, enclosed, svg, text
from sparkring.views.tables import bare_table, show, table_text, titled_html

ROWS_SHOWN = 32  # if there are more ranks, each line of the table and of a picture stands for several ranks
BAND, LABEL, NUMBERS, PITCH, TALL = 260, 84, 110, 17, 13  # measures of a picture, in pixels
CELLS = 32  # the width of a band in the text picture, in characters
FILES_MARKED = 64
COLUMNS_NAMED = 8
SHADES = 20
# By format: sparkring's split, and the split that others make.
_SPLITS = {
    "parquet": ("shards(): even split", "Petastorm: row groups in turn"),
    "tfrecord": ("tfrecords(): even split", "tf.data: files in turn"),
}

LARGE_GROUP_BYTES = 256_000_000
GROUP_BYTES = 64_000_000
FILE_BYTES = 128_000_000
SMALL_FILE_BYTES, MANY_FILES = 1_000_000, 100
UNEVEN = 1.1  # advice is given if one rank gets at least this many times as many rows as another


def show_shards(outlook: Outlook) -> None:
    """Show which rows each rank will read."""
    show(shards_text(outlook), lambda: shards_html(outlook))


def shards_html(outlook: Outlook) -> str:
    """Return the picture, the table and the advice as one block of HTML."""
    counts = [f"<div>{text(line)}</div>" for line in (epoch_words(outlook), *request_words(outlook)) if line]
    parts = [
        f'<div class="sr-head"><span class="sr-title">{text(first_line(outlook.dataset.name, 120))}</span> '
        f"<small>{text(data_words(outlook))}</small></div>",
        *counts,
        f'<div class="sr-charts">{"".join(_picture(outlook, layout) for layout in _layouts(outlook))}</div>',
        bare_table(headers(outlook), table_rows(outlook)),
        advised(advice(outlook)),
    ]
    return enclosed("".join(parts))


def shards_text(outlook: Outlook) -> str:
    """Return the picture, the table and the advice as text for a terminal."""
    parts = [
        f"{first_line(outlook.dataset.name, 120)}: {plain(data_words(outlook))}",
        "\n".join([epoch_words(outlook), *map(plain, request_words(outlook))]),
        _text_picture(outlook),
        table_text(headers(outlook), table_rows(outlook)),
        "\n".join(f"→ {plain(line)}" for line in advice(outlook)),
    ]
    return "\n\n".join(part for part in parts if part)


def show_readers(name: str, runs: Sequence[tuple[str, RunStarted, DataOpened]]) -> None:
    """Show which saved runs have read a data set: their ids, how they began, and what they have opened."""
    rows = [
        (
            opened.version or "?",
            run_id,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(started.time)),
            counted(opened.rows, "row"),
            first_line(opened.where, 60),
            first_line(started.title, 60),
        )
        for run_id, started, opened in runs
    ]
    headers = ("version", "run", "began", "read", "where", "cell")
    title = f"{counted(len({run_id for run_id, *_ in runs}), 'saved run')} read {first_line(name, 120)}"
    show(f"{title}\n\n{table_text(headers, rows)}", lambda: titled_html(title, "", headers, rows))


# ── Words ─────────────────────────────────────────────────────────────────────


def data_words(outlook: Outlook) -> str:
    """Describe the data set: `1,000,000 rows in 8 files, 32 row groups, 40.1 MB · columns a, b · where x > 3`."""
    data = outlook.dataset
    whole = len(data.stored_schema.names) == len(data.columns)
    return dotted(
        f"{counted(data.rows, 'row')} in {counted(len(data.files), 'file')}, "
        f"{counted(data.row_groups, 'row group')}, {size(data.size_bytes)}",
        "" if whole else f"columns {named(data.columns, COLUMNS_NAMED)}",
        f"where {data.where}" if data.where else "",
        f"version {data.version_words}" if data.version else "",
    )


def epoch_words(outlook: Outlook) -> str:
    """Say how many steps an epoch takes, and what happens to rows that do not fill a batch."""
    steps = [share.steps for share in outlook.ours]
    taken = f"{min(steps):,}" + (f" to {max(steps):,}" if max(steps) > min(steps) else "")
    of = f"{taken} step{'' if max(steps) == 1 else 's'} of {counted(outlook.batch_size, 'row')} on each"
    sentence = f"An epoch on {counted(outlook.size, 'rank')}: {of}"
    match outlook.remainder:
        case "drop":
            left_out = counted(outlook.rows_unread, "row")
            return f"{sentence}; {left_out} left out so that all ranks take the same number of steps (drop)."
        case "pad":
            twice = counted(outlook.rows_twice, "row")
            return f"{sentence}; {twice} read twice so that all ranks take the same number of steps (pad)."
    return f"{sentence}, but a rank's last step may be smaller; end each epoch with hvd.join() (join)."


def request_words(outlook: Outlook) -> list[str]:
    """Return sentences about the number, price and rate limit of requests to an object store; [] for local files."""
    if outlook.dataset.local:
        return []
    asked = outlook.requests
    price = f"{asked.price_usd(outlook.epochs):,.2f} USD at {USD_PER_GET * 1000:g} USD per 1,000"
    words = [
        f"GET requests: {asked.opening:,} to open the data set and {asked.per_epoch:,} per epoch; "
        f"{counted(outlook.epochs, 'epoch')}: {price}."
    ]
    if asked.throttled_below_s >= 1:
        limit = duration(float(asked.throttled_below_s))
        words.append(
            f"S3 serves {GETS_PER_S:,} GETs per second for each prefix. An epoch that would take less than {limit} is "
            f"slowed down ({asked.busiest:,} GETs go to {first_line(asked.folder, 120)}). Larger files, or several "
            "prefixes, help."
        )
    return words


def advice(outlook: Outlook) -> list[str]:
    """Return a few sentences about each problem and its solution. The most serious problem comes first."""
    problems = (_few_rows, _few_groups, _uneven, _large_groups, _small_files, _selective)
    return [sentence for problem in problems if (sentence := problem(outlook))]


def _few_rows(outlook: Outlook) -> str:
    rows = [share.rows for share in outlook.ours]
    if not max(rows):
        return ""
    if not min(rows):
        idle = rank_list(rank for rank, count in enumerate(rows) if not count)
        return (
            f"{counted(sum(rows), 'row')} for {counted(outlook.size, 'rank')}: {idle} would have no rows. Use at most "
            f"{counted(sum(rows), 'rank')}."
        )
    if outlook.remainder == "drop" and not min(share.steps for share in outlook.ours):
        return (
            f"{counted(min(rows), 'row')} per rank cannot fill a batch of {outlook.batch_size:,}, so an epoch has no "
            f"steps: use --batch-size {min(rows)} or less, fewer ranks, or --remainder pad."
        )
    return ""


def _few_groups(outlook: Outlook) -> str:
    if outlook.dataset.kind == "tfrecord":
        return _few_files(outlook)
    groups = outlook.dataset.row_groups
    if groups >= outlook.size:
        return ""
    idle = rank_list(rank for rank, share in enumerate(outlook.petastorms) if not share.row_groups)
    return (
        f"{counted(groups, 'row group')} for {counted(outlook.size, 'rank')}: Petastorm assigns whole row groups, so "
        f"{idle} would get none, and Petastorm raises NoDataAvailableError. Use shards(), which divides row groups, or "
        f"write at least {outlook.size} row groups: df.repartition({outlook.size})."
    )


def _few_files(outlook: Outlook) -> str:
    files = len(outlook.dataset.files)
    if files >= outlook.size:
        return ""
    idle = rank_list(rank for rank, share in enumerate(outlook.petastorms) if not share.rows)
    return (
        f"{counted(files, 'file')} for {counted(outlook.size, 'rank')}: tf.data's shard() assigns whole files, so "
        f"{idle} would get none. tfrecords() divides files; a rank that begins inside a compressed file unpacks all "
        f"that comes before, so write at least {outlook.size} files."
    )


def _uneven(outlook: Outlook) -> str:
    shares = outlook.petastorms
    least, most = (pick(shares, key=lambda share: share.rows) for pick in (min, max))
    if not least.rows:
        filtered = [rank for rank, share in enumerate(shares) if share.row_groups and not share.rows]
        if not filtered:
            return ""
        return f"With Petastorm's shards, {rank_list(filtered)} would get only row groups without matching rows."
    if most.rows < UNEVEN * least.rows and most.steps == least.steps:
        return ""
    split = "Petastorm's shards" if outlook.dataset.kind == "parquet" else "Whole files"
    ours = _SPLITS[outlook.dataset.kind][0].partition(":")[0]
    ranks = shares.index(least), shares.index(most)
    ratio = most.rows / least.rows
    times = f"{ratio:.{0 if ratio >= 10 else 1 if ratio >= 1.2 else 2}f}"
    waits = (
        f": {counted(most.steps, 'step')} instead of {least.steps:,}, so an allreduce in step {least.steps + 1:,} "
        "waits for ranks that have no batches left"
    )
    return (
        f"{split} are uneven: rank {ranks[1]} gets {most.rows:,} rows, {times} times as many as rank {ranks[0]}, which "
        f"gets {least.rows:,}{waits if most.steps > least.steps else ''}. With {ours}, "
        "every rank takes the same number of steps."
    )


def _large_groups(outlook: Outlook) -> str:
    files = outlook.dataset.files
    if outlook.dataset.kind == "tfrecord":
        return ""
    every = [(group.stored_bytes, number, file) for file in files for number, group in enumerate(file.row_groups, 1)]
    largest, number, file = max(every, key=lambda group: group[0])
    if largest < LARGE_GROUP_BYTES:
        return ""
    many = sum(group[0] >= LARGE_GROUP_BYTES for group in every)
    more = f" ({many:,} are larger than {size(LARGE_GROUP_BYTES)})" if many > 1 else ""
    where = f"{first_line(file.path.rpartition('/')[2], 80)}, row group {number} of {len(file.row_groups)}"
    return (
        f"One row group has {size(largest)} ({where}){more}. A reader of whole row groups, such as Petastorm's, holds "
        f"it in memory once for each worker. Write row groups of {size(GROUP_BYTES)} with "
        f".option('parquet.block.size', {GROUP_BYTES}), or use shards(), which reads ranges of rows in bounded memory."
    )


def _small_files(outlook: Outlook) -> str:
    files = outlook.dataset.files
    mean = sum(file.size_bytes for file in files) / len(files)
    if len(files) < MANY_FILES or mean >= SMALL_FILE_BYTES:
        return ""
    wanted = max(outlook.size, round(mean * len(files) / FILE_BYTES), 1)
    return (
        f"{len(files):,} files of {size(mean)} on average: opening these files takes longer than reading them. "
        f"Write {counted(wanted, 'file')}: df.repartition({wanted})."
    )


def _selective(outlook: Outlook) -> str:
    data = outlook.dataset
    groups = [group for file in data.files for group in file.row_groups]
    there, read = sum(group.rows_in_file for group in groups), sum(group.rows_in_file for group in groups if group.rows)
    if not data.where or data.rows >= read / 2:
        return ""
    return (
        f"The filter keeps {counted(data.rows, 'row')} of {there:,}, but {read:,} must be read to find them. To "
        "read less, sort or partition the data by the columns of the filter, or save only the filtered rows."
    )


# ── The table ─────────────────────────────────────────────────────────────────

_OURS = ("rows", "size_bytes", "files", "row_groups", "steps")
# By format: what others' split counts, beside rows and steps.
_COUNTED = {"parquet": ("row groups", "row_groups"), "tfrecord": ("files", "files")}


def headers(outlook: Outlook) -> tuple[str, ...]:
    """Return the names of the columns of the table."""
    kind = outlook.dataset.kind
    other = _SPLITS[kind][1].partition(":")[0]
    return "rank", "rows", "bytes", "files", "row groups", "steps", f"{other}: rows", f"{_COUNTED[kind][0]} ", "steps "


def blocks(count: int) -> list[range]:
    """Divide ranks into at most ROWS_SHOWN blocks of neighbours. If there is room, each block has only one rank."""
    length = -(-count // ROWS_SHOWN)
    return [range(begin, min(begin + length, count)) for begin in range(0, count, length)]


def table_rows(outlook: Outlook) -> list[tuple[str, ...]]:
    """Return a row for each rank or block of ranks. In the row of a block, the cells have ranges of numbers."""
    columns = [(outlook.ours, name) for name in _OURS] + [
        (outlook.petastorms, name) for name in ("rows", _COUNTED[outlook.dataset.kind][1], "steps")
    ]
    rows: list[tuple[str, ...]] = []
    for ranks in blocks(outlook.size):
        values = (([getattr(split[rank], name) for rank in ranks], name) for split, name in columns)
        cells = (span(values_of, size if name == "size_bytes" else "{:,}".format) for values_of, name in values)
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


def _layouts(outlook: Outlook) -> list[Layout]:
    shown = blocks(outlook.size)
    groups = _groups(outlook) if outlook.dataset.kind == "parquet" else _files(outlook)
    ours, others = _SPLITS[outlook.dataset.kind]
    even = tuple((Stretch(outlook.stretches[ranks[0]][0], outlook.stretches[ranks[-1]][1]),) for ranks in shown)
    in_turn = tuple(tuple(sorted(group for rank in ranks for group in groups[rank :: outlook.size])) for ranks in shown)
    return [
        Layout(ours, even, tuple(sum(outlook.ours[rank].rows for rank in ranks) for ranks in shown)),
        Layout(others, in_turn, tuple(sum(outlook.petastorms[rank].rows for rank in ranks) for ranks in shown)),
    ]


def _files(outlook: Outlook) -> list[Stretch]:
    counts = (sum(group.rows for group in file.row_groups) for file in outlook.dataset.files)
    return [Stretch(*ends) for ends in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def _groups(outlook: Outlook) -> list[Stretch]:
    counts = (group.rows for file in outlook.dataset.files for group in file.row_groups)
    return [Stretch(*ends) for ends in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def covered(stretches: Iterable[Stretch], rows: int, cells: int) -> list[float]:
    """Divide `rows` rows into `cells` equal cells. Return the fraction of each cell that the stretches cover."""
    shares = [0.0] * cells
    scale = cells / max(1, rows)
    for begin, end in stretches:
        low, high = begin * scale, end * scale
        for cell in range(int(low), min(cells, int(high) + 1)):
            shares[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
    return shares


def _picture(outlook: Outlook, layout: Layout) -> str:
    shown = blocks(outlook.size)
    wide, tall = LABEL + BAND + NUMBERS, PITCH * (len(shown) + 1) + 8
    groups = counted(outlook.dataset.row_groups, "row group")
    parts = [_label("row groups", 0), *_band_of_data(outlook), _number(groups, 0)]
    for line, (ranks, band, rows) in enumerate(zip(shown, layout.bands, layout.rows, strict=True), 1):
        colour = RANK_COLOURS[(line - 1) % len(RANK_COLOURS)]
        parts.append(_label(rank_list(ranks), line))
        parts.append(f'<path d="M{LABEL} {_y(line)}h{BAND}v{TALL}h-{BAND}z" fill="currentColor" fill-opacity=".07"/>')
        parts += _band(band, outlook.dataset.rows, line, colour)
        parts.append(_number(f"{rows:,}" if rows else "nothing", line, missing=not rows))
    counts = (f"{rank_list(ranks)} {rows:,} rows" for ranks, rows in zip(shown, layout.rows, strict=True))
    words = f"{layout.title}: {', '.join(counts)}"
    caption = f'<figcaption style="padding-left:{LABEL}px"><b>{text(layout.title)}</b></figcaption>'
    return f"<figure>{caption}{svg(wide, tall, words, parts)}</figure>"


def _y(line: int) -> int:
    return PITCH * line + (6 if line else 0)


def _label(words: str, line: int) -> str:
    return f'<text x="{LABEL - 6}" y="{_y(line)}" dy="10" text-anchor="end">{text(words)}</text>'


def _number(words: str, line: int, *, missing: bool = False) -> str:
    look = ' fill="#dd4a45" font-weight="bold"' if missing else ""
    return f'<text x="{LABEL + BAND + 6}" y="{_y(line)}" dy="10"{look}>{text(words)}</text>'


def _band_of_data(outlook: Outlook) -> list[str]:
    """Draw all row groups, side by side. If there are at most FILES_MARKED files, mark where each file begins."""
    groups = [group for group in _groups(outlook) if group.end > group.begin]
    parts = [_path(groups, outlook.dataset.rows, 0, "currentColor", 0.4)]
    ends = itertools.accumulate(sum(group.rows for group in file.row_groups) for file in outlook.dataset.files)
    if 1 < len(outlook.dataset.files) <= FILES_MARKED:
        marks = "".join(f"M{LABEL + BAND * end / outlook.dataset.rows:.1f} 0v{TALL + 4}" for end in list(ends)[:-1])
        parts.append(f'<path d="{marks}" stroke="currentColor" stroke-opacity=".8"/>')
    return parts


def _band(band: Sequence[Stretch], rows: int, line: int, colour: str) -> list[str]:
    if len(band) <= BAND // 4:
        return [_path([stretch for stretch in band if stretch.end > stretch.begin], rows, line, colour, 0.9)]
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
    joined: list[Stretch] = []
    for stretch in stretches:
        if joined and joined[-1].end == stretch.begin:
            joined[-1] = Stretch(joined[-1].begin, stretch.end)
        else:
            joined.append(stretch)
    return joined


def _text_picture(outlook: Outlook) -> str:
    layouts, shown, rows = _layouts(outlook), blocks(outlook.size), outlook.dataset.rows
    labels = ["row groups", *(rank_list(ranks) for ranks in shown)]
    width = max(map(len, labels))
    groups = _groups(outlook)
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
