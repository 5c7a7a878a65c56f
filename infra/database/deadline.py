"""Deadlines on the client's side: a server that hangs or is cut off does not keep its own."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from infra.database.connect import BEGIN, require_own_backend
from infra.errors import SamefoldError

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


class Session(psycopg.AsyncConnection[Any]):
    """A connection for event loops, made with `infra.database.connect.parameters`."""

    @classmethod
    async def connect(  # type: ignore[override]
        cls, conninfo: str = "", *, begin: Mapping[str, list[str]], **options: Any
    ) -> Any:
        """Raises psycopg.Error, TransactionPooling."""
        connection = await super().connect(conninfo, **options)
        try:
            with ended_after(connection, 10.0):
                [(backend, _)] = await (await connection.execute(BEGIN, begin)).fetchall()
            if backend != connection.info.backend_pid:
                await asyncio.to_thread(require_own_backend, conninfo)
        except BaseException:
            await connection.close()
            raise
        return connection


class Pool(AsyncConnectionPool[Connection]):
    """A pool whose connections are lent for at most `seconds`; then their user gets psycopg.OperationalError.

    A caller that gets none in time gets the error that prevented a new one, if there was one.
    """

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        pool = self

        class Remembered(Session):
            @classmethod
            async def connect(cls, *arguments: Any, **options: Any) -> Any:
                try:
                    made = await super().connect(*arguments, **options)
                except (psycopg.Error, SamefoldError) as error:
                    pool._failed = error
                    raise
                pool._failed = None
                return made

        self._failed: psycopg.Error | SamefoldError | None = None
        super().__init__(*arguments, connection_class=Remembered, **options)
        self._seconds = seconds

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[Connection]:  # noqa: ASYNC109  # the pool's
        try:
            async with super().connection(timeout) as connection:
                with ended_after(connection, self._seconds):
                    yield connection
        except PoolTimeout as error:
            if error.__context__ is not None:
                # the pool's own error is kept by its frame, which from Python 3.12 on keeps the callers' frames, too
                error.__context__.with_traceback(None)
            if self._failed is None:
                raise
            raise self._failed.with_traceback(None) from error
