"""The panel of a `%%stream` cell in JupyterLab, during the run and after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lab import Opened, axe
from playwright.sync_api import expect

SETUP = """%load_ext sparkring
import time
from pathlib import Path
import numpy as np

FOLDER = {folder!r}

def batches():
    random = np.random.default_rng(0)
    for number in range(10_000):
        if number >= 40 and Path(FOLDER, "end").exists():
            return
        time.sleep(0.05)
        x = random.normal(size=(64 + number % 7, 3)).astype("float32")
        yield {{"x": x, "y": x @ np.array([1, 2, 3], "float32")}}
"""
MODEL = """%%torchrun
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
"""
TRAINING = """%%stream batches() --checkpoint-dir {folder}/checkpoints --name "a live model"
import sparkring
loss = ((model(torch.as_tensor(batch["x"])) - torch.as_tensor(batch["y"])[:, None]) ** 2).mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
sparkring.log(loss=float(loss))
if batch_id % 10 == 0:
    print(f"batch {{batch_id}} has {{len(batch['x'])}} rows of rank {{rank}}")
"""


def test_a_stream(opened: Opened, tmp_path: Path, shoot: Callable[..., None]) -> None:
    """The panel shows the batches, the weights' version and the loss by batch, and no percentage."""
    texts = [text.format(folder=str(tmp_path)) for text in (SETUP, TRAINING)]
    notebook = opened("stream", texts[0], "%gang start -n -2 --framework torch", MODEL, texts[1], "%runs")
    for at in range(3):
        notebook.run(at, wait=True)
    notebook.run(3, wait=True)  # the cell returns while the stream goes on
    panel = notebook.panel(3)
    tab, words = panel.get_by_role("tabpanel", name="Stream"), panel.locator("div.sr-words")
    expect(panel.get_by_role("tab").first).to_have_text("Stream")
    said = re.compile(r"^batch (3[5-9]|[4-9]\d) · [\d,]+ rows · [\d,.]+ rows/s · .*saved after batch \d+")
    expect(words).to_contain_text(said)
    expect(panel.get_by_role("progressbar")).not_to_have_attribute("aria-valuenow", re.compile("."))
    for name in ("batch", "rows", "trained", "saved", "last batch"):
        expect(tab.locator("dt").get_by_text(name, exact=True)).to_be_visible()
    expect(tab.get_by_role("figure", name="Seconds per batch").locator("canvas")).to_be_visible()
    expect(tab.get_by_role("figure", name="loss by batch")).to_be_visible()
    training = tab.get_by_role("button", name="training")
    expect(training).to_have_attribute("aria-pressed", "true")
    training.click()
    expect(training).to_have_attribute("aria-pressed", "false")
    training.click()
    tab.get_by_role("figure", name="Seconds per batch").press("End")
    expect(tab.locator(".sr-reading").filter(has_text="together")).to_contain_text(re.compile(r"batch\d+rows(6\d|70)"))
    panel.get_by_role("tab", name="Stream").click()
    assert axe(notebook.page, "[data-windowed-list-index='3'] .sr-panel") == []
    shoot(notebook, "stream-running", notebook.cell(3))
    stop = panel.locator(".sr-stop")
    stop.click()  # the stream ends after the batch, which another click would end, too
    expect(stop).to_be_enabled()
    expect(panel.locator(".sr-state")).to_have_text("finished")
    notebook.run(3, wait=True)
    expect(panel.locator(".sr-notices")).to_contain_text(re.compile(r"passes over batches 0–\d+ of batches\(\)"))
    expect(words).to_contain_text(said)
    notebook.run(4, wait=True)
    expect(notebook.cell(4).locator(".jp-OutputArea")).to_contain_text(re.compile(r"running\s*batch \d+ · "))

    (tmp_path / "end").touch()
    expect(panel.locator(".sr-state")).to_have_text("finished")
    expect(words).to_contain_text(re.compile(r"^ended after batch \d+ · "))
    expect(tab.locator("dt").first).to_have_text("last batch")
    shoot(notebook, "stream-ended", notebook.cell(3))
    expect(notebook.static(3)).to_contain_text("time per batch")
    expect(notebook.static(3)).to_contain_text(re.compile(r"ended after batch \d+ · [\d,]+ rows"))
    assert opened.errors == []
