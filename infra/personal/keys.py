"""The keys of personal values, for those who open them. (Branch `personal` replaces this module.)"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg

from infra.settings import Settings


def keys_for(settings: Settings, connection: psycopg.Connection[Any], ids: Collection[str]) -> dict[str, bytes | None]:
    """Data keys by key id; None: forgotten."""
    found = connection.execute("select id, wrapped from personal_keys where id = any(%s)", (list(ids),))
    return dict(found.fetchall())


async def keys_for_async(
    settings: Settings, connection: psycopg.AsyncConnection[Any], ids: Collection[str]
) -> dict[str, bytes | None]:
    """The same."""
    found = await connection.execute("select id, wrapped from personal_keys where id = any(%s)", (list(ids),))
    return dict(await found.fetchall())
