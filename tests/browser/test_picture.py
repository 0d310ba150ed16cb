"""The moving picture of README: the panel while the quickstart's net trains on two ranks."""

from __future__ import annotations

import io
import time
from pathlib import Path

import nbformat
import pytest
from lab import Opened
from PIL import Image
from playwright.sync_api import expect

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
BEFORE = ("setup", "photos", "train")  # the ids of the cells that the ring's cell needs
PAUSE_S, END_MS, LARGEST = 0.25, 3_000, 2_000_000
EDGE = 6  # px
SIZE = {"width": 1100, "height": 760}


@pytest.mark.slow
@pytest.mark.extended("appearance", "it makes pictures for README, and shows nothing that other tests do not")
@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_moving_picture(opened: Opened, pictures: Path, look: str) -> None:
    """The frames show the run from its start to its end. docs/images holds copies of the two pictures."""
    cells = {cell.id: cell.source for cell in nbformat.read(QUICKSTART, as_version=4).cells}
    notebook = opened(f"moving-{look}", *(cells[name] for name in BEFORE), cells["ring"])
    notebook.page.set_viewport_size(SIZE)
    notebook.theme(look)
    notebook.command("application:toggle-left-area")
    notebook.page.add_style_tag(content="#jp-top-panel, #jp-menu-panel, #jp-bottom-panel { visibility: hidden }")
    for at in range(len(BEFORE)):
        notebook.show(at)
        notebook.run(at, wait=True)
    at = len(BEFORE)
    notebook.show(at)
    notebook.run(at)
    expect(notebook.panel(at)).to_be_visible()
    frames, shown_ms, began = [], [], time.monotonic()
    while not (over := notebook.panel(at).locator(".sr-state").inner_text() == "finished") or not frames:
        frames.append(Image.open(io.BytesIO(notebook.cell(at).screenshot())).convert("RGB"))
        notebook.page.wait_for_timeout(1000 * PAUSE_S)
        shown_ms.append(round(1000 * (time.monotonic() - began)) - sum(shown_ms))
    assert over
    frames.append(Image.open(io.BytesIO(notebook.cell(at).screenshot())).convert("RGB"))
    shown_ms.append(END_MS)
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    frames = [_on(size, frame) for frame in frames]
    path = pictures / f"moving-{look}.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=shown_ms, loop=0, quality=60, method=4)
    assert path.stat().st_size < LARGEST


def _on(size: tuple[int, int], frame: Image.Image) -> Image.Image:
    """Return the frame, without its lower edge, at the top left of a picture of `size` in its background's colour."""
    whole = Image.new("RGB", size, frame.getpixel((frame.width // 2, frame.height - 2 * EDGE)))
    whole.paste(frame.crop((0, 0, frame.width, frame.height - EDGE)))
    return whole
