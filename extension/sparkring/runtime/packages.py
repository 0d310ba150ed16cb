"""Optional packages: imports them, and says how to install one that is missing."""

from __future__ import annotations

import importlib
from typing import Any

from sparkring.errors import OptionsError, SparkringError

# What pip installs for a module, if that is not a package of the same name.
_DISTRIBUTIONS = {
    "deltalake": "'sparkring[delta]'",
    "optuna": "'sparkring[search]'",
    "petastorm": "'sparkring[petastorm]'",
    "pyarrow": "'sparkring[data]'",
    "pyspark": "'sparkring[spark]'",
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# Packages that a cell is likely to mean if it imports a module of this name.
KNOWN = frozenset(_DISTRIBUTIONS) | {
    *("jax", "keras", "lightning", "matplotlib", "mlflow", "pandas", "polars", "scipy", "tensorflow", "torch"),
    "transformers",
}


def command(package: str) -> str:
    """Return the command that installs a package."""
    return f"`pip install {_DISTRIBUTIONS.get(package, package)}`"


def require(module: str, what: str, error: type[SparkringError] = OptionsError, *, otherwise: str = "") -> Any:
    """Import a module of an optional package, or of sparkring, and return it; `what` needs it.

    Raise `error` if the import fails. `otherwise` is what the user can do instead of installing the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = module.partition(".")[0]
        if package == "sparkring":
            raise (lacking(problem, what) or problem) from None
        message = f"{what} needs {package}, which is not installed here"
        if not isinstance(problem, ModuleNotFoundError) or problem.name != package:
            message = f"{what} needs {package}, which cannot be imported here ({problem})"
        raise error(f"{message}: {command(package)}{otherwise}.") from problem


def lacking(problem: ImportError, what: str) -> OptionsError | None:
    """Return the error that says how to install the package that `what` lacks; None if that is not the problem."""
    if not isinstance(problem, ModuleNotFoundError) or problem.name not in KNOWN:
        return None
    return OptionsError(f"{what} needs {problem.name}, which is not installed here: {command(problem.name)}.")
