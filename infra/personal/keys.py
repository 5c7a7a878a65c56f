"""The keys of personal values. (Branch `personal` replaces this module.)"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg

from infra.settings import Settings


class Keys:
    """The keys, for one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, connection: psycopg.Connection[Any]) -> None:
        """Copy what the topic holds."""

    def keys_for(self, connection: psycopg.Connection[Any], ids: Collection[str]) -> dict[str, bytes | None]:
        """Keys by id; None: it was destroyed, or there is none."""
        return dict(connection.execute("select id, wrapped from personal_keys where id = any(%s)", (list(ids),)))

    async def keys_for_async(
        self, connection: psycopg.AsyncConnection[Any], ids: Collection[str]
    ) -> dict[str, bytes | None]:
        """The same."""
        found = await connection.execute("select id, wrapped from personal_keys where id = any(%s)", (list(ids),))
        return dict(await found.fetchall())
