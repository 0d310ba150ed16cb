"""Prepares ranks' output for display: handles control codes, finds start-up messages, and folds identical lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sparkring.history.record import LogLine, RunRecord, labelled

# ── Control codes ─────────────────────────────────────────────────────────────

# Sequences that control a terminal: CSI (colours, cursor), strings with an end mark (titles, links), short sequences.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90\x9e\x9f\x98])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[=>NOc78DEHM]"
)
# Invisible characters that change how a text looks. Harmless ones (tabs, joiners, soft hyphens) are not included.
_HIDDEN = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: str) -> str:
    """Return `text` with each hidden character replaced by a visible one: a control picture or an escape."""
    return _HIDDEN.sub(_picture, text)


def plain(text: str) -> str:
    """Return a line without colours and cursor movements. Other control characters are made visible."""
    if text.isprintable():  # most lines are
        return text
    return shown(_SEQUENCE.sub("", text.lstrip("\b")))


def coloured(text: str) -> list[tuple[str, str]]:
    """Split a line at its colour codes (SGR). Return pairs: a code's parameters, and the text up to the next code.

    The parameters are "" for text without a colour code. Other sequences are left out, and other control characters are
    made visible.
    """
    text = text.lstrip("\b")
    pieces: list[tuple[str, str]] = []
    code, at = "", 0
    for match in _SEQUENCE.finditer(text):
        pieces.append((code, shown(text[at : match.start()])))
        at = match.end()
        is_colour = match["final"] == "m" and re.fullmatch(r"[0-9;:]*", match["parameters"])
        code = (match["parameters"] or "0") if is_colour else ""
    pieces.append((code, shown(text[at:])))
    return [piece for piece in pieces if piece[0] or piece[1]]


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ── Start-up noise ────────────────────────────────────────────────────────────

_NOISE = re.compile(
    r"""^(?:
        \d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d\.\d+:\ (?:
            I\ \S+\.cc:\d+\]                                          # TensorFlow's and XLA's information
          | [EW]\ \S+\.cc:\d+\]\ .*(?:
                register\ cu\w+\ factory | TF-TRT | computation\ placer | cuInit | cuda\ drivers | CUDA_ERROR_NO_DEVICE
            )
        )
      | [IWE]\d{4}\ \d\d:\d\d:\d\d[\d.]*\ +\d+\ \S+\.cc:\d+\]\ .*(?:    # the same messages, before logging is set up
            register\ cu\w+\ factory | TF-TRT | computation\ placer | cpu_feature_guard | oneDNN | cuInit
        )
      | WARNING:\ All\ log\ messages\ before\ absl::InitializeLog\(\)
      | To\ enable\ the\ following\ instructions:.*rebuild\ TensorFlow
    )""",
    re.VERBOSE,
)


def is_noise(line: LogLine) -> bool:
    """Return whether a line is one of TensorFlow's start-up messages."""
    return line.stream == "stderr" and _NOISE.match(line.text) is not None


# ── Which lines to show ───────────────────────────────────────────────────────

_FOLD_WITHIN_S = 2.0
_FOLD_WITHIN_LINES = 100
_PENDING = 8


@dataclass
class Shared:
    """A line and the ranks that printed it."""

    line: LogLine
    ranks: list[int]


def visible(lines: Iterable[LogLine], logs: str) -> list[LogLine]:
    """Return the lines that `--logs` asks for, and all messages that ranks sent to the notebook on purpose."""
    if logs == "all":
        return in_lines(lines)
    rank = 0 if logs == "rank0" else None
    return in_lines(line for line in lines if line.rank == rank or line.stream == "message")


def in_lines(lines: Iterable[LogLine]) -> list[LogLine]:
    """Return the same lines, but with each message of several lines split into one LogLine per line."""
    cut: list[LogLine] = []
    for line in lines:
        if line.stream == "message" and "\n" in line.text:
            cut += [line._replace(text=part.removesuffix("\r")) for part in line.text.rstrip("\n").split("\n")]
        else:
            cut.append(line)
    return cut


def pending(record: RunRecord) -> list[LogLine]:
    """Return at most _PENDING lines whose end has not been printed yet, such as progress bars."""
    lines: list[LogLine] = []
    for rank in record.ranks:
        lines += labelled(record, rank.partial_lines())
        if len(lines) >= _PENDING:
            break
    return [line for line in visible(lines, record.logs) if line.text.strip()][:_PENDING]


# ── Folding ───────────────────────────────────────────────────────────────────

# views/panel/src/lines.js folds by the same rules: tests/views/folding.json has the test cases for both.
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception, another", "The above exception was the direct cause of the")
# The numbers of cells, ranks, processes and ports, and memory addresses. In tracebacks that are otherwise identical,
# these numbers differ from rank to rank, so they are ignored when tracebacks are compared.
_RANKS_OWN = re.compile(
    r"(<cell)(?: \d+)?(?=>)|(\b0x)[0-9a-f]+|((?:rank|pid|process)\W{0,3})\d+|(:)\d{5}\b", re.IGNORECASE
)

Block = list[LogLine]


class _Traceback:
    """A traceback of one rank, built line by line. The first `whole` lines certainly belong to the traceback.

    The other lines may be the beginning of a chained exception, or other output.
    """

    def __init__(self, line: LogLine) -> None:
        self.lines = [line]
        self.whole = 1
        self._in_frames = True
        self._chained = False

    def take(self, line: LogLine) -> bool:
        """Add the line if it may belong to the traceback. Return whether it was added."""
        text = line.text
        if self._in_frames:
            self._in_frames = text.startswith(" ")
            self.lines.append(line)
            self.whole = len(self.lines)
        elif text.startswith(_TRACEBACK) and self._chained:
            self._in_frames, self._chained = True, False
            self.lines.append(line)
        elif text.startswith(_CHAINED) and not self.lines[-1].text:
            self._chained = True
            self.lines.append(line)
        elif not text and (self._chained or len(self.lines) == self.whole):
            self.lines.append(line)
        else:
            return False
        return True


class Blocks:
    """Collects the lines of each traceback into one block, even if other ranks print between these lines.

    take() gets one line, and returns the blocks that this line completes: a single line, or a whole traceback once it
    has ended. take() holds back a line that may belong to a traceback that has not ended, and then returns no block.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Traceback] = {}

    def __bool__(self) -> bool:
        """Return whether any lines are being held back."""
        return bool(self._open)

    def take(self, line: LogLine) -> list[Block]:
        begun = self._open.get(line.rank)
        complete: list[Block] = []
        if begun is not None and begun.lines[0].stream == line.stream:
            if begun.take(line):
                return []
            complete = self._end(line.rank)
        if line.text.startswith(_TRACEBACK) and line.rank not in self._open:
            self._open[line.rank] = _Traceback(line)
            return complete
        return [*complete, [line]]

    def rest(self) -> list[Block]:
        """Return the lines that were held back, even if their tracebacks are not complete."""
        return [block for rank in list(self._open) for block in self._end(rank)]

    def _end(self, rank: int) -> list[Block]:
        ended = self._open.pop(rank)
        return [ended.lines[: ended.whole], *([line] for line in ended.lines[ended.whole :])]


def folded(lines: Iterable[LogLine]) -> list[Shared]:
    """Return the lines in order. A line that several ranks printed at about the same time appears only once."""
    blocks = Blocks()
    return folded_blocks([*(block for line in lines for block in blocks.take(line)), *blocks.rest()])


def folded_blocks(blocks: Iterable[Block]) -> list[Shared]:
    """Fold lines that are already in blocks, as folded() does. Identical tracebacks are folded as a whole.

    A block is folded into the first identical block that comes after the previous block of the same rank. This keeps
    the lines of each rank in order. For example, if two ranks both print A B A B, the first A of one is folded into the
    first A of the other, and the second A into the second A, whether the ranks print in turn or in bursts.
    """
    entries: list[tuple[Block, str, list[int]]] = []
    last_of: dict[int, int] = {}
    for block in blocks:
        line, text = block[0], _compared(block)
        begin = max(last_of.get(line.rank, -1) + 1, len(entries) - _FOLD_WITHIN_LINES)
        for at in range(begin, len(entries)):
            other_block, other_text, ranks = entries[at]
            if text != other_text or not text:
                continue
            other = other_block[0]
            if line.stream == other.stream and line.time - other.time < _FOLD_WITHIN_S:
                ranks.append(line.rank)
                break
        else:
            at = len(entries)
            entries.append((block, text, [line.rank]))
        last_of[line.rank] = at
    return [Shared(line, ranks) for block, _, ranks in entries for line in block]


def _compared(block: Block) -> str:
    """Return the text by which blocks are compared: blocks with the same text are folded."""
    if len(block) == 1:
        return block[0].text
    return _RANKS_OWN.sub(r"\1\2\3\4", "\n".join(line.text for line in block))
