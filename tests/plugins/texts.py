"""Whether a text says what a test expects, however it is worded."""

import re

GAP = 100  # the parts of one sentence are at most so many characters apart


def mentions(text: str, *parts: str) -> bool:
    """Return whether the text has these words, names and numbers, in this order and close to each other."""
    whole = (rf"(?<!\w){re.escape(part)}(?!\w)" if part[:1].isalnum() else re.escape(part) for part in parts)
    return re.search(rf".{{0,{GAP}}}?".join(whole), text, re.DOTALL) is not None
