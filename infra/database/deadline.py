"""Deadlines on the client's side: a server that hangs, or is cut off, keeps to none of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

Connection = psycopg.AsyncConnection[Any]


@contextmanager
def ended_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Shuts the connection's socket when the block takes longer, so that what waits for an answer gets psycopg.OperationalError.

    To cancel it would not do: psycopg asks the server to cancel the query, and waits for its answer to that.
    """
    timer = asyncio.get_running_loop().call_later(seconds, _shut, connection)
    try:
        yield
    finally:
        timer.cancel()


def _shut(connection: Connection) -> None:
    # of a copy of the descriptor: libpq and the event loop go on with theirs, and find its end
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


class Pool(AsyncConnectionPool[Connection]):
    """A pool whose connections are lent for `seconds`; whoever is not through by then gets psycopg.OperationalError."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[Connection]:  # noqa: ASYNC109  # the pool's
        async with super().connection(timeout) as connection:
            with ended_after(connection, self._seconds):
                yield connection
