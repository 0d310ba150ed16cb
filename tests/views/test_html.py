import base64
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from texts import mentions

from sparkring.history import describe
from sparkring.history.events import (
    AttemptEnded,
    AttemptStarted,
    CapturedName,
    CheckpointDamaged,
    CheckpointSaved,
    CodeFrame,
    DataOpened,
    Failure,
    GpuUsed,
    MemberJoined,
    Metrics,
    ModelGpuUsed,
    Notice,
    Output,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RunFinished,
    UserMessage,
)
from sparkring.history.lines import plain
from sparkring.views import figure, html
from sparkring.views.charts import MOST
from sparkring.views.html import HtmlView, bundle, panel
from sparkring.views.markup import RANK_COLOURS, log_text
from sparkring.views.python_code import coloured
from sparkring.views.sections import code, log, metrics
from sparkring.views.tables import table_html

NOW = 1_700_000_060.0
_TAGS = {"div", "b", "small", "span", "pre", "table", "caption", "thead", "tbody", "tr", "th", "td", "details",
         "summary", "mark", "figure", "figcaption", "svg", "path", "polyline", "polygon", "text", "g",
         "title", "p", "code", "img", "br"}  # fmt: skip
_SPOKEN = {"title", "aria-label", "alt"}  # attributes that may contain text from users
_OTHERS = {"class", "style", "align", "d", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "x", "y",
           "dy", "text-anchor", "points", "fill", "fill-opacity", "width", "height", "viewbox", "role", "tabindex",
           "font-size", "font-weight", "transform", "src", "data-sparkring-static"}  # fmt: skip
_DRAWN = {"svg", "defs", "style", "g", "path", "polyline", "polygon", "use", "text", "rect", "clipPath"}
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


class Elements(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self.inside:
            self.text += data


def payloads(count: int = 60) -> Iterator[str]:
    """Yield strings that would harm a page if they were not escaped. Each begins with `evilN`, where N is a number."""
    rnd = random.Random(7)
    parts = [
        "<script>evil()</script>", "<img src=evil onerror=evil()>", '"><evil>', "' evil='", '" onmouseover="evil()',
        "</pre></div></details>", "</style><evil>", "<!--evil", "]]><evil/>", "&lt;evil&gt;", "&#60;evil&#62;",
        "\x1b]8;;javascript:evil()\x1b\\evil\x1b]8;;\x1b\\", "\x1b]8;;\"onclick=evil\x07evil\x1b]8;;\x07", "\x1b[2J",
        "\x1b[1;31mevil\x1b[0m", "\x1b[38;2;1;2;999999999m", "\x1b[38;5;evilm", "\x1b[31;url(evil)m", "\x1b[H\x1b[K",
        "\x9b31m", "\x9d0;evil\x9c", "\u202eevil\u202c", "\u2066evil", "\u2069", "\ufeff", "\x00", "\x07", "\x08",
        "\x7f", "\ud800", "<svg onload=evil()>", "<iframe srcdoc='<evil>'>", "javascript:evil()", "{{evil}}", "${evil}",
        "<a href='data:text/html,evil'>", "$$\\href{evil}{x}$$", "<style>*{background:url(evil)}</style>", "`evil`",
    ]  # fmt: skip
    for number in range(count):
        yield f"evil{number} " + "".join(rnd.choices(parts, k=rnd.randint(1, 5)))


@pytest.fixture
def hostile(replayed):
    """Return a function that makes the record of a run in which every text is a payload."""

    def make(payload: str, final: bool = True):
        line = payload.encode("utf-8", "surrogatepass") + b"\n"
        failure = Failure("exception", payload, (CodeFrame(payload, 1, payload, True),), payload, payload)
        events = [
            Notice(2.0, payload),
            *(Output(stream, line, time=2.0, rank=rank) for rank in (0, 1) for stream in ("stdout", "stderr")),
            Output("stdout", line.rstrip(), time=2.0, rank=0),
            UserMessage(payload, time=2.0, rank=0),
            *(Metrics({payload: 1 / n, f"val_{payload}": 2 / n}, epoch=n, time=2.0, rank=0) for n in (1, 2, 3)),
            Metrics({payload: 7.0}, epoch=3, time=2.0, rank=1),
            CheckpointSaved(payload, "1", 1, 9, metrics={payload: 1.0}, time=2.0, rank=0),
            CheckpointDamaged(payload, "0", 2, payload, time=2.0, rank=0),
            AttemptStarted(2.0, 1, 2, payload, 3),
            RankStarted(2.0, 1, payload, 5),
            Output("stdout", line, time=2.0, rank=1),
            RankFailed(2.5, 1, failure),
            AttemptEnded(2.5, 1, payload, 1),
            AttemptStarted(2.6, 2, 2, payload, 3),
            CheckpointSaved(payload, "3", 3, 9, metrics={payload: 2.0}, time=2.6, rank=0),
            *(Output(stream, line, time=2.7, rank=rank) for rank in (0, 1) for stream in ("stdout", "stderr")),
            Output("stdout", line.rstrip(), time=2.7, rank=0),
            GpuUsed(payload, payload, 1, 2, 3, time=2.7, rank=1),
            RankFailed(3.0, 1, failure),
            *([RunFinished(4.0, "failed", payload, 1)] if final else []),
        ]
        return replayed(
            *events,
            title=payload,
            code=f"%%horovod\n{payload}",
            framework=payload,
            captured=(CapturedName(payload, payload, 1, "by value", payload, payload, True, payload),),
            versions=((payload, payload),),
        )

    return make


def check(page: str, allowed_tags: set[str] = _TAGS) -> Elements:
    """Check that a page has only elements and attributes that views use, and no invisible characters."""
    found = Elements(page)
    for tag, attributes in found.tags:
        assert tag in allowed_tags
        assert set(attributes) <= _SPOKEN | _OTHERS
        assert not any("evil" in value for name, value in attributes.items() if name not in {*_SPOKEN, "src"})
        if tag == "img":
            check_image(attributes["src"])
    assert not _HIDDEN.search(page)
    return found


def not_drawn(*_):
    raise RuntimeError("matplotlib has no fonts")


def check_image(source: str) -> None:
    """Check that an image loads nothing, and that a drawing has only elements that views use."""
    kind, data = source.split(",")
    if kind == "data:image/png;base64":
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
        return
    assert kind == "data:image/svg+xml;base64"
    for element in ElementTree.fromstring(base64.b64decode(data).decode()).iter():
        assert element.tag.rpartition("}")[2] in _DRAWN
        assert not any("evil" in name or "evil" in value for name, value in element.attrib.items())
        assert not any(name.endswith("href") and value[0] != "#" for name, value in element.attrib.items())


@pytest.mark.parametrize("final", [True, False])
def test_what_ranks_and_users_write_is_text(hostile, final, monkeypatch):
    draw = figure._png
    for number, payload in enumerate(payloads()):
        monkeypatch.setattr(figure, "_png", draw if number % 10 == 0 else not_drawn)
        found = bundle(hostile(payload, final), now=NOW, final=final)
        page = check(found["text/html"])
        assert plain(payload.partition("\n")[0]) in page.text
        check(code.html(hostile(payload, final), NOW, "tab") + metrics.html(hostile(payload, final), NOW, "tab"))
        assert not _HIDDEN.search(found["text/plain"].replace("\n", ""))
        found["text/html"].encode()  # a notebook with text that cannot be encoded could not be saved


def test_tables_hold_text():
    for payload in payloads():
        check(table_html((payload, "x"), [(payload, "1")]))


def test_text_stays_text_in_an_exported_notebook(hostile, monkeypatch):
    import nbformat
    from nbconvert import HTMLExporter

    cells = []
    draw = figure._png
    for number, payload in enumerate(payloads(20)):
        monkeypatch.setattr(figure, "_png", draw if number % 10 == 9 else not_drawn)
        cell = nbformat.v4.new_code_cell("%%horovod")
        data = bundle(hostile(payload), now=NOW, final=True)
        cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
        cells.append(cell)
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    found = Elements(page)
    for tag, attributes in found.tags:
        assert "evil" not in tag
        assert not any("evil" in name for name in attributes)
        assert not any("evil" in value for name, value in attributes.items() if name not in {*_SPOKEN, "src"})
    pictures = [attributes for tag, attributes in found.tags if attributes.get("class") == "sr-figure"]
    assert len(pictures) == 2
    assert "evil19" in pictures[-1]["alt"]
    assert "evil19" in found.text


def test_colours_become_spans_and_end_with_the_line():
    assert log_text("a\x1b[1mb\x1b[0mc") == 'a<span style="font-weight:bold">b</span>c'
    assert log_text("\x1b[48;5;196m\x1b[38;2;1;2;3mx") == '<span style="background:#ff0000;color:#010203">x</span>'
    assert log_text("\x1b[38;2;1mx\x1b[99my\x1b[37mz") == "xyz"


def test_every_colour_is_readable_on_light_and_on_dark_pages():
    """Programs print white text for dark terminals, and black text for light ones."""
    shown = [log_text(f"\x1b[38;5;{number}mx") for number in (*range(16, 256), 9_999_999_999)]
    shown += [log_text(f"\x1b[38;2;{colour}mx") for colour in ("1;2;3", "255;255;255", "0;0;255", "255;255;0")]
    for found in shown:
        hexadecimal = re.match('<span style="color:#(......);color:color-mix', found)[1]
        levels = [int(hexadecimal[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        light = [level / 12.92 if level <= 0.04 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]
        luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
        assert min(1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05) > 4.5, found


def test_a_line_of_nothing_but_colours_stays_small():
    assert len(log_text("\x1b[1mx" * 1_000)) < 2_000


# ── What is shown ─────────────────────────────────────────────────────────────


def test_while_it_starts(replayed):
    page = Elements(panel(replayed(MemberJoined(2.0, 0, "h"), Notice(3.0, "waiting"), up=False), now=NOW, final=False))
    assert "1 of 2 ranks have connected" in page.text
    assert "⚑ waiting" in page.text


def test_while_it_runs(replayed):
    record = replayed(
        *(
            Metrics({"loss": 1 / step + rank}, step, 1, 40, 2, time=NOW - 20 + step, rank=rank)
            for step in (1, 9)
            for rank in (0, 1)
        ),
        Output("stdout", b"Epoch 1/2\n", time=NOW, rank=0),
        Output("stdout", b"Epoch 1/2\n", time=NOW, rank=1),
        Output("stderr", b"oh\n 22%|##", time=NOW, rank=1),
    )
    page = Elements(panel(record, now=NOW, final=False))
    assert "epoch 1 of 2 · step 9 of 40 · 11 % · 1 min 00 s left" in page.text
    assert "0.6111" in page.text
    assert "0.1111–1.1111" in page.text
    assert "0, 1 │ Epoch 1/2\n" in page.text
    assert "1 ┆ oh\n" in page.text
    assert "1 ┆  22%|##\n" in page.text
    assert any(attributes.get("style", "").endswith("width:11.2%") for _, attributes in page.tags)


def test_gpus(replayed):
    """Each rank's GPUs are shown with what is known about them. If there are many GPUs, only the first are shown."""
    record = replayed(
        GpuUsed("3", "NVIDIA H200", 10**9, 150 * 10**9, 80, 640, 71, time=2.0, rank=1),
        GpuUsed("2", "A", *[None] * 3, time=2.0, rank=0),
    )
    page = panel(record, now=NOW, final=False)
    header = "GPUnamememorytotalbusypowertemperature"
    assert f"rank{header}02A13NVIDIA H2001.00 GB150 GB80 %640 W71 °C" in check(page).text
    assert "1 GPU 80 %, 1.00 GB of 150 GB, 640 W, 71 °C" in page
    record = replayed(*(GpuUsed("0", "A", 1, 2, rank, time=2.0, rank=rank) for rank in range(20)), size=20)
    assert "the first 16 of 20 GPUs" in check(panel(record, now=NOW, final=True)).text
    record = replayed(ModelGpuUsed(2.0, "node-1", 4711, GpuUsed("1", "NVIDIA H200", 10**9, 150 * 10**9, 80)))
    text = check(panel(record, now=NOW, final=True)).text
    assert f"hostprocess{header}node-147111NVIDIA H2001.00 GB150 GB80 %" in text


def test_what_stays(replayed):
    record = replayed(
        Output("stderr", b"2026-01-01 12:00:00.1: I tensorflow/core/port.cc:1] oneDNN\nimportant\n", time=2.0, rank=0),
        *(Metrics({"loss": 1 / n}, epoch=n, epochs=20, ends_epoch=True, time=2.0 + n, rank=0) for n in range(1, 21)),
        RankFinished(NOW, 0, ""),
        RankFinished(NOW, 1, ""),
        RunFinished(NOW, "finished"),
    )
    page = Elements(panel(record, now=NOW, final=True))
    assert "the last 12 of 20 epochs" in page.text
    assert "TensorFlow's start-up (1 line)" in page.text
    assert page.text.index("important") < page.text.index("oneDNN")
    assert [tag for tag, _ in page.tags if tag in ("svg", "img")] == ["img"]
    assert "1  %%horovod -n -2\n" in page.text


def test_a_failure_and_its_line_in_the_cell(replayed, unfolded):
    failure = Failure("exception", "ValueError: bad\nmore", (CodeFrame("<cell>", 2, "<module>", True),))
    record = replayed(RankFailed(3.0, 1, failure), RankExited(3.0, 0), RunFinished(4.0, "failed", "", 1))
    page = unfolded(panel(record, now=NOW, final=True))
    assert "<b>rank 1 on node-1 failed: ValueError: bad</b> <small>cell line 2</small>" in page
    assert "more" in page
    assert page.count("<mark>train()</mark>") == 2, "beside the failure, and in the whole cell"
    assert 'class="x" title="rank 1 failed' in page
    assert 'class="s" title="rank 0 stopped' in page


def test_a_thousand_ranks_fit(replayed, unfolded):
    size = 1_100
    record = replayed(
        *(Output("stdout", b"<a line of some length>\n" * 300, time=2.0, rank=rank) for rank in range(size)),
        RankFailed(3.0, 1_050, Failure("exit", "exited with code 3")),
        RunFinished(4.0, "failed", "", 1_050),
        size=size,
        where="spark",
    )
    page = panel(record, now=NOW, final=True)
    assert len(page) < 200_000
    assert "rank 1050: the last of 300 lines" in page
    assert mentions(page, "lack of space", "ranks")
    assert [found in unfolded(page) for found in (">0–1049 ✓<", ">1050 ✗<", ">1051–1099 ✓<")] == [False, True, False]
    assert len(panel(record, now=NOW, final=False)) < 100_000


def test_two_talkative_ranks_fit(replayed):
    line = b"\x1b[31m<&>\x1b[0m" * 300 + b"\n"
    record = replayed(
        *(Output("stdout", line * 300, time=2.0, rank=rank) for rank in (0, 1)), RunFinished(4.0, "finished")
    )
    assert len(panel(record, now=NOW, final=True)) < 200_000


def test_no_scripts_no_ids_nothing_from_elsewhere(replayed):
    record = replayed(
        *(Metrics({"loss": 1 / n}, epoch=n, time=2.0, rank=0) for n in range(1, 9)), RunFinished(4.0, "finished")
    )
    page = panel(record, now=NOW, final=True)
    assert not re.search(r"<script|\bid=|https?:|url\(|@import", page)


def test_some_ranks_of_a_warm_gang(replayed):
    record = replayed(RankFinished(NOW, 0, ""), size=4, warm=True, ranks=(0, 2, 3))
    page = panel(record, now=NOW, final=False)
    assert "ranks 0, 2, 3 of 4 on this machine (2 hosts) · horovod · warm gang · " in page
    assert mentions(page, '<span class="i" title="rank 1 ', "not taking part", "node-1")
    assert ">1 ·</span>" in page
    assert '<span class="f" title="rank 0 finished' in page


def test_of_a_quick_run_only_lines_stay(replayed):
    began = 1_700_000_000.0
    record = replayed(
        *(Output("stdout", b"<hello>\n", time=began + 0.01, rank=rank) for rank in (1, 0)),
        Output("stderr", b"half", time=began + 0.02, rank=1),
        Notice(began, "a thing"),
        RunFinished(began + 0.9, "finished"),
        warm=True,
    )
    found = bundle(record, now=NOW, final=True)
    page = Elements(found["text/html"])
    assert page.text == "0, 1 │ <hello>\n   1 ┆ half\n⚑ a thing"
    assert re.search(rf'style="color: ?{RANK_COLOURS[0]}[^"]*">0, 1<', found["text/html"])  # whichever printed first
    assert not {"details", "table"} & {tag for tag, _ in page.tags}
    assert found["text/plain"] == "[0, 1] <hello>\n[1] half"
    check(found["text/html"])


@pytest.mark.parametrize(
    ("events", "fields"),
    [
        ([RunFinished(NOW, "finished")], {"warm": True}),
        ([RunFinished(1_700_000_000.1, "interrupted")], {"warm": True}),
        ([Metrics({"loss": 1.0}, time=2.0, rank=0), RunFinished(1_700_000_000.1, "finished")], {"warm": True}),
        ([RunFinished(1_700_000_000.1, "finished")], {}),
    ],
    ids=["slow", "ill", "measured", "cold"],
)
def test_of_any_other_run_the_panel_stays(replayed, events, fields):
    page = bundle(replayed(*events, **fields), now=NOW, final=True)["text/html"]
    assert "sr-head" in page


def test_the_plain_text_of_a_run_in_progress_says_when_it_was_drawn(replayed):
    record = replayed(Output("stdout", b"hello\n", time=2.0, rank=0))
    assert "\nsparkring: as of 2" in bundle(record, now=NOW, final=False)["text/plain"]
    ended = replayed(Output("stdout", b"hello\n", time=2.0, rank=0), RunFinished(NOW, "failed"))
    assert "as of" not in bundle(ended, now=NOW, final=True)["text/plain"]


def test_a_quick_run_that_prints_much_says_where_the_rest_is(replayed):
    line = b"\x1b[31m<&>\x1b[0m" * 300
    for text, count in ((b"x", 250), (b"x", 2_000), (line, 200)):
        printed = b"".join(b"%d %s\n" % (number, text) for number in range(count))
        record = replayed(
            Output("stdout", printed, time=2.0, rank=0), RunFinished(1_700_000_000.1, "finished"), warm=True
        )
        page = bundle(record, now=NOW, final=True)["text/html"]
        assert "earlier lines: /runs/a1b2/rank-N." in page
        assert len(page) < 190_000
        assert f"{count - 1} " in Elements(page).text


def test_lines_that_would_be_too_large_are_cut_to_the_last_ones(replayed):
    """Lines with many colours take much space. The last of them are shown, instead of none."""
    coloured = "\x1b[33mx\x1b[34my" * 60
    printed = b"".join(f"{line} {coloured}\n".encode() for line in range(30))
    page = panel(replayed(Output("stdout", printed, time=2.0, rank=0)), now=NOW, final=False)
    told = Elements(page).text
    assert "29 xyxy" in told
    assert "\n0 xyxy" not in told
    assert "not shown" not in told


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
@pytest.mark.parametrize(
    "said",
    ["日本語のテキスト" * 40, "\x1b[31m日\x1b[32m本\x1b[0m" * 15, "words " * 60],
    ids=["Japanese", "colours", "English"],
)
def test_a_panel_is_never_too_large_for_a_notebook(replayed, said, ended):
    """A letter that is not ASCII takes several bytes. The least important parts are left out, the failure is not."""
    size, code = 8, "%%horovod\n" + "\n".join(f"value_{line} = '{said[:300]}'" for line in range(400))
    printed = b"".join(f"{line} {said}\n".encode() for line in range(60))
    events = [Output("stdout", printed, time=2.0, rank=rank) for rank in range(size)]
    for step in range(30):
        for rank in range(size):
            values = {f"metric {number}": step / (number + rank + 1) for number in range(12)}
            events.append(Metrics(values, step, time=3.0 + step, rank=rank))
    if ended:
        events += [
            RankFailed(NOW - 1, 1, Failure("exception", f"ValueError: {said}")),
            RunFinished(NOW, "failed", "", 1),
        ]
    for warm in (False, True):
        record = replayed(*events, size=size, code=code, warm=warm)
        page = bundle(record, now=NOW, final=ended)["text/html"]
        assert len(page.encode()) < 190_000
        assert "59 " in Elements(page).text
        if ended:
            assert "rank 1 on node-1 failed: ValueError" in page
            assert mentions(page, "lack of space", "the cell", "its options")
    much = b"".join(f"{line} {said}\n".encode() for line in range(200))
    quick = replayed(Output("stdout", much, time=2.0, rank=0), RunFinished(1_700_000_000.1, "finished"), warm=True)
    assert len(bundle(quick, now=NOW, final=True)["text/html"].encode()) < 190_000


# ── The code, and what it ran with ────────────────────────────────────────────

CAPTURED = (
    CapturedName("lock", "_thread.lock", None, "cannot", "it is a `_thread.lock`", "Make it in the cell", False),
    CapturedName("images", "numpy.ndarray", 1_200_000, "by value", via="batches"),
    *(CapturedName(f"name{n}", "int", 5, "by value") for n in range(60)),
)
VERSIONS = (("python", "3.11.7"), ("torch", "2.1"))


def test_what_a_cell_ran_with(replayed):
    record = replayed(
        DataOpened(0, "/data/digits", "parquet", ("a", "b"), "a > 3", "v7", rows=1000, time=2.0, rank=0),
        Metrics({"loss": 1.0}, time=2.0, rank=0),
        captured=CAPTURED,
        versions=VERSIONS,
    )
    page = check(code.html(record, NOW, "tab")).text
    assert page.startswith("1  %%horovod -n -2\n2  train()\n")
    assert "lock_thread.lockcannotit is a `_thread.lock`. Make it in the cell" in page
    assert "images (used by batches)numpy.ndarray1.20 MBby value" in page
    assert "name59int" in page
    assert all(word in page for word in ("/data/digits", "a, b", "a > 3", "version v7"))
    assert "versions python 3.11.7 · torch 2.1" in page
    assert "logs /runs/a1b2" in page
    assert "TensorBoard %runs 2026-11-20_14-03-22_a1b2 --tensorboard" in page
    final = Elements(code.html(record, NOW, "final"))
    assert [tag for tag, _ in final.tags].count("details") == 2
    assert "the first 30" in final.text
    assert "name59" not in final.text
    assert "/data/digits" not in final.text, "the section about reading shows the data set"


def test_of_a_run_that_tells_nothing_of_it(replayed):
    page = code.html(replayed(), NOW, "tab")
    assert "sent from the" not in page
    assert "versions" not in page
    assert "TensorBoard" not in page
    warm = check(code.html(replayed(captured=CAPTURED[:1], warm=True), NOW, "tab")).text
    assert "not sent again" in warm


def test_the_line_that_failed_is_marked_in_the_tab(replayed):
    failure = Failure("exception", "ValueError: bad", (CodeFrame("<cell>", 2, "<module>", True),))
    page = code.html(replayed(RankFailed(3.0, 1, failure), RunFinished(4.0, "failed", "", 1)), NOW, "tab")
    assert "<mark>train()</mark>" in page


def test_code_is_coloured(replayed):
    """All characters stay, and each line has spans of its own. The line that failed has no colours."""
    cell = '%%horovod -n 2\nif x < 1:  # <b>\n    """two\n    lines"""\n    y = "$a$" + b % 3\n'
    page = code.html(replayed(code=cell), NOW, "tab")
    assert Elements(page).text.startswith("".join(f"{at}  {line}\n" for at, line in enumerate(cell.splitlines(), 1)))
    for kind, said in ((0, "%%horovod -n 2"), (3, "if"), (2, "1"), (5, "# &lt;b&gt;"), (1, "&quot;&quot;&quot;two")):
        assert f'<span class="sr-c{kind}">{said}</span>' in page
    final = code.html(replayed(code=cell), NOW, "final")
    assert 'style="color:#9262d6;color:color-mix(in srgb,#9262d6 65%,currentColor)">if</span>' in final
    long = "\n".join(f"if x{at}: y = {at}" for at in range(300))
    assert "color" not in code.html(replayed(code=long), NOW, "final"), "the colours would take too much space"
    failure = Failure("exception", "ValueError: bad", (CodeFrame("<cell>", 2, "<module>", True),))
    failed = replayed(RankFailed(3.0, 1, failure), RunFinished(4.0, "failed", "", 1), code=cell)
    assert "<mark>if x &lt; 1:  # &lt;b&gt;</mark>" in code.html(failed, NOW, "tab")


def test_a_string_of_several_lines_ends_where_it_ends():
    _, last = coloured("x = '''a\nb''' + y", inline=False)
    assert last == '<span class="sr-c1">b&#x27;&#x27;&#x27;</span> + y'


def test_the_last_lines_are_counted_after_folding(replayed):
    """Each rank has printed each line, so twice as many lines are looked at as are shown."""
    data = b"".join(b"line %d\n" % at for at in range(40))
    record = replayed(Output("stdout", data, 3.0, 0), Output("stdout", data, 3.1, 1), size=2)
    assert len(describe.last_lines(record).splitlines()) == 10
    assert describe.last_lines(record).startswith("[0, 1] line 30")
    assert check(log.html(record, NOW, "final")).text.count("0, 1") == 30


# ── The pictures ──────────────────────────────────────────────────────────────


def measured(replayed, size=2, count=30, **more):
    told = (
        Metrics({"loss": 1 / n + rank, "val_loss": 2 / n, "$auc$_<b>": n / 9}, step=n, time=2.0 + n, rank=rank)
        for n in range(1, count + 1)
        for rank in range(size)
    )
    return replayed(*told, RunFinished(900.0, "finished"), size=size, **more)


def pictures(record) -> list[str]:
    """Return the sources of the pictures in the final view of the metrics."""
    found = [attributes for tag, attributes in check(metrics.html(record, NOW, "final")).tags if tag == "img"]
    assert all(" by step: from " in attributes["alt"] for attributes in found)
    return [attributes["src"] for attributes in found]


def test_what_was_measured_stays_as_pictures_with_their_names_as_text(replayed):
    record = measured(replayed)
    page = check(metrics.html(record, NOW, "final"))
    for said in ("loss 0.5333", "val_loss 0.06667", "$auc$_<b> 3.333", "thin: each rank"):
        assert said in page.text
    assert len(pictures(record)) == 2
    assert pictures(measured(replayed)) == pictures(record), "the pictures of equal records differ"
    assert "<svg" not in metrics.html(record, NOW, "final")
    assert "<img" not in metrics.html(record, NOW, "tab") + metrics.html(record, NOW, "stacked")


def test_a_single_point_needs_no_picture(replayed):
    assert pictures(measured(replayed, count=1)) == []


@pytest.mark.parametrize(
    "size", [1, pytest.param(8, marks=pytest.mark.extended("repetition", "one rank, and more than have curves")), 70]
)
def test_pictures_are_small(replayed, size):
    told = [
        Metrics({f"{kind}{name}": random.Random(f"{n} {rank} {name}").random() for kind in ("", "val_")
                for name in "abcdefgh"}, step=n, time=2.0 + n, rank=rank)
        for n in range(1, 2_000 // size)
        for rank in range(size)
    ]  # fmt: skip
    found = pictures(replayed(*told, size=size))
    assert len(found) == MOST
    assert sum(map(len, found)) < figure.PICTURES_BYTES + 40 * len(found)


def test_words_stand_in_where_nothing_can_be_drawn(replayed, monkeypatch):
    monkeypatch.setattr(figure, "_png", not_drawn)
    page = check(metrics.html(measured(replayed), NOW, "final"))
    assert not [tag for tag, _ in page.tags if tag in ("img", "svg")]
    best = "from 1.5 to 0.5333, best 0.5333 at step 30; val_loss by step: from 2 to 0.06667, best 0.06667 at step 30"
    assert f"loss by step: {best}" in page.text
    monkeypatch.undo()
    monkeypatch.setattr(figure, "PICTURES_BYTES", 100)
    assert check(metrics.html(measured(replayed), NOW, "final")).text == page.text


def test_the_user_s_matplotlib_is_left_alone(replayed):
    import matplotlib
    from matplotlib import pyplot

    plain_ones = pictures(measured(replayed))
    mine = pyplot.figure()
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "black", "lines.linewidth": 9}):
        assert pictures(measured(replayed)) == plain_ones, "the user's settings of matplotlib changed the pictures"
        assert matplotlib.rcParams["axes.facecolor"] == "black"
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == (before, backend)
    assert pyplot.get_fignums() == [mine.number]
    pyplot.close(mine)


def test_matplotlib_is_imported_for_a_final_picture_only():
    script = """
import sys
from sparkring.history.events import Metrics, RankStarted, RunStarted
from sparkring.history.record import replay
from sparkring.views.html import panel
begun = [RunStarted(1.0, "id", "t", "c", 1, "local", "plain", "all"), RankStarted(1.0, 0, "h", 5)]
told = [Metrics({"loss": 1 / n}, step=n, time=2.0) for n in range(1, 5)]
panel(replay(begun + told), now=9.0, final=False), panel(replay(begun + told[:1]), now=9.0, final=True)
assert "matplotlib" not in sys.modules
assert "<img" in panel(replay(begun + told), now=9.0, final=True)
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# ── When it is shown ──────────────────────────────────────────────────────────


class Shown:
    """A stand-in for the notebook."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[str, bool]] = []

    def clock(self) -> float:
        return self.now

    def show(self, found, display_id, update):
        assert set(found) == {"text/html", "text/plain"}
        self.calls.append((display_id, update))


@pytest.fixture
def shown():
    return Shown()


def test_it_is_drawn_at_once_then_five_times_a_second_and_at_the_end(replayed, shown):
    view = HtmlView(clock=shown.clock, show=shown.show)
    for count in range(101):
        view.refresh(replayed(Output("stdout", b"x\n" * count, time=2.0, rank=0)))
        shown.now += 0.01
    assert 5 <= len(shown.calls) <= 6
    view.close(replayed(RunFinished(4.0, "finished")))
    assert len({display_id for display_id, _ in shown.calls}) == 1
    assert [update for _, update in shown.calls] == [False, *[True] * (len(shown.calls) - 1)]


def test_a_quick_silent_run_is_not_shown_at_all(replayed, shown):
    view = HtmlView(clock=shown.clock, show=shown.show)
    for _ in range(9):
        view.refresh(replayed(warm=True))
        shown.now += 0.01
    view.close(replayed(RunFinished(1_700_000_000.09, "finished"), warm=True))
    assert shown.calls == []


def test_a_quick_run_is_shown_once_when_it_has_ended(replayed, shown):
    view = HtmlView(clock=shown.clock, show=shown.show)
    hello = Output("stdout", b"hello\n", time=2.0, rank=0)
    view.refresh(replayed(warm=True))
    view.refresh(replayed(hello, warm=True))
    view.close(replayed(hello, RunFinished(1_700_000_000.01, "finished"), warm=True))
    assert [update for _, update in shown.calls] == [False]


@pytest.mark.parametrize(
    ("outcome", "told"), [("finished", "2 ranks finished in 0.3 s"), ("failed", "failed train 2 ranks on this machine")]
)
def test_a_warm_run_that_lasts_is_drawn_and_drawn_over(replayed, shown, outcome, told):
    view = HtmlView(clock=shown.clock, show=shown.show)
    view.refresh(replayed(warm=True))
    shown.now += 0.11
    view.refresh(replayed(warm=True))
    assert len(shown.calls) == 1
    record = replayed(RunFinished(1_700_000_000.3, outcome), warm=True)
    view.close(record)
    assert len(shown.calls) == 2
    assert Elements(bundle(record, now=NOW, final=True)["text/html"]).text.startswith(told)


def test_a_quick_run_that_failed_is_shown(replayed, shown):
    view = HtmlView(clock=shown.clock, show=shown.show)
    view.close(replayed(RunFinished(1_700_000_000.01, "failed"), warm=True))
    assert len(shown.calls) == 1


def test_what_looks_the_same_is_not_sent_again(replayed, shown):
    view = HtmlView(clock=shown.clock, show=shown.show)
    record = replayed(RunFinished(4.0, "finished"))
    for _ in range(10):
        view.refresh(record)
        shown.now += 1
    assert len(shown.calls) == 1


def test_a_slow_drawing_is_drawn_less_often(replayed, shown, monkeypatch):
    def slow(*_, **__):
        shown.now += 0.5
        return {"text/html": str(shown.now), "text/plain": ""}

    monkeypatch.setattr(html, "bundle", slow)
    view = HtmlView(clock=shown.clock, show=shown.show)
    view.refresh(replayed())
    begun = shown.now
    while len(shown.calls) == 1:
        shown.now += 0.1
        view.refresh(replayed())
    assert shown.now - begun > 4


def test_it_is_displayed_and_updated_in_place(replayed, monkeypatch):
    import IPython.display

    calls = []
    monkeypatch.setattr(IPython.display, "display", lambda *what, **how: calls.append((what, how)))
    view = HtmlView()
    view.refresh(replayed())
    view.close(replayed(RunFinished(4.0, "finished")))
    assert [how["update"] for _, how in calls] == [False, True]
    assert all(how["raw"] for _, how in calls)
    assert len({how["display_id"] for _, how in calls}) == 1
