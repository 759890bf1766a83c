"""Progress within iterations: stages report, and the terminal shows them, with the time that is left."""

from __future__ import annotations

import io
import os

import pytest
from toy import Digits, settings

from mafrt.config.team import Team
from mafrt.core.progress import reporting, stage
from mafrt.runners import progress as shown
from mafrt.runners.loop import Progress
from mafrt.runners.on_policy import OnPolicy
from mafrt.runners.progress import Terminal


def test_stages_report_to_whoever_listens_and_else_to_nobody():
    seen = []
    with stage("playing", 3) as advance:
        advance(1)
    with reporting(lambda *what: seen.append(what)), stage("playing", 3) as advance:
        advance(1)
        advance(5)
    with stage("playing", 3) as advance:
        advance(1)
    assert seen == [("playing", 0, 3), ("playing", 1, 3), ("playing", 3, 3)]


@pytest.mark.slow
def test_a_run_reports_playing_learning_and_evaluating():
    from helpers_models import tiny_base

    seen = []
    runner = OnPolicy(Digits(), Team.of(Digits.agents), tiny_base(), settings(iterations=1, eval_episodes=2))
    with reporting(lambda *what: seen.append(what)):
        runner.run()
    stages = [name for name, done, _ in seen if done == 0]
    assert stages[:3] == ["evaluating (sampled)", "evaluating (greedy)", "playing"] and "learning" in stages
    for name in set(stages):
        assert any(done == total for what, done, total in seen if what == name), name


def test_without_a_terminal_lines_come_now_and_then(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    terminal = Terminal(30, stream=stream)
    for done in range(0, 101):
        clock[0] += 0.5
        terminal.stage("playing", done, 100)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "iteration 1/30: playing 19/100, 40 s left" and len(lines) == 5
    terminal.iteration(Progress(1, 30, 60.0, {"score": 0.25}, {"tokens_per_s": 100.0}))
    assert stream.getvalue().splitlines()[-1] == "iteration 1/30  reward 0.250  100 tokens/s  29 min 00 s left"


def test_the_first_of_many_episodes_tells_no_time_and_the_last_iteration_does(monkeypatch):
    """Episodes run side by side: one of 128 is done after 30 s, all of them 4 s later."""
    clock = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    terminal = Terminal(2, stream=stream)
    for _ in range(2):
        terminal.stage("playing", 0, 128)
        clock[0] += 30.0
        terminal.stage("playing", 1, 128)
        clock[0] += 4.0
        terminal.stage("playing", 128, 128)
    assert stream.getvalue().splitlines() == [
        "iteration 1/2: playing 1/128",
        "iteration 1/2: playing 1/128, 4 s left",
    ]


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_bar_is_drawn_and_closed():
    terminal = Terminal(2, stream=Screen())
    terminal.stage("playing", 0, 4)
    terminal.iteration(Progress(1, 2, 1.0, {"score": 0.5}, {"tokens_per_s": 10.0}))
    terminal.iteration(Progress(2, 2, 1.0, {"score": 0.5}, {"tokens_per_s": 10.0}))
    assert terminal._bar is None


def test_the_evaluation_after_the_last_iteration_belongs_to_none(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    terminal = Terminal(1, stream=stream)
    terminal.iteration(Progress(1, 1, 60.0, {"score": 0.25}, {"tokens_per_s": 100.0}))
    terminal.stage("evaluating", 0, 8)
    clock[0] += 60
    terminal.stage("evaluating", 4, 8)
    assert stream.getvalue().splitlines()[-1] == "at the end: evaluating 4/8, 1 min 00 s left"


def test_a_line_of_a_log_says_how_the_run_is_doing_and_how_long_it_will_take(monkeypatch):
    """`playing 1/256, 0 s left` says neither."""
    clock = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    terminal = Terminal(3, stream=stream)
    terminal.iteration(Progress(1, 3, 60.0, {"score": 0.25}, {"tokens_per_s": 100.0}))
    terminal.stage("playing", 0, 256)
    clock[0] += 30
    terminal.stage("playing", 1, 256)
    said = stream.getvalue().splitlines()[-1]
    assert said.startswith("iteration 2/3: playing 1/256")
    assert "last reward 0.250" in said and "2 min 00 s left in all" in said


def test_a_terminal_of_unknown_size_shows_the_bar(monkeypatch, capsys):
    monkeypatch.setattr(shown.os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    terminal = Terminal(4)
    terminal._terminal = True
    terminal.iteration(Progress(1, 4, 1.0, {"score": 0.5}, {"tokens_per_s": 10.0}))
    terminal._bar.refresh()
    terminal.close()
    assert "1/4" in capsys.readouterr().err
