"""Says on which code and values the results of items depend. The keys of kept results contain a digest of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from sparkring.capture.content import PYTHON, Contents, digest
from sparkring.checkpointing.compatibility import meaning


class Meaning(NamedTuple):
    """Digests of the code that items run, and of the values that the code uses, by name.

    Under the name '', `parts` has the version of Python. `incomparable` are the names of values whose changes are not
    noticed. `contents` computes the digests of items.
    """

    parts: dict[str, str]
    incomparable: list[str]
    contents: Contents

    @property
    def key(self) -> str:
        """The digest of all parts; of the version of Python only as far as it compiles the code differently."""
        return digest({name: part for name, part in self.parts.items() if name})


def meaning_of(
    sources: Mapping[str, Iterable[str]], used: Mapping[str, Any], namespace: Mapping[str, Any], hidden: Container[str]
) -> Meaning:
    """Return what results depend on: code, and everything that the code uses from the notebook.

    `sources` is the code itself, such as the cell and its scripts, each under a name for messages. Comments do not
    count. `namespace` contains the notebook's names and values, and `used` the names that the code uses, with their
    values. Names in `hidden` do not count.
    """
    contents = Contents(namespace, hidden)
    parts, incomparable = contents.parts(used)
    parts |= {name: digest([meaning(source) for source in code]) for name, code in sources.items()}
    return Meaning({"": PYTHON, **parts}, incomparable, contents)
