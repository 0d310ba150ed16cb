"""Delta tables, without Spark."""

from typing import Any

import pyarrow as pa
import pytest


@pytest.fixture(scope="session")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package deltalake. Its threads and descriptors stay, so they begin before the first test that uses it."""
    deltalake = pytest.importorskip("deltalake")
    first = tmp_path_factory.mktemp("delta")
    deltalake.write_deltalake(first, pa.table({"x": [1]}))
    deltalake.DeltaTable(first).delete("x = 1")
    return deltalake
