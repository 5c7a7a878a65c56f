"""make test-all: one waits for the other.

Two attempts at one part: the second waits for one that lives, and ends one that was frozen.
"""

from __future__ import annotations

from datetime import date
from itertools import count
from threading import Thread

import psycopg
import pytest

from infra.database.connect import connect
from infra.settings import Settings
from projections.engine.rebuild import load as loader
from projections.engine.rebuild.builds import Build, begin
from projections.engine.rebuild.load import Loaded, Part, PartWriter, load, parts
from projections.engine.views.core_views import agent_views, all_views, code_set
from tests.engine.bookkeeper import folded_lives
from tests.engine.projections.bankviews import rows
from tools.testing.waiting import DEADLINE_S, until

pytestmark = pytest.mark.slow

ACCOUNTS = [str(number) for number in range(10)]


@pytest.fixture
def part(world: Settings, monkeypatch: pytest.MonkeyPatch) -> tuple[Part, Build]:
    """A journal's part, which others wait 100 ms for at a time."""
    monkeypatch.setattr("infra.database.connect.LOCK_TIMEOUT_MS", 100)
    folded_lives(world, ACCOUNTS, 4)
    views = {"statement": all_views()["statement"]}
    with connect(world, "test") as db:
        made, pin = begin(db, list(views.values()), world.events_topic, code_set(agent_views("core")), "core")
    return parts(world, world.events_topic, made, views, pin)[0], made[0]


def test_a_frozen_attempt_is_ended_by_the_next(part: tuple[Part, Build], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "FROZEN_S", 0)
    the_part, build = part
    with PartWriter(the_part, build) as frozen:
        loaded = load(the_part)
        with pytest.raises(psycopg.Error):
            frozen.finish([])
    written = rows(the_part.settings, build.table)
    assert len(written) == len(set(written)) == loaded.rows["statement"] > 0


def test_an_attempt_that_comes_on_is_waited_for(part: tuple[Part, Build], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the second one's looks finds more copied than before; one that found the same would end the first at once."""
    monkeypatch.setattr(loader, "FROZEN_S", 0)
    the_part, build = part
    results: list[Loaded] = []
    looks: list[int] = [-1]
    copied = PartWriter._copied_by_the_other

    def look(self: PartWriter) -> int:
        until(lambda: len(looks) > 3 or copied(self) > looks[-1], "the other has copied more")
        if len(looks) == 3:
            monkeypatch.setattr(loader, "FROZEN_S", 1_000)
        looks.append(copied(self))
        return looks[-1]

    monkeypatch.setattr(PartWriter, "_copied_by_the_other", look)
    second = Thread(target=lambda: results.append(load(the_part)))
    with PartWriter(the_part, build) as first:
        second.start()
        lines = count(1)

        def goes_on() -> bool:
            first.write((*LINE, next(lines), *REST, the_part.partition) for _ in range(1_000))
            return len(looks) > 3

        until(goes_on, "the other has looked")
        written = first.finish([])
    second.join(DEADLINE_S)
    assert results[0].rows["statement"] == written, "it found the part written"


LINE = ("somebody",)
REST = (date(2026, 1, 1), "kind", *["x" * 50] * 4, 1, 1, "")
