"""`samefold outbox`: the wishes of policies on their way, and what to do about dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import Json, Yes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from policies.engine.operate import WishNow

WishId = Annotated[str, typer.Argument(metavar="ID", help="A wish's id.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID…", help="Ids of wishes.")]


def register(app: typer.Typer) -> None:
    outbox = typer.Typer(help="Wishes of policies on their way, and dead letters.", no_args_is_help=True)
    outbox.command("list")(list_)
    for command in (show, retry, drop):
        outbox.command()(command)
    app.add_typer(outbox, name="outbox")


def list_(
    policy: Annotated[str | None, typer.Option(help="Of this policy only.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Dead letters only.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the oldest ones.")] = 100,
    as_json: Json = False,
) -> None:
    """What is in the outbox, without bodies."""
    from infra import terminal
    from infra.settings import Settings
    from policies.engine.operate import require_known, wishes
    from policies.engine.policy import discover

    settings = Settings()
    total, found = wishes(settings, policy=policy, dead=dead, limit=limit)
    if policy is not None and not found:
        require_known(settings, policy, discover())

    def text(_: Any) -> Iterator[RenderableType]:
        if not found:
            yield "There are no dead letters." if dead else "Nothing is on its way."
            return
        columns = ("id", "state", "kind", "from", "to", "type", "wished", "due", "attempts", "why")
        yield terminal.table(columns, map(_row, found))
        if total > len(found):
            yield f"… and {total - len(found):,} more: --limit"

    terminal.show({"total": total, "wishes": found}, text, as_json=as_json)


def show(ident: WishId, as_json: Json = False) -> None:
    """All there is of one wish, its bodies too. They may be confidential."""
    from infra import terminal
    from infra.personal.opening import shown
    from infra.settings import Settings
    from policies.engine.operate import wish

    def text(found: dict[str, Any]) -> Iterator[RenderableType]:
        values = {name: value for name, value in found.items() if value is not None}
        yield terminal.table(("", ""), ((name, _plain(value)) for name, value in values.items()))
        if found["dead"]:
            yield f"`samefold outbox retry {ident}` once the cause is gone, or `samefold outbox drop {ident}`."

    settings = Settings()
    terminal.show(shown(settings, wish(settings, ident)), text, as_json=as_json)


def retry(idents: Ids, as_json: Json = False) -> None:
    """Send dead letters again."""
    from infra import terminal
    from infra.settings import Settings
    from policies.engine.operate import retry as run

    run(Settings(), idents)
    terminal.show({"retried": idents}, lambda _: [f"To be sent again: {', '.join(idents)}."], as_json=as_json)


def drop(idents: Ids, yes: Yes = False, as_json: Json = False) -> None:
    """Remove dead letters for good; also timers and posts that wait, wishes without an outcome, and outcomes without a wish."""
    from infra import terminal
    from infra.settings import Settings
    from policies.engine.operate import drop as run
    from policies.engine.operate import to_drop

    settings = Settings()
    found = to_drop(settings, idents)
    if not yes:
        endless = sorted({str(one.stream) for one in found if one.has_follow_up})
        lost = (
            f" {', '.join(endless)} will wait for an outcome in vain: neither `then` nor `otherwise` is sent."
            if endless
            else ""
        )
        if any(one.state == "sent" for one in found):
            lost += " What was sent may have been decided, and its outcome will lead to nothing."
        if any(one.state == "outcome" for one in found):
            lost += " If the wish of an outcome is read later, it will wait for the outcome in vain."
        typer.confirm(f"Drop {', '.join(one.id for one in found)}?{lost}", abort=True, err=True)
    run(settings, idents)
    terminal.show({"dropped": idents}, lambda _: [f"Dropped {', '.join(idents)}."], as_json=as_json)


def _row(one: WishNow) -> tuple[Any, ...]:
    from infra.terminal import Text

    return (
        one.id,
        Text(one.state, "red") if one.dead else one.state,
        one.kind,
        one.stream and f"{one.stream} {one.version}",
        one.target,
        one.type,
        one.wished_at and f"{one.wished_at:%F %T}",
        one.due and f"{one.due:%F %T}",
        one.attempts or None,
        one.dead,
    )


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
