"""What a pass shows on a terminal and in a log."""

import io
import sys
import time

import pytest

from likewise.progress import advising, announce, show_progress, track, write_line

SPANS = [range(i, i + 10) for i in range(0, 100, 10)]


def run(seconds_a_batch):
    times = iter(range(10_000))
    return list(track(SPANS, "sketches", clock=lambda: next(times) * seconds_a_batch))


def test_a_log_gets_a_line_every_ten_seconds_with_what_is_left(capsys):
    assert run(4) == SPANS
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "likewise: sketches: 30 of 100 samples, about 28 s left"
    assert len(lines) == 3


def test_what_would_take_less_time_is_named_where_more_than_a_minute_is_left(capsys):
    with advising("sketch=1024"):
        run(11)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "likewise: sketches: 10 of 100 samples, about 99 s left (sketch=1024)"
    assert lines[-1].endswith("about 11 s left") and not any("sketch=" in line for line in lines[4:])
    run(11)
    assert "sketch=" not in capsys.readouterr().err


def test_a_short_pass_is_silent(capsys):
    run(0.5)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("likewise.progress.DELAY", 0)
    assert run(1) == SPANS
    assert "sketches" in terminal.getvalue() and "\r" in terminal.getvalue()


def test_a_bar_names_what_would_take_less_time(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("likewise.progress.DELAY", 0)
    monkeypatch.setattr("likewise.progress.LONG", 0)
    with advising("sketch=1024"):
        for _ in track(SPANS[:5], "pairs"):
            time.sleep(0.12)  # longer than a bar waits before it is drawn again
    assert "sketch=1024" in terminal.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_a_command_says_its_steps_unless_quiet(shown, capsys):
    lines = []
    tokens = show_progress.set(shown), write_line.set(lines.append)
    announce("tracing the network")
    run(4)
    show_progress.reset(tokens[0])
    write_line.reset(tokens[1])
    announce("nobody listens")
    assert (lines[:1] == ["tracing the network"] and len(lines) == 4) if shown else lines == []
    assert capsys.readouterr().err == ""
