"""Signals set a flag; a second Ctrl-C leaves at once; what was there before comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mafrt.core.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_flag_and_handlers_come_back(number):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest() as stop:
        assert not stop.requested and stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.reason == signal.Signals(number).name
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert stop.requested


def test_the_second_signal_leaves_at_once_but_an_echo_does_not(monkeypatch):
    monkeypatch.setattr("mafrt.core.signals._ECHO_S", 0.05)
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGTERM"
        time.sleep(0.06)
        # A scheduler may send several before it kills; the checkpoint is on its way.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_asks_for_a_stop_but_not_under_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_has_stopped_as_asked_takes_no_further_signal(number, monkeypatch):
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in handled}
    monkeypatch.setattr(StopRequest, "ends", True)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest():
            os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]  # what is closed now may hang
        assert {signal.getsignal(one) for one in handled if one != signal.SIGINT} == {signal.SIG_IGN}
        for one in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), one)
    finally:
        for one in handled:
            signal.signal(one, before[one])


def test_the_loop_can_ask_too():
    with StopRequest() as stop:
        stop.request("budget spent")
        assert stop.requested and stop.reason == "budget spent"


def test_outside_the_main_thread_nothing_is_installed():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopRequest() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, False]


def test_an_error_puts_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


LOOP = """
    import time
    from mafrt.core.signals import StopRequest
    with StopRequest() as stop:
        print("ready", flush=True)
        while not stop.requested:
            time.sleep(0.01)
        print("safe point", stop.reason, flush=True)
        time.sleep(600)
"""


def test_in_a_real_process():
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "safe point SIGTERM\n"
    time.sleep(0.3)  # longer than an echo takes
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors and child.returncode == -signal.SIGINT


LEAVES = """
    import atexit, signal, sys, time
    from mafrt.core.signals import StopRequest
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
    atexit.register(lambda: (print("leaving", flush=True), sys.stdin.readline()))
    with StopRequest() as stop:
        print("ready", flush=True)
        if sys.argv[1:]:
            stop.request(sys.argv[1])
        while not stop.requested:
            time.sleep(0.01)
"""


def test_a_signal_that_another_process_has_told_of_makes_no_failure_when_all_is_saved():
    command = [sys.executable, "-c", textwrap.dedent(LEAVES), "SIGTERM"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    assert [child.stdout.readline() for _ in range(2)] == ["ready\n", "leaving\n"]
    child.send_signal(signal.SIGTERM)
    child.communicate("\n", timeout=120)
    assert child.returncode == 0


@pytest.mark.parametrize("further", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_further_signal_while_the_interpreter_ends_makes_no_failure(first, further):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LEAVES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None and child.stdout.readline() == "ready\n"
    child.send_signal(first)
    assert child.stdout.readline() == "leaving\n"
    child.send_signal(further)
    child.communicate("\n", timeout=120)
    assert child.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_says_that_a_signal_has_ended_it_and_closes_what_is_open(number):
    """As while a base is loaded, before a run's own handler stands; with more signals while it closes, and after."""
    program = f"""
    import os, signal, sys, time
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)  # it may be ignored, as under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from mafrt.scripts.cli.run_main import run_main

    def body(argv):
        try:
            os.kill(os.getpid(), {number:d})
            time.sleep(60)
        finally:
            if {number:d} != signal.SIGINT:
                os.kill(os.getpid(), {number:d})
            print("closed")
        return 0

    code = run_main(body, None)
    os.kill(os.getpid(), signal.SIGTERM) if {number:d} != signal.SIGINT else None
    sys.exit(code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert (done.returncode, done.stdout) == (128 + number, "closed\n"), done.stderr
    assert done.stderr == f"Stopped by {by} before anything was saved.\n"


def test_a_program_that_calls_a_command_keeps_its_handlers():
    from mafrt.scripts.cli.run_main import run_main

    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    found = []

    def body(argv):
        found.extend(signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        return 0

    assert run_main(body, []) == 0 and found == before


def test_ctrl_c_that_another_process_had_first_is_no_second_one(monkeypatch):
    """Under Ray the signal reaches the processes of a run up to a second apart."""
    with StopRequest() as stop:
        stop.request("SIGINT")
        monkeypatch.setattr("mafrt.core.signals._ECHO_S", -1.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)
