"""The checks of `%doctor`: whether launches from this notebook will work, and if not, what to do.

Each check is a function that returns findings. Reading the state of the machine, of the GPUs and of the executors is
separate from judging it, so that what the checks say can be tested without GPUs and clusters.
"""

from __future__ import annotations

from sparkring.products import offer

offer(__name__, {}, "doctor")
