import json
from pathlib import Path

import pytest

from sparkring.history.describe import rank_numbers
from sparkring.history.events import Output, UserMessage
from sparkring.history.lines import coloured, folded, is_noise, pending, plain, visible
from sparkring.history.record import LogLine


def line(text, rank=0, stream="stdout", time=0.0):
    return LogLine(time, rank, stream, text)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2K\x1b[1Aup\x1b[?25l", "up"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]0;never ended", "␛]0;never ended"),
        ("a\x00b\x07c\x7f", "a␀b␇c␡"),
        ("\x9b31mred", "red"),
        ("admin\u202etxt.exe", "admin\\u202etxt.exe"),
        ("\u2066\u2069\ufeff\u200b", "\\u2066\\u2069\\ufeff\\u200b"),
        ("\ud800", "\\ud800"),
        ("tab\tstays", "tab\tstays"),
        ("\b\b\b\b 12/40", " 12/40"),
        ("наука 👩‍👩‍👧 é", "наука 👩‍👩‍👧 é"),
    ],
)
def test_control_characters_become_visible_and_sequences_go(raw, shown):
    assert plain(raw) == shown
    assert "".join(text for _, text in coloured(raw)) == shown


def test_colours_stay_with_the_text_behind_them():
    assert coloured("a\x1b[31mb\x1b[0mc") == [("", "a"), ("31", "b"), ("0", "c")]
    assert coloured("\x1b[mx") == [("0", "x")]
    assert coloured("\x1b[>4;2mx") == [("", "x")], "a private sequence that ends in m is no colour"


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01 12:00:00.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.",
        "2026-01-01 12:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:9261] Unable to register"
        " cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered",
        "2026-01-01 12:00:00.1: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E0000 00:00:1763640000.123456   12345 cuda_blas.cc:1418] Unable to register cuBLAS factory: Attempting to",
        "W0000 00:00:1763640000.123456   12345 computation_placer.cc:177] computation placer already registered.",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate"
        " compiler flags.",
    ],
)
def test_start_up_noise_is_recognised(text):
    assert is_noise(line(text, stream="stderr"))
    assert not is_noise(line(text)), "on stdout, the user has printed it on purpose"


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01 12:00:00.123456: W tensorflow/core/framework/op_kernel.cc:1839] OP_REQUIRES failed at matmul",
        "2026-01-01 12:00:00.123456: E tensorflow/core/kernels/cast.cc:1] Out of memory",
        "2026-01-01 12:00:00 INFO my own logger: TF-TRT",
        "WARNING: the learning rate is large",
        "ValueError: oneDNN",
    ],
)
def test_what_matters_is_no_noise(text):
    assert not is_noise(line(text, stream="stderr"))


def test_logs_choose_the_lines(replayed):
    record = replayed(
        Output("stdout", b"zero\n", time=2.0, rank=0),
        Output("stderr", b"one\n", time=2.0, rank=1),
        UserMessage("on purpose", time=2.0, rank=1),
    )
    texts = {logs: [found.text for found in visible(record.recent, logs)] for logs in ("all", "rank0", "callbacks")}
    assert texts == {
        "all": ["zero", "one", "on purpose"],
        "rank0": ["zero", "on purpose"],
        "callbacks": ["on purpose"],
    }


FOLDING = json.loads((Path(__file__).parent / "folding.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", FOLDING, ids=lambda case: case["what"])
def test_lines_and_tracebacks_fold_and_each_rank_keeps_its_order(case):
    """tests/views/panel/twins.test.mjs tests the page with the same cases."""
    found = folded([line(text, rank, stream) for rank, stream, text in case["lines"]])
    assert [[rank_numbers(shared.ranks), shared.line.text] for shared in found] == case["folded"]


def test_lines_do_not_fold_across_streams_or_a_long_time_or_within_a_rank():
    assert len(folded([line("x"), line("x", 1, "stderr")])) == 2
    assert len(folded([line("x"), line("x", 1, time=60.0)])) == 2
    assert len(folded([line("x"), line("x")])) == 2


def test_a_line_without_its_end_is_pending(replayed):
    record = replayed(Output("stderr", b"done\n 10%\r 55%", time=2.0, rank=1))
    assert [(found.rank, found.text) for found in pending(record)] == [(1, " 55%")]


def test_a_message_of_several_lines_is_shown_as_such(replayed):
    record = replayed(UserMessage("a\n\nb\r\n", time=2.0, rank=1))
    assert [found.text for found in visible(record.recent, "callbacks")] == ["a", "", "b"]
