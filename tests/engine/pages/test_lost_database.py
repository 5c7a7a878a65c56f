"""make test: all parts in one process. What `docs/operating.md` says of a lost database is typed, line by line."""

from __future__ import annotations

import re
from contextlib import ExitStack

from infra.settings import Settings
from policies.engine.activations import start_all
from policies.engine.policy import discover
from tests.engine.api.api import agent, served
from tests.engine.pages.pages import blocks, matches, typed
from tests.engine.policies.test_new_database import lose
from tests.engine.policies.test_policies import balance, running
from tests.engine.spine import command, deposit, handler, open_account, send, set_up
from tools.dev.stack import Stack
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import until

PAGE = (ROOT / "docs" / "operating.md").read_text()


def test_the_page_from_the_first_line_to_the_last(world: Settings, stack: Stack, samefold: Samefold) -> None:
    set_up(world)
    start_all(world)
    transfer = command("transfers/t", "t", "RequestTransfer", source="1", target="2", cents=7, on="2026-01-02")
    with handler(world), agent(world):
        send(world, open_account("1"), open_account("2"), deposit("1", "d1", 7), transfer)
        until(lambda: balance(world, "1") == 7, "a transfer is requested, and no policy runs")
    lose(stack, world)
    [section] = re.findall(r"^## A lost database\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks(section) if language == "console" for line in typed(block)]
    with ExitStack() as processes:
        for line, expected in lines:
            words = line.removeprefix("$ samefold ").split()
            if words == ["policies"]:  # "start the processes as ever"
                for one in (handler(world), agent(world), running(world, *discover().values())):
                    processes.enter_context(one)
                processes.enter_context(served(world))
            if words == ["verify"]:
                until(lambda: (balance(world, "1"), balance(world, "2")) == (0, 7), "the transfer ends")
            done = samefold(*words, settings=world)
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            assert matches(done.stdout, expected), (line, done.stdout)
    assert len(lines) == 4
