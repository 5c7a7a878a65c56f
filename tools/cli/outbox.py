"""Wishes of policies on their way, and dead letters."""

import json
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from infra.settings import Settings
from policies.engine import operate
from policies.engine.operate import COUNTED, Which, WishNow, require_known, wish, wishes
from tools import terminal
from tools.cli import Json, Yes, confirm, new_app

WishId = Annotated[str, typer.Argument(metavar="ID", help="A wish's id.")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID…]", help="Ids of wishes; - reads them from standard input.")
]
OfPolicy = Annotated[str | None, typer.Option("--policy", help="Of this policy only.")]
OfEndpoint = Annotated[str | None, typer.Option("--endpoint", help="Posts to this endpoint only.")]
OfReason = Annotated[str | None, typer.Option("--reason", help="Dead letters of this reason only, e.g. gave-up.")]


def _in_utc(at: datetime | None) -> datetime | None:
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


TIME: dict[str, Any] = {
    "formats": ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"],
    "callback": _in_utc,
}
Since = Annotated[
    datetime | None, typer.Option("--since", help="Wished since then only; in UTC if no zone is given.", **TIME)
]
Until = Annotated[
    datetime | None, typer.Option("--until", help="Wished before that only; in UTC if no zone is given.", **TIME)
]
SHOWN = 20
"""So many wishes are named before they are dropped."""


app = new_app(__doc__, no_args_is_help=True)


@app.command("list")
def list_(
    policy: OfPolicy = None,
    endpoint: OfEndpoint = None,
    reason: OfReason = None,
    since: Since = None,
    until: Until = None,
    dead: Annotated[bool, typer.Option("--dead", help="Dead letters only.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the oldest ones.")] = 100,
    as_json: Json = False,
) -> None:
    """What is in the outbox, without bodies."""
    settings = Settings()
    which = Which(policy=policy, endpoint=endpoint, reason=reason, since=since, until=until, alive=not dead)
    total, found = wishes(settings, which, limit=limit)
    if policy is not None and not found:
        require_known(settings, policy)

    def text(_: Any) -> terminal.Output:
        if not found:
            yield "There are no dead letters." if dead else "Nothing is on its way."
            return
        columns = ("id", "state", "kind", "from", "to", "type", "wished", "due", "attempts", "why")
        yield terminal.table(columns, map(_row, found))
        if total > len(found):
            yield f"… and {total - len(found):,} more{' at least' if total >= COUNTED else ''}: --limit"

    terminal.show({"total": total, "wishes": found}, text, as_json=as_json)


@app.command()
def show(ident: WishId, as_json: Json = False) -> None:
    """All there is of one wish, its bodies too. They may be confidential."""

    def text(found: dict[str, Any]) -> terminal.Output:
        values = {name: value for name, value in found.items() if value is not None}
        yield terminal.table(("", ""), ((name, _plain(value)) for name, value in values.items()))
        if found["dead"]:
            yield f"`samefold outbox retry {ident}` once the cause is gone, or `samefold outbox drop {ident}`."

    settings = Settings()
    terminal.show(terminal.opened(settings, wish(settings, ident)), text, as_json=as_json)


@app.command()
def retry(
    idents: Ids = None,
    policy: OfPolicy = None,
    endpoint: OfEndpoint = None,
    reason: OfReason = None,
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Send dead letters again: those that are named, or all that the options fit."""
    settings = Settings()
    which = _which(idents, policy=policy, endpoint=endpoint, reason=reason, since=since, until=until)
    refused: dict[str, str] = {}
    with terminal.progress("retry", None, quiet=as_json or bool(idents)) as advance:
        retried, left = operate.retry(settings, which, advance, refused.__setitem__)
    if policy is not None and not retried + left:
        operate.require_known(settings, policy)

    def text(_: Any) -> terminal.Output:
        yield f"{retried:,} to be sent again."
        if left:
            yield f"{left:,} can't be: `samefold outbox list --dead` shows why."
        yield from (f"{ident}: {why}" for ident, why in refused.items())

    answer = {"retried": retried, "left": left} | ({"refused": refused} if refused else {})
    terminal.show(answer, text, as_json=as_json)


@app.command()
def drop(
    idents: Ids = None,
    policy: OfPolicy = None,
    endpoint: OfEndpoint = None,
    reason: OfReason = None,
    since: Since = None,
    until: Until = None,
    alive: Annotated[bool, typer.Option("--all", help="What the options fit, also if it is no dead letter.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove wishes for good: those that are named, or all dead letters that the options fit."""
    settings = Settings()
    which = _which(idents, alive=alive, policy=policy, endpoint=endpoint, reason=reason, since=since, until=until)
    total, found = operate.wishes(settings, which, limit=SHOWN if which.ids is None else None)
    total = max(total, len(found))
    if policy is not None and not total:
        operate.require_known(settings, policy)
    if total and not yes:
        if idents == ["-"]:
            raise typer.BadParameter("the ids come from standard input, so the command can't ask: add --yes")
        many = f"{total:,} wishes{' or more' if which.ids is None and total >= operate.COUNTED else ''}"
        what = many if total > SHOWN else ", ".join(one.id for one in found)
        confirm(f"Drop {what}?{_lost(found, all_of_it=total > len(found))}", yes=False)
    with terminal.progress("drop", None, quiet=as_json or bool(idents)) as advance:
        dropped = operate.drop(settings, which, advance)
    terminal.show({"dropped": dropped}, lambda _: [f"Dropped {dropped:,}."], as_json=as_json)


def _lost(found: list[WishNow], *, all_of_it: bool) -> str:
    """What is lost with these wishes; or may be, if there are more."""
    lost = ""
    if all_of_it or any(one.has_follow_up for one in found):
        streams = (
            "their streams" if all_of_it else ", ".join(sorted({str(one.stream) for one in found if one.has_follow_up}))
        )
        lost += f" No follow-up will come for {streams}, which may wait for it for ever."
    if all_of_it or any(one.state in ("sent", "unsent") for one in found):
        lost += (
            " A wish that was sent, or is just being sent, may still be decided or delivered. A command stays as `dropped` until "
            "its outcome has come; drop it once more to delete it at once."
        )
    if all_of_it or any(one.state == "outcome" for one in found):
        lost += " If the wish of a dropped outcome is read later, it waits for ever."
    return lost


def _which(idents: list[str] | None, *, alive: bool = False, **options: Any) -> Which:
    """Raises BadParameter unless there are either ids or options."""
    if bool(idents) == any(option is not None for option in options.values()):
        raise typer.BadParameter(
            "name either wishes, or options that they fit: --policy, --endpoint, --reason, --since, --until"
        )
    ids = sys.stdin.read().split() if idents == ["-"] else idents or None
    return Which(ids=ids, alive=alive, **options)


def _row(one: WishNow) -> tuple[Any, ...]:
    return (
        one.id,
        terminal.Text(one.state, "red") if one.dead else one.state,
        one.kind,
        one.stream and f"{one.stream}{'@' if one.kind == 'message' else ' '}{one.version}",
        one.target,
        one.type,
        one.wished_at and f"{one.wished_at:%F %T}",
        one.due and f"{one.due:%F %T}",
        one.attempts or None,
        one.dead,
    )


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
