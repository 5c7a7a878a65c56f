"""`/console/do/…`: what changes something. A page asks once more; its form has a command of `samefold` run, and recorded."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid4

from confluent_kafka import KafkaException
from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import RedirectResponse, Response

from api.console import site
from api.console.site import Console, url
from api.door import caller_of
from api.problems import NOT_FOUND, invalid
from api.services import services_of
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, DatabaseRefused, DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log.records import Commit, decode_event
from infra.settings import Settings
from policies.engine.operate import UnknownPolicy, policy_states, wish
from policies.engine.policy import discover
from projections.engine.operate.replaying import NotParked
from projections.engine.rebuild.builds import droppable
from projections.engine.rebuild.switch import pointers
from projections.engine.store.parking import parked_in
from projections.engine.store.positions import stopped_views
from projections.engine.views.core_views import all_views
from projections.engine.views.view import POLICY

MOST = 4
"""Commands that run at once."""
LONGEST_ARGUMENT = 4_000
LONGEST_OUTPUT = 2**16
"""Bytes that are kept of each of a command's two outputs."""
AGAIN_S = 2.0
"""For the record of an end, where the database is away."""
LOG_S = 3.0


class TooManyActions(SamefoldError):
    """As many commands run in this process of the API as may run at once."""


class Changed(SamefoldError):
    """It is not any more as the page that asked has shown it."""


class State(NamedTuple):
    """What an action is about, as it is now."""

    facts: dict[str, Any]
    seen: str
    """What must still be so when the form comes."""
    options: tuple[str, ...] = ()
    """Which this state needs."""
    event: tuple[int, int, int] | None = None
    """Partition, offset and version of the event that it is about."""


StateOf: TypeAlias = Callable[[Connection, Settings, Mapping[str, str]], State]


def code_version(view: str) -> int | None:
    """Of a view, or of a policy by its agent's name, in this code."""
    if view.startswith(POLICY):
        policy = discover().get(view.removeprefix(POLICY))
        return policy.version if policy else None
    return all_views()[view].version if view in all_views() else None


def _parked(connection: Connection, _: Settings, given: Mapping[str, str]) -> State:
    view, stream = given["view"], given["stream"]
    one = parked_in(connection, view, stream)
    if one is None:
        raise NotParked(
            f"Stream {stream} is not parked in view '{view}'.", "It may have been replayed or dropped meanwhile."
        )
    facts = {
        "parked": site.ago(one.parked_at),
        "since version": one.since_version,
        "error": one.error,
        "version of the code": code_version(view),
    }
    return State(facts, str(one.since_version), event=(one.partition, one.since_offset, one.since_version))


def _wish(_: Connection, settings: Settings, given: Mapping[str, str]) -> State:
    row = wish(settings, given["id"])
    times = {name: site.ago(row.get(name)) for name in ("due", "wished_at", "sent_at", "next_attempt") if row.get(name)}
    return State({name: value for name, value in (row | times).items() if value is not None}, str(row["dead"]))


def _policy(connection: Connection, settings: Settings, given: Mapping[str, str]) -> State:
    name = given["policy"]
    if (now := policy_states(connection, settings.events_topic).get(name)) is None:
        raise UnknownPolicy(f"There is no policy '{name}'.")
    facts = {
        "state": now.state,
        "version of the code": now.code,
        "live version": now.live,
        "since": site.ago(now.since),
    }
    return State(facts, f"{now.live} {now.state}")


def _switched(connection: Connection, settings: Settings, given: Mapping[str, str]) -> State:
    state = _policy(connection, settings, given)
    code, live = state.facts["version of the code"], state.facts["live version"]
    if not (code and live and code < live):
        return state
    state.facts["careful"] = (
        f"This code's version {code} is older than version {live}, which is live: that is going back."
    )
    return state._replace(options=("--yes",))


def _view(connection: Connection, _: Settings, given: Mapping[str, str]) -> State:
    name = given["view"]
    live = pointers(connection).get(name)
    if live is None and name not in all_views():
        raise NOT_FOUND(f"There is no view '{name}'.")
    facts = {
        "version of the code": code_version(name),
        "live version": live and live.version,
        "table": live and live.table,
    }
    for one in stopped_views(connection):
        if one.view == name:
            facts["stopped"] = site.ago(one.stopped_at)
            facts |= {"stream": one.stream, "version of the event": one.stream_version, "error": one.error}
    return State(facts, f"{facts['table']} {'stopped' in facts}")


def _table(_: Connection, settings: Settings, given: Mapping[str, str]) -> State:
    found = {build.table: str(build.state) for build in droppable(settings, given["view"], given["table"])}
    return State(found, " ".join(found))


class Action(NamedTuple):
    """A command of `samefold`, and what the page that asks says."""

    title: str
    words: str
    """What will happen, with the arguments in braces."""
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    state: StateOf
    options: tuple[str, ...] = ()

    def line(self, given: Mapping[str, str], options: Sequence[str] = ()) -> list[str]:
        values = [given[name] for name in self.arguments]
        dashes = ["--"] if any(value.startswith("-") for value in values) else []
        return [*self.command, *self.options, *options, *dashes, *values]


ACTIONS = {
    "parked-replay": Action(
        "Replay a parked stream",
        "This code folds the events of {stream} into {view}, from the parked one on. One that fails again stays parked from there.",
        ("parked", "replay"),
        ("view", "stream"),
        _parked,
    ),
    "parked-drop": Action(
        "Leave an event out",
        "{view} leaves the first parked event of {stream} out for good, in every later build too, and folds the rest.",
        ("parked", "drop"),
        ("view", "stream"),
        _parked,
        ("--yes",),
    ),
    "outbox-retry": Action(
        "Send a dead letter again",
        "It is sent again: a command that was rejected under a new id, all else under its own.",
        ("outbox", "retry"),
        ("id",),
        _wish,
    ),
    "outbox-drop": Action(
        "Drop a wish",
        "It is removed for good. No follow-up of it will come. If it has been sent, it may still be decided or delivered.",
        ("outbox", "drop"),
        ("id",),
        _wish,
        ("--yes",),
    ),
    "policies-switch": Action(
        "Switch a policy",
        "This code's version of {policy} reacts to the events from now on.",
        ("policies", "switch"),
        ("policy",),
        _switched,
    ),
    "policies-remove": Action(
        "Remove a policy",
        "No version of {policy} reacts to events from now on. It is refused while the policy has open wishes.",
        ("policies", "remove"),
        ("policy",),
        _policy,
    ),
    "views-resume": Action(
        "Resume a stopped view",
        "This code folds the events that {view} has missed since it stopped, and makes it live again.",
        ("views", "resume"),
        ("view",),
        _view,
    ),
    "switch": Action(
        "Switch a view",
        "Readers see version {version} of {view}, whose table exists already. It is caught up first.",
        ("switch",),
        ("view", "version"),
        _view,
    ),
    "rebuild": Action(
        "Rebuild a view",
        "A new table of {view} is folded from the whole log while agents work on, and goes live at the end. It may take long.",
        ("rebuild",),
        ("view",),
        _view,
    ),
    "views-drop": Action(
        "Drop tables of a view",
        "These tables of {view} are dropped. To go back to one of them needs a rebuild then.",
        ("views", "drop"),
        ("view", "table"),
        _table,
        ("--yes",),
    ),
}


class Actions:
    """The commands that this process of the API runs. Each is recorded before it starts, and at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.running: set[UUID] = set()

    async def start(self, ident: UUID, by: str | None, arguments: list[str]) -> None:
        """Run it, unless the form was sent before. Raises TooManyActions, DatabaseUnavailable, DatabaseRefused."""
        if ident in self.running:
            return
        if len(self.running) >= MOST:
            raise TooManyActions(
                f"{MOST} commands run now.", "Wait until one of them has ended, and send the form again."
            )
        self.running.add(ident)
        line = shlex.join(["samefold", *arguments])
        begun = await self._console.ask(partial(_begin, ident=ident, by=by, command=line))
        if begun.found:
            self._console.services.parts.task(f"action {ident}", self._run(ident, arguments), may_return=True)
            return
        self.running.discard(ident)
        if begun.error is not None:
            raise begun.error

    async def _run(self, ident: UUID, arguments: list[str]) -> None:
        try:
            code, output = await _ran([*arguments, "--json"], self._console.services.settings)
            end = partial(_end, ident=ident, code=code, output=output)
            while isinstance((await self._console.ask(end)).error, DatabaseUnavailable):  # noqa: ASYNC110
                await asyncio.sleep(AGAIN_S)
        finally:
            self.running.discard(ident)


async def _ran(arguments: Sequence[str], settings: Settings) -> tuple[int | None, str]:
    """Exit code and outputs of `samefold`, as a process of its own: an author's code that never ends harms no request."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from tools.cli import main; main()"),
            *arguments,
            env=os.environ | settings.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:  # no memory, too many processes
        return None, str(error)
    assert process.stdout
    assert process.stderr
    try:
        texts = await asyncio.gather(_head(process.stdout), _head(process.stderr))
        return await process.wait(), "".join(texts).replace("\0", "\N{REPLACEMENT CHARACTER}")
    finally:
        if process.returncode is None:  # the API ends before the command does: no command minds
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def _head(stream: asyncio.StreamReader) -> str:
    kept = b""
    while read := await stream.read(LONGEST_OUTPUT):
        kept += read[: LONGEST_OUTPUT - len(kept)]
    return kept.decode(errors="replace")


def _begin(connection: Connection, *, ident: UUID, by: str | None, command: str) -> bool:
    """Whether this is the first that is heard of it."""
    insert = "insert into operator_actions (id, by, command) values (%s, %s, %s) on conflict do nothing"
    return connection.execute(insert, (ident, by, command)).rowcount == 1


def _end(connection: Connection, *, ident: UUID, code: int | None, output: str) -> None:
    update = "update operator_actions set ended_at = now(), exit_code = %s, output = %s where id = %s"
    connection.execute(update, (code, output, ident))


def _recorded(connection: Connection, ident: UUID) -> dict[str, Any] | None:
    cursor = connection.cursor(row_factory=dict_row)
    return cursor.execute("select * from operator_actions where id = %s", (ident,)).fetchone()


# ── the pages ──


async def ask(request: Request) -> Response:
    """What will happen, and the form that has it happen."""
    name, action = _action(request)
    given = _given(action, request.query_params)
    state = await _state(request, action, given)
    facts = state.facts
    if state.event:
        reading = asyncio.to_thread(_event, services_of(request).settings, *state.event)
        with suppress(TimeoutError, SamefoldError, KafkaException):  # the log is silent: the page does without
            facts["event"] = await asyncio.wait_for(reading, LOG_S)
    return site.page(
        request,
        "do.html",
        current="work",
        name=name,
        action=action,
        given=given,
        words=action.words.format(**given),
        facts=await site.opened(request, facts),
        seen=state.seen,
        command=shlex.join(["samefold", *action.line(given, state.options)]),
        id=uuid4(),
    )


async def do(request: Request) -> Response:
    _, action = _action(request)
    form = await site.form_of(request)
    given, ident = _given(action, form), _uuid(form.get("id", ""))
    actions: Actions = request.app.state.actions
    before = await site.console_of(request).ask(partial(_recorded, ident=ident))
    if before.error is not None:
        raise before.error
    if before.found is None and ident not in actions.running:
        state = await _state(request, action, given)
        if state.seen != form.get("seen"):
            raise Changed("Nothing was done: it has changed since the page was shown.", "Look at it again.")
        caller = caller_of(request)
        await actions.start(ident, caller.subject if caller else None, action.line(given, state.options))
    return RedirectResponse(url(f"/done/{ident}"), 303)


async def done(request: Request) -> Response:
    """What became of it."""
    ident = _uuid(request.path_params["id"])
    found = await site.console_of(request).ask(partial(_recorded, ident=ident))
    if found.error is not None:
        raise found.error
    if (row := found.found) is None:
        raise NOT_FOUND("Nothing was done under this id.")
    actions: Actions = request.app.state.actions
    result, text = _result(row["output"] or "")
    template = "done-live.html" if "HX-Request" in request.headers else "done.html"
    opened = await site.opened(request, {"result": result, "text": text})
    return site.page(request, template, current="work", row=row, is_running=ident in actions.running, **opened)


def _result(output: str) -> tuple[dict[str, Any], str]:
    """The object that the command printed, and its other words."""
    first, _, rest = output.partition("\n")
    with suppress(ValueError):
        if isinstance(found := json.loads(first), dict):
            return found, rest
    return {}, output


async def _state(request: Request, action: Action, given: Mapping[str, str]) -> State:
    settings = services_of(request).settings
    found = await site.console_of(request).ask(lambda connection: action.state(connection, settings, given))
    if isinstance(found.error, DatabaseUnavailable | DatabaseRefused):
        raise found.error
    if found.found is None:
        assert found.error
        raise NOT_FOUND(found.error.message, hint=found.error.hint)
    return found.found


def _event(settings: Settings, partition: int, offset: int, version: int) -> dict[str, Any]:
    """The event as the log has it. Raises what `read_range` raises."""
    for records in read_range(settings, settings.events_topic, partition, offset, offset + 1):
        for record in records:
            if isinstance(commit := decode_event(record), Commit):
                event = commit.events[version - commit.version - 1]
                return {"type": event.type, "data": json.loads(event.data)}
    return {}


def _action(request: Request) -> tuple[str, Action]:
    name = request.path_params["name"]
    if name not in ACTIONS:
        raise NOT_FOUND("There is no such action.")
    return name, ACTIONS[name]


def _given(action: Action, fields: Mapping[str, str]) -> dict[str, str]:
    """The action's arguments. Raises Problem 422."""
    given = {name: fields.get(name, "") for name in action.arguments}
    wrong = [(name, "it is missing") for name, value in given.items() if not value]
    wrong += [
        (name, "it can't be one") for name, value in given.items() if "\0" in value or len(value) > LONGEST_ARGUMENT
    ]
    if wrong:
        raise invalid(wrong)
    return given


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise invalid([("id", "it is no UUID")]) from None


def add_to(router: APIRouter) -> None:
    site.add(router, "/do/{name}", ask)
    site.add(router, "/do/{name}", do, "change", "POST")
    site.add(router, "/done/{id}", done)
