"""Tests the messages to a page that shows a run: each line is sent only once, and as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkring.history import events
from sparkring.history.record import RECENT_LINES, RunRecord, apply, replay
from sparkring.views.live import SECTIONS, SECTIONS_PAUSE_S, STATE_PAUSE_S, Feed, size_bytes, state_message, whole

BEGAN = 1_000.0
STARTED = events.RunStarted(BEGAN, "run-1", "title", "%%horovod -n -2\nprint(1)", 2, "local", "horovod", "all")
UP = [events.RankStarted(BEGAN + 1, rank, "here", 100 + rank) for rank in range(2)]


def printed(rank: int, text: str, time: float = BEGAN + 2, stream: events.Stream = "stdout") -> events.Output:
    return events.Output(stream, text.encode(), time=time, rank=rank)


def of_kind(news, kind):
    return [message for message in news if message["kind"] == kind]


def texts(news):
    return [text for message in of_kind(news, "lines") for text in message["text"]]


@pytest.fixture
def running() -> RunRecord:
    return replay([STARTED, *UP])


def test_each_line_is_told_once(running):
    feed = Feed()
    record = apply(running, printed(0, "one\ntwo\n"))
    assert texts(feed.news(record, BEGAN + 2)) == ["one", "two"]
    record = apply(record, printed(1, "three\n"))
    assert texts(feed.news(record, BEGAN + 2)) == ["three"]
    assert of_kind(feed.news(record, BEGAN + 2), "lines") == []


def test_lines_are_numbered_so_that_a_page_sees_what_it_missed(running):
    feed = Feed()
    feed.news(apply(running, printed(0, "one\n")), BEGAN + 2)
    flood = "".join(f"{number}\n" for number in range(3 * RECENT_LINES))
    (told,) = of_kind(feed.news(apply(running, printed(0, flood)), BEGAN + 2), "lines")
    assert told["start"] + told["count"] == 3 * RECENT_LINES
    assert told["count"] == len(told["text"]) == RECENT_LINES
    assert told["text"][-1] == str(3 * RECENT_LINES - 1)


@given(st.lists(st.tuples(st.integers(0, 1), st.text(max_size=40)), max_size=30), st.data())
def test_however_often_it_is_asked_a_page_has_all_lines_in_order(said, data):
    record, feed, told = replay([STARTED, *UP]), Feed(), []
    for rank, text in said:
        line = text.replace("\n", " ").replace("\r", " ").encode("utf-8", "replace").decode()
        record = apply(record, printed(rank, f"{line}\n"))
        if data.draw(st.booleans()):
            told += feed.news(record, BEGAN + 3)
    told += feed.news(record, BEGAN + 3)
    assert texts(told) == texts(whole(record, BEGAN + 3))
    ends = [message["start"] + message["count"] for message in of_kind(told, "lines")]
    assert ends == sorted(ends)


def test_a_line_is_text_and_its_colours_are_html_of_ours(running):
    record = apply(running, printed(0, "\x1b[31m<b onclick=alert(1)>\x1b[0m\u202e\n<script>plain</script>\n"))
    (told,) = of_kind(whole(record, BEGAN + 2), "lines")
    assert told["text"] == ["<b onclick=alert(1)>\\u202e", "<script>plain</script>"]
    assert list(told["html"]) == [0]
    assert "&lt;b onclick=alert(1)&gt;" in told["html"][0]


def test_a_line_whose_end_is_still_to_come_is_pending(running):
    feed = Feed()
    record = apply(running, printed(0, " 10%|#\r 20%|##"))
    (told,) = of_kind(feed.news(record, BEGAN + 2), "lines")
    assert (told["text"], told["pending"]["text"]) == ([], [" 20%|##"])
    record = apply(record, printed(0, "\n"))
    (told,) = of_kind(feed.news(record, BEGAN + 2), "lines")
    assert (told["text"], told["pending"]["text"]) == ([" 20%|##"], [])


def test_tensorflows_greeting_is_marked(running):
    line = "2026-11-20 10:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.\n"
    record = apply(apply(running, printed(0, line, stream="stderr")), printed(0, "mine\n"))
    (told,) = of_kind(whole(record, BEGAN + 2), "lines")
    assert (told["noise"], told["stream"]) == ([0], "eo")


def test_what_logs_leaves_out_is_not_told():
    record = replay(
        [
            STARTED._replace(logs="callbacks"),
            *UP,
            printed(0, "no\n"),
            events.UserMessage("yes\nand", time=BEGAN + 2, rank=1),
        ]
    )
    (told,) = of_kind(whole(record, BEGAN + 2), "lines")
    assert (told["text"], told["rank"], told["count"]) == (["yes", "and"], [1, 1], 1)


def test_a_page_knows_which_lines_it_is_told(running):
    """Without messages of several lines, and if all lines are shown, the page can count, and the message is smaller."""
    said = [
        printed(1, "one\n"),
        printed(0, "two\n"),
        events.UserMessage("a\nb", time=BEGAN + 2, rank=0),
        printed(0, "c\n"),
    ]
    (told,) = of_kind(whole(replay(said[:2], running), BEGAN + 2), "lines")
    assert "line" not in told
    (told,) = of_kind(whole(replay(said, running), BEGAN + 2), "lines")
    assert (told["text"], told["line"]) == (["one", "two", "a", "b", "c"], [0, 1, 2, 2, 3])
    (rank0,) = of_kind(whole(replay([STARTED._replace(logs="rank0"), *UP, *said]), BEGAN + 2), "lines")
    assert (rank0["text"], rank0["line"], rank0["count"]) == (["two", "a", "b", "c"], [0, 1, 1, 2], 3)
    assert size_bytes(told) > size_bytes({**told, "line": []})


def test_the_state_is_told_when_it_changes_and_not_too_often(running):
    feed = Feed()
    assert len(of_kind(feed.news(running, BEGAN + 2), "state")) == 1
    assert of_kind(feed.news(running, BEGAN + 2 + 2 * STATE_PAUSE_S), "state") == []
    record = apply(running, events.Metrics({"loss": 0.5}, step=7, epoch=1, time=BEGAN + 3, rank=1))
    soon = BEGAN + 2 + 2.5 * STATE_PAUSE_S
    assert of_kind(feed.news(record, soon), "state") == []  # the last state was sent a moment ago
    (told,) = of_kind(feed.news(record, soon + STATE_PAUSE_S), "state")
    assert told["ranks"]["step"] == [None, 7]
    assert told["last"] == []  # new values are sent only together with the table and the curves
    news = feed.news(record, soon + 2 * SECTIONS_PAUSE_S)
    assert of_kind(news, "state")[0]["last"] == ["loss 0.5"]
    assert "metrics" in of_kind(news, "sections")[0]["html"]


def test_how_it_ended_is_told_at_once(running):
    feed = Feed()
    feed.news(running, BEGAN + 2)
    failure = events.Failure("signal", "killed by SIGKILL")
    record = replay(
        [
            events.RankFailed(BEGAN + 2, 1, failure),
            events.RankFailed(BEGAN + 2, 0, events.Failure("echo", "HorovodInternalError")),
            events.RunFinished(BEGAN + 2, "failed", "", 1),
        ],
        running,
    )
    news = feed.news(record, BEGAN + 2)
    assert "rank 1 on here failed: killed by SIGKILL" in of_kind(news, "sections")[0]["html"]["failure"]
    (told,) = of_kind(news, "state")
    assert (told["state"], told["failed_rank"]) == ("failed", 1)
    assert told["error"].startswith("rank 1 on here failed: killed by SIGKILL")
    assert told["ranks"]["state"] == "yx"
    assert told["ranks"]["failure"][1] == "killed by SIGKILL"


def test_a_section_is_told_when_it_has_changed(running):
    feed = Feed()
    (told,) = of_kind(feed.news(running, BEGAN + 2), "sections")
    assert list(told["html"]) == ["code"]
    record = apply(running, events.Metrics({"loss": 0.5}, step=1, time=BEGAN + 3, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 60), "sections")
    assert list(told["html"]) == ["metrics", "code"]  # the section `code` now says how to open TensorBoard
    record = apply(record, events.Metrics({"loss": 0.4}, step=2, time=BEGAN + 4, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 90), "sections")
    assert list(told["html"]) == ["metrics"]
    assert set(told["html"]) <= set(SECTIONS)


def test_what_ranks_use(running):
    """Only the samples of ranks that have reported again are sent again; a new attempt has none."""
    feed = Feed()
    assert of_kind(feed.news(running, BEGAN + 2), "usage") == []
    used = [events.RankUsed(97, 10**9, 8, 64 * 10**9, time=BEGAN + 5, rank=rank) for rank in range(2)]
    gpu = events.GpuUsed("0", "A", 3, 9, 50, time=BEGAN + 4, rank=1)
    record = replay([gpu, *used], running)
    (told,) = of_kind(feed.news(record, BEGAN + 60), "usage")
    rows = [[97, 10**9, 8, 64 * 10**9, 0, None, None, 0], [97, 10**9, 8, 64 * 10**9, 1, 50.0, 3, 9]]
    assert (told["used"], told["waiting"], told["starves"]) == (rows, [], [])
    assert told["samples"] == {0: [[5.0, 97, 10**9, None, None]], 1: [[5.0, 97, 10**9, 50.0, 3]]}
    assert of_kind(feed.news(record, BEGAN + 90), "usage") == []
    record = apply(record, used[0]._replace(cpu_percent=98, time=BEGAN + 10))
    (told,) = of_kind(feed.news(record, BEGAN + 120), "usage")
    assert {rank: len(samples) for rank, samples in told["samples"].items()} == {0: 2}
    (told,) = of_kind(whole(apply(record, events.RankFinished(BEGAN + 121, 0, "")), BEGAN + 122), "usage")
    assert [bool(used) for used in told["used"]] == [False, True]  # a rank that has ended uses nothing
    record = apply(record, events.AttemptStarted(BEGAN + 130, 2, 2))
    (told,) = of_kind(feed.news(record, BEGAN + 150), "usage")
    assert (told["used"], told["samples"]) == ([], {0: [], 1: []})


def test_a_hint_until_it_is_known_how_much_is_left(running):
    def left(**totals) -> str:
        reports = [
            events.Metrics({"loss": 0.5}, step=step, **totals, time=BEGAN + step, rank=rank)
            for step in (2, 3, 4, 5)
            for rank in range(2)
        ]
        return state_message(replay(reports, running), BEGAN + 6)["left"]

    assert state_message(running, BEGAN + 6)["left"] == ""
    assert "steps=" in left()
    assert "steps=" not in left(steps=10)
    assert "steps=" not in left(iterations=(1, 10))


def test_who_waits_for_data(running):
    for rank in range(2):
        opened = events.DataOpened(0, "digits", "parquet", time=BEGAN + 2, rank=rank)
        waited = 6.2 if rank else 0.1
        read = events.DataRead(0, 1, 9, 1, 9, waited_s=waited, elapsed_s=10.0, time=BEGAN + 9, rank=rank)
        running = replay([opened, read], running)
    (told,) = of_kind(whole(running, BEGAN + 10), "usage")
    assert (told["waiting"], told["starves"], told["used"]) == ([1, 62], [1], [])


def test_gpus_of_model_processes(running):
    """The ranks of a pool have no tiles, so the progress sums up the GPUs, and a table under the metrics lists them."""
    gpu = events.GpuUsed("1", "NVIDIA H200", 10**9, 150 * 10**9, 80)
    record = replay([events.ItemsPlanned(BEGAN + 1, 2), events.ModelGpuUsed(BEGAN + 2, "node-1", 4711, gpu)], running)
    news = whole(record, BEGAN + 2)
    assert of_kind(news, "state")[0]["progress"].endswith(" · 1 GPU 80 %, 1.00 GB of 150 GB")
    for words in ("node-1", "4711", "NVIDIA H200", "80 %"):
        assert words in of_kind(news, "sections")[0]["html"]["metrics"]


def test_messages_are_json(running):
    record = apply(
        running, events.Metrics({"loss": float("nan")}, step=1, steps=10, epoch=1, epochs=2, time=BEGAN + 3, rank=0)
    )
    for message in whole(apply(record, printed(0, "x\n")), BEGAN + 4):
        json.dumps(message, allow_nan=False)


def test_a_thousand_ranks_are_a_message_of_some_kilobytes():
    ranks = 1_024
    record = replay(
        [
            STARTED._replace(size=ranks),
            *(events.RankStarted(BEGAN + 1, rank, f"host-{rank % 16}", rank) for rank in range(ranks)),
        ]
    )
    assert len(json.dumps(state_message(record, BEGAN + 2))) < 64_000


def test_what_ranks_ask(running):
    """The time tells requests apart, because each new process of a rank counts its requests from 1."""
    asked = events.InputRequested(1, "name?", time=BEGAN + 3, rank=1)
    (told,) = state_message(apply(running, asked), BEGAN + 4)["asks"]
    assert told == {"rank": 1, "number": 1, "time": BEGAN + 3, "prompt": "name?", "hidden": False}


def test_texts_are_plain(running):
    record = apply(running, events.Metrics({"a\u202eb": 1.0}, step=1, time=BEGAN + 3, rank=0))
    assert state_message(record, BEGAN + 4)["last"] == ["a\\u202eb 1"]


def test_a_display_is_sent_once(running):
    """A page keeps the HTML of displays. The order is sent again when a display is added or replaced."""
    feed = Feed()
    record = apply(running, events.Displayed(1, "text/html", b"<b>one</b>", "one", time=BEGAN + 2, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 2), "displays")
    [(key, ranks, seconds)] = told["order"]
    assert (ranks, seconds, told["html"]) == ([0], 2.0, {key: "<b>one</b>"})
    record = apply(record, events.Displayed(1, "text/html", b"<b>one</b>", "one", time=BEGAN + 3, rank=1))
    (told,) = of_kind(feed.news(record, BEGAN + 60), "displays")
    assert (told["order"], told["html"]) == ([(key, [0, 1], 2.0)], {}), "equal displays of several ranks are one"
    record = apply(record, events.Displayed(1, "text/html", b"<script>2</script>two", "", time=BEGAN + 4, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 90), "displays")
    assert [ranks for _, ranks, _ in told["order"]] == [[1], [0]]
    assert "two" in told["html"].values(), "what a rank shows is made harmless"
    assert of_kind(feed.news(record, BEGAN + 120), "displays") == []


def test_a_display_that_is_shown_again_is_sent_again(running):
    """A page keeps only the displays in the order. A display is not in it while it equals that of a lower rank."""
    feed = Feed()
    one = events.Displayed(1, "text/html", b"<b>one</b>", "one", time=BEGAN + 2, rank=1)
    record = apply(running, one)
    (first,) = of_kind(feed.news(record, BEGAN + 2), "displays")
    record = apply(record, one._replace(time=BEGAN + 3, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 60), "displays")
    assert told["order"] != first["order"]
    record = apply(record, one._replace(data=b"two", time=BEGAN + 4, rank=0))
    (told,) = of_kind(feed.news(record, BEGAN + 90), "displays")
    assert first["html"].items() < told["html"].items()


def test_the_page_knows_with_which_magic_a_cell_begins(running):
    assert state_message(running, BEGAN)["magic"] == "%%horovod"
    assert state_message(replay([STARTED._replace(code="def train(): ...")]), BEGAN)["magic"] == ""
    assert state_message(replay([STARTED._replace(code="")]), BEGAN)["magic"] == ""
