"""The client's end of a request's connection: whoever waits for it learns at once that it has gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.responses import Response

SCOPE = "samefold.client"
"""Under this name the connection puts its client into the scope of each of its requests."""
GONE_STATUS = 499
"""In metrics and traces, of a request that nobody is there any more to be answered; nginx calls it so."""


class ClientGone(Exception):
    """The connection was lost while the request waited."""


class Client:
    """Whoever is at the other end of a connection. Used in the event loop only."""

    def __init__(self) -> None:
        self._is_gone = False
        self._watching: set[Callable[[], None]] = set()

    def lost(self) -> None:
        """The connection was lost."""
        self._is_gone = True
        for end in tuple(self._watching):
            end()

    @contextmanager
    def watched(self, end: Callable[[], None]) -> Iterator[None]:
        """`end` is called as soon as the client has gone."""
        if self._is_gone:
            end()
        self._watching.add(end)
        try:
            yield
        finally:
            self._watching.discard(end)


def client_of(request: Request) -> Client:
    """Another server than ours tells of no loss."""
    client: Client = request.scope.get(SCOPE) or Client()
    return client


async def to_nobody(_request: Request, _error: Exception) -> Response:
    """The answer to a client that has gone."""
    return Response(status_code=GONE_STATUS)
