"""Deadlines on the client's side: a server that hangs or is cut off does not keep its own."""

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
    """Shuts the connection's socket when the block takes longer, so that the waiting code gets psycopg.OperationalError.

    Cancelling is not enough: psycopg asks the server to cancel the query and waits for its answer.
    """
    timer = asyncio.get_running_loop().call_later(seconds, _shut, connection)
    try:
        yield
    finally:
        timer.cancel()


def _shut(connection: Connection) -> None:
    # on a copy of the descriptor: libpq and the event loop keep theirs, and notice the end
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


class Pool(AsyncConnectionPool[Connection]):
    """A pool whose connections are lent for at most `seconds`; then their user gets psycopg.OperationalError."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds = seconds

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[Connection]:  # noqa: ASYNC109  # the pool's
        async with super().connection(timeout) as connection:
            with ended_after(connection, self._seconds):
                yield connection
