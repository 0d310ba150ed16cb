"""Python's debugger on a rank. This module is imported when it is needed, since the import takes 10 ms."""

from __future__ import annotations

import pdb
import traceback
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])


class Debugger(pdb.Pdb):
    """Python's debugger, with one difference: an interrupt ends the cell. Pdb would only show its prompt again."""

    def __init__(self) -> None:
        super().__init__(nosigint=True)  # an interrupt must end the cell even after `continue`

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:
            self.set_quit()


def post_mortem(error: Exception) -> None:
    """Open the debugger where the user's code has raised `error`, until the user quits it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    if frames is None:  # the error is one of ours, such as that a value could not be loaded
        return
    print("".join(traceback.format_exception_only(error)), end="")
    debugger = Debugger()
    debugger.reset()
    debugger.interaction(None, frames)
