"""The same request without a log: FastAPI and psycopg as their documentation shows them, three statements in one transaction.

`python -m benchmarks.peers.crud --port 8001 --workers 2`, until SIGTERM; SAMEFOLD_DATABASE_URL names a database with TABLES.
"""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from typing import Annotated, Any, LiteralString

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from psycopg.errors import UniqueViolation
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, Field

from benchmarks.child import flags

TABLES: LiteralString = """
create table accounts (id text collate "C" primary key, balance bigint not null, version bigint not null);
create table statement (account text collate "C", version bigint, cents bigint not null, day date not null,
                        balance bigint not null, primary key (account, version));
create table keys (account text collate "C", key text collate "C", version bigint not null, primary key (account, key))
"""
DEPOSIT = "update accounts set balance = balance + %s, version = version + 1 where id = %s returning version, balance"
LINE = "insert into statement (account, version, cents, day, balance) values (%s, %s, %s, %s, %s)"
KEY = "insert into keys (account, key, version) values (%s, %s, %s)"

pool = AsyncConnectionPool(os.environ.get("SAMEFOLD_DATABASE_URL", ""), min_size=8, max_size=16, open=False)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with pool:
        yield


app = FastAPI(lifespan=lifespan)


class Deposit(BaseModel):
    cents: Annotated[int, Field(ge=1, le=10**14)]
    on: date


class Done(BaseModel):
    outcome: str = "accepted"
    version: int


@app.post("/accounts/{account}/deposit")
async def deposit(account: str, body: Deposit, idempotency_key: Annotated[str, Header()]) -> Done:
    async with pool.connection() as connection:
        try:
            async with connection.transaction():
                row = await (await connection.execute(DEPOSIT, (body.cents, account))).fetchone()
                if row is None:
                    raise HTTPException(404)
                version, balance = row
                await connection.execute(LINE, (account, version, body.cents, body.on, balance))
                await connection.execute(KEY, (account, idempotency_key, version))
        except UniqueViolation:
            query = "select version from keys where account = %s and key = %s"
            [version] = await (await connection.execute(query, (account, idempotency_key))).fetchone() or [0]
    return Done(version=version)


def main() -> None:
    given = flags("port", "workers")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a shell's 1,024 are too few for 1,000 connections
    # uvicorn kills workers that do not answer it within 5 s, also while they start on a busy machine
    quiet: dict[str, Any] = {"access_log": False, "timeout_worker_healthcheck": 60}
    uvicorn.run("benchmarks.peers.crud:app", port=given.port, workers=given.workers, **quiet)


if __name__ == "__main__":
    main()
