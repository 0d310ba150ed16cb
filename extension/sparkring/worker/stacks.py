"""Where a rank stands: its Python stack, taken without its cooperation.

faulthandler's signal handler is C code: it answers while the rank waits in an allreduce, holds the
GIL, or sits in a system call; only a frozen process does not.
"""

from __future__ import annotations

import faulthandler
import re
import signal

CELL_NAME = "<cell>"  # the file name of the cell that is being run
_CELL = re.compile(r"<cell(?: (\d+))?>")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def install(fd: int) -> None:
    """Write this process's stacks to `fd` on SIGUSR2, and to stderr when it crashes."""
    faulthandler.enable(all_threads=True)  # a crash may be in a thread of a library
    faulthandler.register(signal.SIGUSR2, file=fd, all_threads=True)


def cell_name(number: int) -> str:
    """The file name that the code of a rank's cell is compiled under: each its own, since functions outlive cells."""
    return CELL_NAME if number == 1 else f"<cell {number}>"


def is_cell(filename: str) -> bool:
    """Is this the file name of a cell, the one that is being run or an earlier one?"""
    return _CELL.fullmatch(filename) is not None


def cell_line(text: str) -> int:
    """The innermost line of the cell in a stack as faulthandler prints it; 0 if it is not on it."""
    newest, line = 0, 0
    for found in _FRAME.finditer(text):
        cell = _CELL.fullmatch(found["file"])
        if cell and int(cell[1] or 1) > newest:  # functions of earlier cells may be on the stack too
            newest, line = int(cell[1] or 1), int(found["line"])
    return line


def innermost(text: str) -> str:
    """The function in which the main thread waits, as `file.py:12 function`; empty if unknown."""
    last_block = text.rpartition("(most recent call first):")[2]
    found = _FRAME.search(last_block)
    return f"{found['file'].rpartition('/')[2]}:{found['line']} {found['function']}" if found else ""
