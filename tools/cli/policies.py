"""What reacts to events, and what this code has."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from infra.settings import Settings
from policies.engine import activations
from policies.engine.activations import Activation, NewDatabase
from policies.engine.operate import PolicyNow, policies_now, require_policy
from policies.engine.policy import LowerVersion
from projections.engine.fold.as_of import parse_as_of
from tools import terminal
from tools.cli import Json, Yes, confirm, new_app

PolicyName = Annotated[str, typer.Argument(metavar="NAME", help="A policy.")]


app = new_app(__doc__)


@app.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: Json = False) -> None:
    """Per policy: version in the code and live, since when, open wishes, dead letters, parked streams, lag."""
    if context.invoked_subcommand is not None:
        return
    found = {one.name: one for one in policies_now(Settings())}
    terminal.show(found, _text, as_json=as_json)


@app.command()
def switch(name: PolicyName, yes: Yes = False, as_json: Json = False) -> None:
    """Make this code's version live: it reacts to the events from now on. --yes: also if it is older than the live one."""
    settings, policy = Settings(), require_policy(name)
    try:
        with terminal.Stages(quiet=as_json) as stages:
            made = activations.switch(settings, policy, lower=yes, progress=stages)
    except LowerVersion as error:
        if as_json:
            raise
        confirm(f"{error.message} Should it react from now on?", yes=False)
        made = activations.switch(settings, policy, lower=True)
    _show(made, as_json=as_json)


@app.command()
def reposition(
    name: PolicyName,
    to: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, end, or a time: 2026-11-21T14:30:00+01:00, -15m.")
    ],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Let a source go on from another place, where its topic was made anew or lacks what comes next."""
    settings, policy = Settings(), require_policy(name)
    if policy.source is None:
        raise typer.BadParameter(f"'{name}' has no SOURCE: it reacts to events", param_hint="'NAME'")
    moment = to if to in ("earliest", "end") else _past(to, datetime.now(UTC), "--to", "messages")
    confirm(
        f"'{name}' goes on from {to} in each partition, or from where it is if that is later. What it has not received before "
        "that, it never will. Continue?",
        yes=yes,
    )
    made = activations.reposition(settings, policy, moment)
    _show(made, ": where it was received further than that place, it goes on where it is", as_json=as_json)


@app.command()
def remove(name: PolicyName, as_json: Json = False) -> None:
    """Let no version of the policy react from now on. Refused while it has open wishes."""
    _show(activations.remove(Settings(), name), as_json=as_json)


@app.command()
def resume(
    posts_from: Annotated[
        str, typer.Option(metavar="WHEN", help="now, beginning, or a time: 2026-11-21T14:30:00+01:00, -15m.")
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A policy; by default all that are held.")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Let policies go on in a new database. Commands are wished again, and decided once; posts are made of events since WHEN."""
    now = datetime.now(UTC)
    words: dict[str, datetime | str] = {"now": now, "beginning": activations.EVER}
    moment = words.get(posts_from) or _past(posts_from, now, "--posts-from", "posts of all events")
    found, by = activations.resume(Settings(), name, moment, also_live=yes)
    result = {"policies": found, "posts_from": f"{moment}", "by": by}
    line = f"{', '.join(found)}: posts are made of events since {moment}. Decided by {by}."
    terminal.show(result, lambda _: [line], as_json=as_json)


def _past(text: str, now: datetime, option: str, what: str) -> datetime:
    """A time that is not after `now`. Raises BadParameter, BadMoment."""
    moment = parse_as_of(text, now)
    if not isinstance(moment, datetime):
        raise typer.BadParameter("it is a time, not positions", param_hint=f"'{option}'")
    if moment > now:
        raise typer.BadParameter(
            f"{moment} is in the future: {what} until then would be left out", param_hint=f"'{option}'"
        )
    return moment


def _show(made: Activation, also: str = "", *, as_json: bool) -> None:
    at = {partition: reading.next_offset for partition, reading in sorted(made.positions.items())}
    result = {"policy": made.policy, "number": made.number, "version": made.version or None, "positions": at}
    if made.messages:
        result["messages"] = made.begin
    does, to = ("receives", "messages") if made.messages else ("reacts", "to events")
    what = f"Version {made.version} of '{made.policy}' {does}" if made.version else f"'{made.policy}' {does} no more"
    where = " ".join(f"{partition}:{offset}" for partition, offset in made.begin.items())
    terminal.show(result, lambda _: [f"{what} {to} from {where} on{also}."], as_json=as_json)


def _text(found: dict[str, PolicyNow]) -> terminal.Output:
    if not found:
        yield "policies/ has none, and none is live."
        return
    columns = ("policy", "code", "live", "since", "state", "open wishes", "dead letters", "parked")
    yield terminal.table(
        columns,
        (
            (
                one.name,
                *(version and f"v{version}" for version in (one.code, one.live)),
                one.since and f"{one.since:%F %T}",
                one.state,
                one.open or None,
                terminal.Text(f"{one.dead:,}", "red") if one.dead else None,
                one.parked or None,
            )
            for one in found.values()
        ),
    )
    for one in found.values():
        lag = one.lag
        if one.live:
            behind = f"{lag.records:,} records, {lag.seconds:,.1f} s behind" if lag.records else "up to date"
            yield f"policy {one.name}: {behind}"
        if one.source:
            behind = f"{one.source.behind:,} messages behind" if one.source.behind else "all received"
            behind = one.source.problem or behind
            yield f"source {one.name}: {one.source.name}, topic '{one.source.topic}': {behind}"
        if hint := _hint(one):
            yield terminal.Text(f"  {hint}", "yellow")


def _hint(one: PolicyNow) -> str:
    switching = f"`samefold policies switch {one.name}`"
    needs = f"Run the code with {' and '.join(f'v{version}' for version in one.needs)} until its events have been read"
    return {
        "new-database": f"{NewDatabase(one.name)}",
        "switching": f"A switch is under way. If it was killed, any worker of the policy completes it, and so does {switching}.",
        "new": "It begins by itself, as soon as a process of policies can read its topic."
        if one.source
        else f"It is held: it reacts to no event before {switching}.",
        "removed": f"It is held: it was removed. {switching} lets it react again, from that moment on.",
        "other-version": f"v{one.code} is held. {switching} with this code makes it live, from that moment on. {needs}.",
        "old-events": f"{needs}; then v{one.live} goes on.",
        "no-code": f"This code does not have it. Run the code that has it, or `samefold policies remove {one.name}`."
        if one.live
        else f"It was removed. `samefold outbox drop --policy {one.name}` drops its dead letters.",
    }.get(one.state, "")
