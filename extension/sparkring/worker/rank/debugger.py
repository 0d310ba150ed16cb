"""Python's debugger on a rank. This module is imported when breakpoint() is called, since the import takes 10 ms."""

from __future__ import annotations

import pdb
from typing import Any


class Debugger(pdb.Pdb):
    """Python's debugger, with one difference: an interrupt ends the cell. Pdb would only show its prompt again."""

    def __init__(self) -> None:
        super().__init__(nosigint=True)  # an interrupt must end the cell even after `continue`

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:
            self.set_quit()
