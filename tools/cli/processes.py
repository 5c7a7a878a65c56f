"""`samefold processes`: what the processes of policies wait for, and since when."""

from typing import Annotated, Any

import typer

from infra.settings import Settings
from policies.engine import operate
from tools.cli import Json
from tools.terminal import Output, show, table


def processes(
    policy: Annotated[str | None, typer.Option(help="Of this policy only.")] = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only those that need an operator.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the oldest ones.")] = 100,
    as_json: Json = False,
) -> None:
    """What policies wait for, by the stream whose events they react to."""
    settings = Settings()
    found = operate.processes(settings, policy, stuck=stuck, limit=limit)
    if policy is not None and not found:
        operate.require_known(settings, policy)

    def text(_: Any) -> Output:
        if not found:
            yield "No process is stuck." if stuck else "No process waits for anything."
            yield "Policies that stand still are in `samefold policies` and `samefold doctor`."
            return
        rows = ((one.policy, one.stream, one.waits, *_plainly(wait)) for one in found for wait in one.first)
        yield table(("policy", "stream", "waits", "since", "for", "why"), rows)
        if len(found) == limit:
            yield "There may be more: --limit"
        if any(one.stuck for one in found):
            yield "Dead letters: `samefold outbox retry ID` or `drop ID`. Parked streams: `samefold parked show VIEW STREAM`."

    show({"processes": found}, text, as_json=as_json)


def _plainly(wait: dict[str, Any]) -> tuple[str | None, ...]:
    parts = wait["what"], wait["until"] and f"until {wait['until']}", wait["type"], wait["target"], wait["id"]
    return wait["since"], " ".join(filter(None, parts)), wait["why"]
