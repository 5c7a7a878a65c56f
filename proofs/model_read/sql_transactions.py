"""Statements that begin and end transactions, and settings."""

from __future__ import annotations

from typing import Any

from proofs.model_read.catalogue import reads, shape, writes
from proofs.model_read.postgres import Result, Statement, Steps, Transaction


@reads("begin", local=True)
def begin(statement: Statement, _parameters: Any) -> Result:
    statement.session.transaction = Transaction(explicit=True)
    return Result()


@reads("begin isolation level repeatable read, read only", local=True)
def begin_repeatable(statement: Statement, _parameters: Any) -> Result:
    statement.session.transaction = Transaction(explicit=True, repeatable=True)
    return Result()


@writes("commit")
def commit(statement: Statement, _parameters: Any) -> Steps:
    statement.session.publish()
    return Result()
    yield


@writes("rollback")
def rollback(statement: Statement, _parameters: Any) -> Steps:
    statement.session.abort()
    return Result()
    yield


@shape(r'savepoint "?(\w+)"?', local=True)
def savepoint(statement: Statement, _parameters: Any, name: str) -> Steps:
    statement.transaction.written.append((name, {}))
    return Result()
    yield


@shape(r'rollback to (?:savepoint )?"?(\w+)"?', local=True)
def rollback_to(statement: Statement, _parameters: Any, name: str) -> Steps:
    """Undoes what was written since; locks taken since are kept here, which PostgreSQL lets go."""
    layers = statement.transaction.written
    while layers[-1][0] != name:
        layers.pop()
    layers[-1] = (name, {})
    statement.transaction.failed = False
    return Result()
    yield


@shape(r'release "?(\w+)"?', local=True)
def release(statement: Statement, _parameters: Any, name: str) -> Steps:
    layers = statement.transaction.written
    while layers[-1][0] != name:
        _merge(layers)
    _merge(layers)
    return Result()
    yield


def _merge(layers: list[Any]) -> None:
    _, top = layers.pop()
    layers[-1][1].update(top)


@shape(r"set (?:local )?(?:lock_timeout|transaction_timeout|idle_in_transaction_session_timeout) = \d+", local=True)
def set_(_statement: Statement, _parameters: Any) -> Steps:
    return Result()
    yield


@reads("select", "select 1", "select pg_notify(%s, %s)", "select pg_notify(%s, 'replay')", local=True)
def nothing(_statement: Statement, _parameters: Any) -> Result:
    return Result([(1,)], 1)
