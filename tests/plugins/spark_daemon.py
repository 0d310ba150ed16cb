"""The process that forks Spark's Python workers in the tests; it saves most of their CPU time.

Spark puts zips on PYTHONPATH: pyspark, without compiled modules, and a jar. A rank that imports pyspark would compile
it, and, before Python 3.12, each task would read the directories of the zips a dozen times. So the pyspark that is
installed is used, which is the same; the zip is used only under a Python without it.
"""

import gc
import os
import runpy
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))


def is_sparks(entry: str) -> bool:
    return entry == HERE or os.path.basename(entry).startswith(("pyspark.zip", "py4j-", "spark-core_"))


def main() -> None:
    path = [entry for entry in sys.path if not is_sparks(entry)]
    if PathFinder.find_spec("pyspark", path):
        sys.path[:] = path
        sys.path_importer_cache.clear()  # it has the zips, too
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if not is_sparks(entry))  # for the ranks
        if "SPARK_SIMPLIFIED_TRACEBACK" in os.environ:  # its workers run functions over the rows of DataFrames
            import pandas  # noqa: F401
            import pyarrow  # noqa: F401
    gc.freeze()  # each worker collects garbage after each task
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
