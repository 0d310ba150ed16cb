"""What ranks print, made fit to be shown: control codes, start-up noise, and equal lines of several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkring.record import LogLine, RunRecord

# ── Control codes ─────────────────────────────────────────────────────────────

# Sequences that a terminal would act on: CSI (colours, cursor), strings that end (titles, links), and short ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90\x9e\x9f\x98])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[=>NOc78DEHM]"
)
# Characters that are not seen but change what is seen; tabs, joiners and soft hyphens do no harm.
_HIDDEN = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def shown(text: str) -> str:
    """`text` with each hidden character as a visible one: a control picture, or its escape."""
    return _HIDDEN.sub(_picture, text)


def plain(text: str) -> str:
    """A line without colours and cursor movements; other control characters become visible."""
    return shown(_SEQUENCE.sub("", text.lstrip("\b")))


def coloured(text: str) -> list[tuple[str, str]]:
    """A line in pieces: the parameters of a colour code (SGR; "" for none) and the text before the next one.

    All other sequences are left out, other control characters become visible.
    """
    text = text.lstrip("\b")
    pieces: list[tuple[str, str]] = []
    code, at = "", 0
    for found in _SEQUENCE.finditer(text):
        pieces.append((code, shown(text[at : found.start()])))
        at = found.end()
        is_colour = found["final"] == "m" and re.fullmatch(r"[0-9;:]*", found["parameters"])
        code = (found["parameters"] or "0") if is_colour else ""
    pieces.append((code, shown(text[at:])))
    return [piece for piece in pieces if piece[0] or piece[1]]


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
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
      | [IWE]\d{4}\ \d\d:\d\d:\d\d[\d.]*\ +\d+\ \S+\.cc:\d+\]\ .*(?:    # the same before logging is set up
            register\ cu\w+\ factory | TF-TRT | computation\ placer | cpu_feature_guard | oneDNN | cuInit
        )
      | WARNING:\ All\ log\ messages\ before\ absl::InitializeLog\(\)
      | To\ enable\ the\ following\ instructions:.*rebuild\ TensorFlow
    )""",
    re.VERBOSE,
)


def is_noise(line: LogLine) -> bool:
    """Is it one of the lines with which TensorFlow greets everybody?"""
    return line.stream == "stderr" and _NOISE.match(line.text) is not None


# ── Which lines to show ───────────────────────────────────────────────────────

_FOLD_WITHIN_S = 2.0
_FOLD_WITHIN_LINES = 100


@dataclass
class Shared:
    """A line and the ranks that printed it."""

    line: LogLine
    ranks: list[int]


def visible(found: Iterable[LogLine], logs: str) -> list[LogLine]:
    """Those lines that `--logs` asks for; what was sent to the notebook on purpose is always among them."""
    if logs == "all":
        return in_lines(found)
    rank = 0 if logs == "rank0" else None
    return in_lines(line for line in found if line.rank == rank or line.stream == "message")


def in_lines(found: Iterable[LogLine]) -> list[LogLine]:
    """The same with messages of several lines cut into these."""
    cut: list[LogLine] = []
    for line in found:
        if line.stream == "message" and "\n" in line.text:
            cut += [line._replace(text=part.removesuffix("\r")) for part in line.text.rstrip("\n").split("\n")]
        else:
            cut.append(line)
    return cut


def pending(record: RunRecord, most: int = 8) -> list[LogLine]:
    """Lines whose end has not been printed yet, such as progress bars; of a few ranks only."""
    found: list[LogLine] = []
    for rank in record.ranks:
        if rank.partial_stdout or rank.partial_stderr:
            found += rank.lines_with_partial()[len(rank.tail) :]
        if len(found) >= most:
            break
    return [line for line in visible(found, record.logs) if line.text.strip()][:most]


def folded(lines: Sequence[LogLine]) -> list[Shared]:
    """The lines in order, those that several ranks printed at about the same time only once.

    Ranks speak in turn and in bursts (A B, then A B again), so a line joins the first equal one that
    came after its own rank's last: each rank's own order stays as it was.
    """
    found: list[Shared] = []
    last_of: dict[int, int] = {}
    for line in lines:
        begin = max(last_of.get(line.rank, -1) + 1, len(found) - _FOLD_WITHIN_LINES)
        for at in range(begin, len(found)):
            other = found[at].line
            if (
                other.text == line.text
                and other.stream == line.stream
                and line.time - other.time < _FOLD_WITHIN_S
                and line.text
            ):
                found[at].ranks.append(line.rank)
                break
        else:
            at = len(found)
            found.append(Shared(line, [line.rank]))
        last_of[line.rank] = at
    return found
