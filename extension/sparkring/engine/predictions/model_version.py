"""Computes a digest of a model and of the code that it uses. The digest is the same in every kernel."""

from __future__ import annotations

import secrets
import sys
from typing import Any

from sparkring.capture.content import Contents
from sparkring.capture.picklability import ipython_names


def version_of(value: Any, *more: str) -> str:
    """Return a digest of a model or a function, of everything that it uses from the notebook, and of `more`.

    The digest of what cannot be compared is different each time.
    """
    namespace = getattr(sys.modules.get("__main__"), "__dict__", {})
    contents = Contents(namespace, ipython_names(namespace), modes=False)
    return contents.digest(value, *more) or secrets.token_hex(16)
