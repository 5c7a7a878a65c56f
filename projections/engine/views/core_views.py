"""Samefold's own views, which the write side depends on: the states of each context, and the outcome of each command.

They have tables, builds, a live version and verification like any view. They have no module, and they never park.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints
from uuid import UUID

from domain.engine.contexts import Context, contexts
from infra.log.records import Commit
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import BadView, Column, Key, Role, columns_of
from projections.engine.views.view import Kind, View, discover, fingerprint

OUTCOMES = "command_outcomes"
OUTCOMES_VERSION = 3  # raised when the columns of Outcome change


class StoredState(NamedTuple):
    """A stream's newest state, as the JSON of its context's State. A stream without a row has the State's defaults."""

    stream: Key[str]
    version: int
    state: bytes


class Outcome(NamedTuple):
    """The outcome of a command. `version` is the stream's after it; `code` and `message` are the reason of a rejection, else null.

    `command` is its `command_key`, `by` its sender, as the log has it. Each command has its row for ever, which eight columns, the
    wide ones first, keep small: a ninth would take eight bytes more, and so may another order.
    """

    command: Key[UUID]
    fingerprint: UUID
    version: int
    at: datetime
    code: str | None
    message: str | None
    by: str | None


def snapshot_view_name(context: str) -> str:
    return f"streams_{context}"


def states_told_to(view: View) -> list[str]:
    """The snapshot views of the states that a journal's `rows` takes: every fold of the journal folds them too."""
    return [snapshot_view_name(context) for context in view.contexts] if view.kind is Kind.JOURNAL else []


def snapshot_view(context: Context) -> View:
    """The states of a context. Its version is the context's STATE_VERSION."""
    return View(
        name=snapshot_view_name(context.name),
        version=context.state_version,
        kind=Kind.SNAPSHOT,
        row=StoredState,
        columns=(
            Column("stream", Scalar.STR, role=Role.KEY),
            Column("version", Scalar.INT),
            Column("state", Scalar.JSON),
        ),
        function=context.evolve,
        subscription=frozenset(context.events.values()),
        contexts=(context.name,),
        shape=fingerprint(Kind.SNAPSHOT, shape_of(context.state)),
        question=f"What does each stream of {context.name} look like to the next decision?",
    )


def outcomes_view() -> View:
    columns = columns_of(Outcome, OUTCOMES)
    return View(
        name=OUTCOMES,
        version=OUTCOMES_VERSION,
        kind=Kind.OUTCOMES,
        row=Outcome,
        columns=columns,
        function=outcome_of,
        subscription=frozenset(),
        contexts=(),
        shape=fingerprint(Kind.OUTCOMES, *(column.shape for column in columns)),
        question="What is the outcome of each command?",
    )


def command_key(stream: str, command_id: str) -> str:
    """What stands for a command in the outcomes: 16 bytes in hexadecimal digits, whatever the length of its names.

    Equal keys would be one command. By chance two of 10**12 commands have the same with a probability of 10**24 / 2**129, less than
    1 in 10**14 (the birthday bound). By intent: to meet another's command takes 2**128 attempts at blake2b; two names of one's own,
    2**64, and then the second command is not done. NUL, which no name can hold, keeps ("a/1", "2") apart from ("a/12", "").
    """
    return blake2b(f"{stream}\0{command_id}".encode(), digest_size=16).hexdigest()


def outcome_of(commit: Commit, time: datetime) -> Outcome:
    reason = commit.reason
    return Outcome(
        UUID(command_key(commit.stream, commit.command_id)),
        UUID(commit.fingerprint),
        commit.version,
        time,
        reason.code if reason else None,
        reason.message if reason else None,
        commit.by or None,
    )


@cache
def all_views() -> dict[str, View]:
    """The authors' and Samefold's own views by name, in name order. Raises BadView, BadContext."""
    views = [*discover().values(), outcomes_view(), *(snapshot_view(context) for context in contexts().values())]
    return {view.name: view for view in sorted(views, key=lambda view: view.name)}


def agent_views(agent: str) -> dict[str, View]:
    """The views of one agent by name, in name order. Raises BadView where it has none."""
    found = {name: view for name, view in all_views().items() if view.agent == agent}
    if not found:
        known = ", ".join(sorted({view.agent for view in all_views().values()}))
        raise BadView(f"There is no agent '{agent}' in this code.", f"Use one of: {known}.")
    return found


def code_set(views: Mapping[str, View]) -> dict[str, int]:
    """{view: version}. A worker folds only while this equals the set that is live for the agent."""
    return {name: view.version for name, view in views.items()}


def shape_of(kind: Any) -> str:
    """A type's shape as text: fields, their types and defaults, recursively. Names of classes do not matter."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind, include_extras=True)
        fields = (f"{f.name}:{shape_of(hints[f.name])}={_default(f)}" for f in dataclasses.fields(kind))
        return f"{{{','.join(fields)}}}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"enum[{','.join(f'{member.name}={member.value!r}' for member in kind)}]"
    if get_origin(kind) is not None:
        origin = getattr(get_origin(kind), "__name__", str(get_origin(kind)))
        return f"{origin}[{','.join(shape_of(argument) for argument in get_args(kind))}]"
    return kind.__name__ if isinstance(kind, type) else _ADDRESS.sub("", repr(kind))


_ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""Of a function, such as a validator: each process has another one."""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "" if field.default is dataclasses.MISSING else repr(field.default)
