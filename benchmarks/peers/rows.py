"""A row by its key as one writes it by hand: FastAPI, psycopg with a pool, one statement.

`python -m benchmarks.peers.rows --port 8001 --connections 8`, until SIGTERM; SAMEFOLD_DATABASE_URL names a database with TABLE.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from typing import Any, LiteralString

import uvicorn
from fastapi import FastAPI, HTTPException
from psycopg.rows import class_row
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

from benchmarks.child import flags

TABLE: LiteralString = """
create table balances (account text collate "C" primary key, cents bigint not null, overdraft_limit bigint not null,
                       opened_on date not null, last_on date not null, transactions bigint not null, closed_on date,
                       owner text not null)
"""
ROW = "select * from balances where account = %s"


class Balance(BaseModel):
    account: str
    cents: int
    overdraft_limit: int
    opened_on: date
    last_on: date
    transactions: int
    closed_on: date | None
    owner: str


def app_of(url: str, connections: int) -> FastAPI:
    options = {"autocommit": True}
    pool = AsyncConnectionPool(url, min_size=connections, max_size=connections, kwargs=options, open=False)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/balances/{account}")
    async def balance(account: str) -> Balance:
        async with pool.connection() as connection, connection.cursor(row_factory=class_row(Balance)) as cursor:
            row = await (await cursor.execute(ROW, (account,))).fetchone()
        if row is None:
            raise HTTPException(404)
        return row

    return app


def main() -> None:
    given = flags("port", "connections")
    app = app_of(os.environ["SAMEFOLD_DATABASE_URL"], given.connections)
    quiet: dict[str, Any] = {"access_log": False, "loop": "uvloop", "http": "httptools"}
    uvicorn.run(app, port=given.port, **quiet)


if __name__ == "__main__":
    main()
