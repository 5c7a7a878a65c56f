"""The three statements that the simple peers run for each event, in one transaction: row, outcome, position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from infra.log.records import Commit

TABLES = b"""
create table balances (account text collate "C" primary key, version bigint not null, cents bigint not null);
create table outcomes (stream text collate "C", command_id text collate "C", outcome text not null, version bigint not null,
                       primary key (stream, command_id));
create table offsets (partition int primary key, next_offset bigint not null);
insert into offsets select p, 0 from generate_series(0, %d) p
"""
ROW = b"""
insert into balances as t (account, version, cents) values (%s, %s, %s)
    on conflict (account) do update set version = excluded.version, cents = t.cents + excluded.cents
"""
OUTCOME = b"insert into outcomes (stream, command_id, outcome, version) values (%s, %s, %s, %s)"
POSITION = b"update offsets set next_offset = %s where partition = %s"


class _Movement(msgspec.Struct):
    cents: int = 0


_decode = msgspec.json.Decoder(_Movement).decode


def statements(commit: Commit, partition: int, offset: int) -> Sequence[tuple[bytes, Sequence[Any]]]:
    """What to execute for a commit."""
    [event] = commit.events
    cents = _decode(event.data).cents
    change = -cents if event.type == "MoneyWithdrawn" else cents
    return (
        (ROW, (commit.stream.removeprefix("accounts/"), commit.version, change)),
        (OUTCOME, (commit.stream, commit.command_id, commit.outcome, commit.version)),
        (POSITION, (offset + 1, partition)),
    )
