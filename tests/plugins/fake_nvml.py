"""A stub of NVML, with which tests find GPUs on machines that have none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a fake libnvidia-ml.so.1, which reports $FAKE_GPUS GPUs. nvml.c has the other settings."""
    folder = tmp_path_factory.mktemp("nvml")
    source, library = Path(__file__).with_name("nvml.c"), folder / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(folder)
