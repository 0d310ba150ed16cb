"""Describes a run in words. All views, errors and lists use the functions of this package."""

# ruff: noqa: F403 - a star passes on all functions of a module

from sparkring.history.describe.failures import *
from sparkring.history.describe.gangs import *
from sparkring.history.describe.gpus import *
from sparkring.history.describe.item_runs import *
from sparkring.history.describe.progress import *
from sparkring.history.describe.run import *
from sparkring.history.describe.standings import *
from sparkring.history.describe.streams import *
from sparkring.history.describe.text import *
from sparkring.history.describe.verdicts import *
