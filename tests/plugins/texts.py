"""Whether a text says what a test expects, however it is worded."""

import re

GAP = 100  # the parts of one sentence are at most so many characters apart


def mentions(text: str, *parts: str) -> bool:
    """Return whether the text has these words, names and numbers, in this order and close to each other."""
    return re.search(rf".{{0,{GAP}}}?".join(map(_whole, parts)), text, re.DOTALL) is not None


def _whole(part: str) -> str:
    """Return a pattern of the part, which matches whole words only, as far as the part begins and ends with one."""
    if not part[:1].isalnum():
        return re.escape(part)
    return rf"(?<!\w){re.escape(part)}" + (r"(?!\w)" if part[-1:].isalnum() else "")
