"""Processes that ranks start: what they know of the notebook and the cell."""

from __future__ import annotations

import pytest

from sparkring.errors import RunFailed


def test_x(local):
    namespace = {"__name__": "__main__"}
    exec("""
import threading
factor = 10
lock = threading.Lock()
class Point:
    def __init__(self, x): self.x = x
def scaled(point): return Point(factor * point.x)
""", namespace)
    result = local.run('''
        import multiprocessing, os, pickle, torch
        def here(x): return scaled(Point(x)).x + 1
        out = []
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                made, = pool.map(scaled, [Point(2)])
                out.append((type(made) is Point, made.x, pool.map(here, [3])))
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 2
            def __getitem__(self, i): return scaled(Point(i)).x
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
        out.append([int(b) for b in loader])
        out
    ''', n=1, namespace=namespace)
    assert result.value == 1
