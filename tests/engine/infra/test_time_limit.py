"""make test: a call is ended in a process of its own. Whatever an author wrote, and whoever asks it, ends after the limit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from infra.processes.time_limit import calls_limited
from tools.testing.waiting import DEADLINE_S

CODE = """
from infra.processes.time_limit import limit_calls, limited
def loop():
    while True: pass
def backtrack(): __import__("re").match("(a+)+$", "a" * 60 + "b")
def catch():
    while True:
        try: loop()
        except BaseException: pass
def wait():
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    while True: libc.pthread_mutex_lock(mutex)
def sleep_on():
    while True:
        try: __import__("time").sleep(9)
        except BaseException: pass
limit_calls(0.2)
for function in (FUNCTION, int, FUNCTION):
    try: print(limited(function))
    except RuntimeError as error: print(error)
"""


@pytest.mark.parametrize("function", ["loop", "backtrack"])
def test_a_call_without_an_end_is_ended_and_the_next_is_made(function: str) -> None:
    program = [sys.executable, "-c", CODE.replace("FUNCTION", function)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert [line.startswith("TooSlow: too-slow: ") for line in said] == [True, False, True]
    assert said[1] == "0"
    assert done.stderr.startswith(f"__main__.{function} takes longer than 0.02 s: ")


@pytest.mark.parametrize("function", ["lambda: sum(range(10**13))", "catch", "wait", "sleep_on"])
def test_a_call_in_c_that_can_not_be_ended_ends_its_process(function: str) -> None:
    stuck = CODE.replace("FUNCTION", function)
    program = [sys.executable, "-c", stuck]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode < 0
    assert "most recent call first" in done.stderr


def test_a_limit_ends_with_its_context_and_another_alarm_stays() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with calls_limited(5):
        assert signal.getsignal(signal.SIGALRM) != before
        assert signal.getitimer(signal.ITIMER_PROF) != (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
