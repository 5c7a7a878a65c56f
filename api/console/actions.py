"""`/console/do/…`: what changes something. A page asks once more; its form has a command of `samefold` run, and recorded."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid4

from confluent_kafka import KafkaException
from fastapi import APIRouter, Request
from psycopg.rows import dict_row
from starlette.responses import RedirectResponse, Response

from api.console import site
from api.console.site import Console, ago, url
from api.door import caller_of
from api.problems import NOT_FOUND, invalid
from api.services import services_of
from infra.archive.whole_log import read_range
from infra.database.connect import Connection, DatabaseRefused, DatabaseUnavailable
from infra.errors import SamefoldError
from infra.log.records import Commit, decode_event
from infra.settings import Settings
from policies.engine.operate import policy_states, wish
from policies.engine.policy import discover
from projections.engine.rebuild.builds import droppable
from projections.engine.rebuild.rebuild import needed
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
    seen: object
    """What must still be so when the form comes."""
    options: tuple[str, ...] = ()
    """Which the command needs because of it."""
    event: tuple[int, int, int] | None = None
    """Partition, offset and version of the event that it is about."""

    @property
    def digest(self) -> str:
        """Of what was seen, for the form."""
        return blake2b(repr(self.seen).encode(), digest_size=8).hexdigest()


Given: TypeAlias = Mapping[str, str]
"""The arguments of an action by name."""


class Action(NamedTuple):
    """A command of `samefold` whose arguments are in capitals, and what will happen, with the arguments in braces."""

    title: str
    command: str
    words: str
    state: Callable[[Connection, Settings, Given], State]

    @property
    def arguments(self) -> list[str]:
        return [word.lower() for word in self.command.split() if word.isupper()]

    def line(self, given: Given, options: Iterable[str]) -> list[str]:
        values = [given[name] for name in self.arguments]
        dashes = ["--"] if any(value.startswith("-") for value in values) else []
        return [*(word for word in self.command.split() if not word.isupper()), *options, *dashes, *values]

    def shown(self, given: Given, options: Iterable[str]) -> str:
        """As one types it."""
        return shlex.join(["samefold", *self.line(given, options)])


def code_version(view: str) -> int | None:
    """Of a view, or of a policy by its agent's name, in this code."""
    policy = discover().get(view.removeprefix(POLICY)) if view.startswith(POLICY) else None
    known = policy or all_views().get(view)
    return known.version if known else None


def _parked(connection: Connection, _: Settings, given: Given) -> State:
    one = parked_in(connection, given["view"], given["stream"])
    if one is None:
        raise NOT_FOUND("The stream is not parked there, or not any more.")
    facts = {"parked": ago(one.parked_at), "since version": one.since_version, "error": one.error}
    facts["version of the code"] = code_version(one.view)
    return State(facts, one.since_version, event=(one.partition, one.since_offset, one.since_version))


def _first_parked(connection: Connection, settings: Settings, given: Given) -> State:
    found = _parked(connection, settings, given)
    return found._replace(options=(f"--version={found.seen}",))


def _wish(_: Connection, settings: Settings, given: Given) -> State:
    row = wish(settings, given["id"])
    facts = {name: ago(value) if isinstance(value, datetime) else value for name, value in row.items()}
    return State({name: value for name, value in facts.items() if value is not None}, row["dead"])


def _policy(connection: Connection, settings: Settings, given: Given) -> State:
    now = policy_states(connection, settings.events_topic).get(given["policy"])
    if now is None:
        raise NOT_FOUND("There is no such policy.")
    facts = {"state": now.state, "version of the code": now.code, "live version": now.live, "since": ago(now.since)}
    is_older = now.code is not None and now.code < (now.live or 0)
    if is_older:
        facts["older"] = "The version of this code is older than the live one: to switch is to go back."
    return State(facts, (now.live, now.state), options=("--yes",) if is_older else ())


def _policy_as_it_is(connection: Connection, settings: Settings, given: Given) -> State:
    return _policy(connection, settings, given)._replace(options=())


def _view(connection: Connection, _: Settings, given: Given) -> State:
    name, code = given["view"], code_version(given["view"])
    live = pointers(connection).get(name)
    if live is None and code is None:
        raise NOT_FOUND("There is no such view.")
    facts = {"version of the code": code, "live version": live and live.version, "table": live and live.table}
    for one in stopped_views(connection):
        if one.view == name:
            facts |= {"stopped": ago(one.stopped_at), "at": f"{one.stream} {one.stream_version}", "error": one.error}
    return State(facts, (facts["table"], facts.get("at")))


def _needed(connection: Connection, _: Settings, __: Given) -> State:
    found = {name: f"v{code_version(name)}" for name in needed(pointers(connection), all_views())}
    if not found:
        raise NOT_FOUND("Each view is live in this code's version.")
    return State(found, [*found.items()])


def _tables(_: Connection, settings: Settings, given: Given) -> State:
    found = {build.table: str(build.state) for build in droppable(settings, given["view"], given["table"])}
    return State(found, [*found])


ACTIONS = {
    "parked-replay": Action(
        "Replay a parked stream",
        "parked replay VIEW STREAM",
        "This code folds the events of {stream} into {view}, from the parked one on. If one fails, it stays parked from there.",
        _parked,
    ),
    "parked-drop": Action(
        "Leave an event out",
        "parked drop --yes VIEW STREAM",
        "{view} leaves the first parked event of {stream} out for good, in every later build too, and folds the rest.",
        _first_parked,
    ),
    "outbox-retry": Action(
        "Send a dead letter again",
        "outbox retry ID",
        "It is sent again: a command that was rejected under a new id, all else under its own.",
        _wish,
    ),
    "outbox-drop": Action(
        "Drop a wish",
        "outbox drop --yes ID",
        "It is removed for good, and no follow-up of it will come. If it was sent, it may still be decided or delivered.",
        _wish,
    ),
    "policies-switch": Action(
        "Switch a policy",
        "policies switch POLICY",
        "This code's version of {policy} reacts to the events from now on.",
        _policy,
    ),
    "policies-resume": Action(
        "Let a policy go on",
        "policies resume --posts-from=now POLICY",
        "{policy} reacts again: commands are wished again, and decided once. Posts are made of events from now on only; for those "
        "of older events name another moment on the command line.",
        _policy_as_it_is,
    ),
    "policies-remove": Action(
        "Remove a policy",
        "policies remove POLICY",
        "No version of {policy} reacts to events from now on. It is refused while the policy has open wishes.",
        _policy_as_it_is,
    ),
    "views-resume": Action(
        "Resume a stopped view",
        "views resume VIEW",
        "This code folds the events that {view} has missed since it stopped, and makes it live again.",
        _view,
    ),
    "switch": Action(
        "Switch a view",
        "switch VIEW VERSION",
        "Readers see version {version} of {view}, whose table exists already. It is caught up first.",
        _view,
    ),
    "rebuild": Action(
        "Rebuild a view",
        "rebuild --processes=1 VIEW",
        "A new table of {view} is folded from the whole log while agents work on, and goes live. It may take long: one process "
        "folds, beside the API. On the command line more may share it.",
        _view,
    ),
    "rebuild-needed": Action(
        "Rebuild what this code needs",
        "rebuild --processes=1",
        "New tables of these views are folded from the whole log while agents work on, and go live together. It may take long: "
        "one process folds, beside the API. On the command line more may share it.",
        _needed,
    ),
    "views-drop": Action(
        "Drop tables of a view",
        "views drop --yes VIEW TABLE",
        "These tables of {view} are dropped. To go back to one of them needs a rebuild then.",
        _tables,
    ),
}
"""By the name in their address."""


class Actions:
    """The commands that this process of the API runs. Each is recorded before it starts, and at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.running: dict[UUID, list[str]] = {}
        """Their arguments."""

    async def start(self, ident: UUID, by: str | None, command: str, arguments: list[str]) -> None:
        """Run it, unless the form was sent before. Raises TooManyActions, DatabaseUnavailable, DatabaseRefused."""
        if ident in self.running:
            return
        if len(self.running) >= MOST:
            raise TooManyActions(
                f"{MOST} commands run now.", "Wait until one of them has ended, and send the form again."
            )
        if arguments in self.running.values():  # the second might do to what comes next what was asked for the first
            raise Changed("Nothing was done: the same command runs now.", "Wait until it has ended, and look again.")
        self.running[ident] = arguments
        has_begun = False
        try:
            has_begun = await self._console.must(partial(_begin, ident=ident, by=by, command=command))
        finally:
            if not has_begun:
                self.running.pop(ident, None)
        if has_begun:
            self._console.services.parts.task(f"action {ident}", self._run(ident, arguments), may_return=True)

    async def _run(self, ident: UUID, arguments: list[str]) -> None:
        try:
            code, output = await _ran(arguments, self._console.services.settings)
            end = partial(_end, ident=ident, code=code, output=output)
            while isinstance((await self._console.ask(end)).error, DatabaseUnavailable):  # noqa: ASYNC110
                await asyncio.sleep(AGAIN_S)
        finally:
            self.running.pop(ident, None)


async def _ran(arguments: list[str], settings: Settings) -> tuple[int | None, str]:
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
    except (OSError, ValueError) as error:  # no memory, too many processes
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


# ── the pages ──


async def ask(request: Request) -> Response:
    """What will happen, and the form that has it happen."""
    name, action, given = _asked(request, request.query_params)
    state = await _state(request, action, given)
    facts = state.facts
    if state.event:
        reading = site.console_of(request).of_kafka(partial(_event, services_of(request).settings, *state.event))
        with suppress(TimeoutError, SamefoldError, KafkaException):  # the log is silent: the page does without
            facts["event"] = await asyncio.wait_for(reading, LOG_S)
    return site.page(
        request,
        "do.html",
        current="work",
        name=name,
        title=action.title,
        words=action.words.format(**given),
        facts=await site.opened(request, facts),
        command=action.shown(given, state.options),
        fields=given | {"form": uuid4(), "seen": state.digest},
    )


async def do(request: Request) -> Response:
    """Has it happen; sent twice, it only shows what became of the first."""
    form = await site.form_of(request)
    _, action, given = _asked(request, form)
    ident = _uuid(form.get("form", ""))
    if await _record(request, ident) is None:
        state = await _state(request, action, given)
        if state.digest != form.get("seen"):
            raise Changed("Nothing was done: it has changed since the page was shown.", "Look at it again.")
        caller, arguments = caller_of(request), action.line(given, (*state.options, "--json"))
        actions: Actions = request.app.state.actions
        await actions.start(ident, caller.subject if caller else None, action.shown(given, state.options), arguments)
    return RedirectResponse(url(f"/done/{ident}"), 303)


async def done(request: Request) -> Response:
    """What became of it."""
    row = await _record(request, _uuid(request.path_params["id"]))
    if row is None:
        raise NOT_FOUND("Nothing was done under this id.")
    actions: Actions = request.app.state.actions
    result, text = _result(row["output"] or "")
    opened = await site.opened(request, {"result": result, "text": text})
    template = "done-live.html" if "HX-Request" in request.headers else "done.html"
    return site.page(request, template, current="work", row=row, is_running=row["id"] in actions.running, **opened)


def _result(output: str) -> tuple[dict[str, Any], str]:
    """The object that the command printed, and its other words."""
    first, _, rest = output.partition("\n")
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(first), dict):
            return found, rest
    return {}, output


def _asked(request: Request, fields: Mapping[str, str]) -> tuple[str, Action, dict[str, str]]:
    """An action's name, the action and its arguments. Raises Problem 404, 422."""
    name = request.path_params["name"]
    if (action := ACTIONS.get(name)) is None:
        raise NOT_FOUND("There is no such action.")
    given = {one: fields.get(one, "") for one in action.arguments}
    if bad := [one for one, value in given.items() if not 0 < len(value) <= LONGEST_ARGUMENT or "\0" in value]:
        raise invalid([(one, "it is missing, too long or no text") for one in bad])
    return name, action, given


async def _state(request: Request, action: Action, given: Given) -> State:
    settings = services_of(request).settings
    try:
        return await site.console_of(request).must(lambda connection: action.state(connection, settings, given))
    except (DatabaseUnavailable, DatabaseRefused):
        raise
    except SamefoldError as error:
        raise NOT_FOUND(error.message, hint=error.hint) from None


async def _record(request: Request, ident: UUID) -> dict[str, Any] | None:
    select = b"select * from operator_actions where id = %s"
    return await site.console_of(request).must(
        lambda connection: connection.cursor(row_factory=dict_row).execute(select, (ident,)).fetchone()
    )


def _event(settings: Settings, partition: int, offset: int, version: int) -> dict[str, Any]:
    """The event as the log has it. Raises what `read_range` raises."""
    for records in read_range(settings, settings.events_topic, partition, offset, offset + 1):
        for record in records:
            if isinstance(commit := decode_event(record), Commit):
                event = commit.events[version - commit.version - 1]
                return {"type": event.type, "data": json.loads(bytes(event.data))}
    return {}


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise invalid([("form", "it is no UUID")]) from None


def add_to(router: APIRouter) -> None:
    site.add(router, "/do/{name}", ask)
    site.add(router, "/do/{name}", do, "change", "POST")
    site.add(router, "/done/{id}", done)
