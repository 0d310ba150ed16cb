"""The process that forks Spark's Python workers in the tests. It saves most of the workers' CPU time.

Spark puts archives on PYTHONPATH: pyspark, without compiled modules, and a jar. Each rank that imports pyspark would
compile it again, and, before Python 3.12, each task would read the archives' directories a dozen times. So the same
pyspark is imported from where it is installed. The archive is used only under a Python that has no pyspark.
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
        sys.path_importer_cache.clear()  # the cache has the archives, too
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if not is_sparks(entry))  # for the ranks
        if "SPARK_SIMPLIFIED_TRACEBACK" in os.environ:  # set for workers that run functions over rows
            import pandas  # noqa: F401
            import pyarrow  # noqa: F401
    gc.freeze()  # workers collect garbage after each task, and can leave out these objects
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
