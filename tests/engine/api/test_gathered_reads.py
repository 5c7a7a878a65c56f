"""make test: reads of single rows at the same time share a query, and each finds what its own would have found."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from api.view_reader import Gathering, Values, ViewReader
from domain.engine.personal.tokens import PREFIX
from infra.access import BadAccess, Rows
from infra.database.connect import DatabaseUnavailable, ValueRefused
from infra.settings import Settings
from projections.engine.views.core_views import all_views
from projections.engine.views.queries import Found, Row
from projections.engine.views.token import Token

VIEW = all_views()["balances"]
SEALED = f'"{PREFIX}x"'


class Database:
    """Answers a query when it is told to: each key's row is what was committed when the query was sent."""

    def __init__(self) -> None:
        self.committed = 0
        self.asked: list[list[str]] = []
        self.only: list[list[Rows]] = []
        self.error: Exception | None = None
        self.wrong = ""
        self.go = asyncio.Event()
        self.gathering = Gathering(VIEW, self.query)

    async def query(self, keys: Sequence[Values], only: Sequence[Rows]) -> Found:
        asked = [key for [key] in keys]
        self.asked.append(asked)
        self.only.append(list(only))
        committed = self.committed
        await self.go.wait()
        if self.wrong in asked:
            raise ValueRefused("A value is refused.")
        if self.error:
            raise self.error
        rows = [
            Row(number, msgspec.Raw(SEALED.encode() if key == "sealed" else b'["%s",%d]' % (key.encode(), committed)))
            for number, key in enumerate(asked, start=1)
            if key != "none"
        ]
        since = {f"accounts/{key}": 7 for key in asked if key == "parked"}
        at = Token({"t": {0: committed}})
        return Found(1, "t", at, 2, since, rows, "sealed" in asked, None, None)

    async def begin(self, *keys: str) -> list[asyncio.Task[Found]]:
        """Reads that have all begun together; their query is sent unless one is under way."""
        reads = [asyncio.create_task(self.gathering.read((key,))) for key in keys]
        for _ in range(4):
            await asyncio.sleep(0)
        return reads


def run(test: Callable[[Database], Awaitable[None]]) -> None:
    async def body() -> None:
        await test(Database())

    asyncio.run(body())


def rows(found: Found) -> list[bytes]:
    assert [row.number for row in found.rows] == [1][: len(found.rows)]
    return [bytes(row.json) for row in found.rows]


def test_reads_at_the_same_time_share_a_query_and_each_finds_its_own() -> None:
    async def test(database: Database) -> None:
        database.go.set()
        reads = await database.begin("a", "none", "parked", "sealed", "a")
        a, none, parked, sealed, again = await asyncio.gather(*reads)
        assert database.asked == [["a", "none", "parked", "sealed", "a"]]
        assert [rows(found) for found in (a, none, again)] == [[b'["a",0]'], [], [b'["a",0]']]
        assert [dict(found.parked_since) for found in (a, parked)] == [{}, {"accounts/parked": 7}]
        assert [found.has_personal for found in (a, none, sealed)] == [False, False, True]
        assert {(str(found.position), found.parked) for found in (a, none, parked)} == {("1~t.0-0", 2)}

    run(test)


def test_a_read_sees_what_was_committed_before_it_began() -> None:
    async def test(database: Database) -> None:
        [before] = await database.begin("a")
        database.committed = 1
        after = await database.begin("a", "b")
        database.go.set()
        assert rows(await before) == [b'["a",0]']
        assert [rows(await one) for one in after] == [[b'["a",1]'], [b'["b",1]']]
        assert database.asked == [["a"], ["a", "b"]]

    run(test)


def test_a_query_that_hangs_holds_up_no_later_read() -> None:
    async def test(database: Database) -> None:
        [hung] = await database.begin("a")
        database.go = asyncio.Event()
        [later] = await database.begin("b")
        database.go.set()
        assert rows(await later) == [b'["b",0]']
        assert not hung.done()
        hung.cancel()

    run(test)


def test_a_client_that_goes_takes_no_other_along() -> None:
    async def test(database: Database) -> None:
        one, other = await database.begin("a", "b")
        one.cancel()
        database.go.set()
        assert rows(await other) == [b'["b",0]']
        assert one.cancelled()

    run(test)


def test_an_error_of_the_query_reaches_all_and_one_of_a_value_its_own_read_alone() -> None:
    async def test(database: Database) -> None:
        database.go.set()
        database.error = DatabaseUnavailable("It is away.")
        found = await asyncio.gather(*await database.begin("a", "b"), return_exceptions=True)
        assert [type(one) for one in found] == [DatabaseUnavailable] * 2
        database.error, database.wrong = None, "b"
        a, b = await asyncio.gather(*await database.begin("a", "b"), return_exceptions=True)
        assert isinstance(a, Found)
        assert isinstance(b, ValueRefused)
        assert rows(a) == [b'["a",0]']

    run(test)


def test_reads_of_other_rows_than_the_callers_share_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one shape may, each with its own values; last rows are read apart."""
    asked: list[tuple[int, list[Rows]]] = []

    async def query(self: ViewReader, _: Any, keys: Sequence[Values], only: Sequence[Rows]) -> Found:
        asked.append((len(keys), list(only)))
        if any("bad" in str(one) for one in only):
            raise BadAccess("It can't be compared.")
        return Found(1, "t", Token({}), None, {}, [], False, None, None)

    monkeypatch.setattr(ViewReader, "_by_keys", query)
    mine, yours, bad = Rows(owner="ada"), Rows(owner="bob"), Rows(owner="bad")

    async def test(database: Database) -> None:
        reader = ViewReader(Settings(), Mock(), Mock(), Mock(), None)
        last = reader.with_last_rows()
        reads = [reader.by_keys(VIEW, [("a",)], only) for only in ((), (), [mine], [yours], [Rows(cents=1)])]
        await asyncio.gather(*reads, last.by_keys(VIEW, [("a",)]))
        assert asked == [(2, []), (2, [mine, yours]), (1, [Rows(cents=1)]), (1, [])]
        pair = (reader.by_keys(VIEW, [("a",)], [one]) for one in (mine, bad))
        found = await asyncio.gather(*pair, return_exceptions=True)
        assert [type(one) for one in found] == [Found, BadAccess]
        del found  # their tracebacks hold it
        await asyncio.sleep(0)
        gc.collect()
        assert not reader._gathering

    run(test)
