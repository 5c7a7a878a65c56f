"""`samefold topics`: commands, events and keys, as the broker has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.cli import Json

if TYPE_CHECKING:
    from rich.table import Table


def register(app: typer.Typer) -> None:
    app.command()(topics)


def topics(
    create: Annotated[bool, typer.Option("--create", help="Make the topics that are missing.")] = False,
    as_json: Json = False,
) -> None:
    """Show and check the topics: ids, partitions, offsets, and whether their settings keep the promises. Exit code 1 if not."""
    from infra.domain_model.contexts import has_personal_fields
    from infra.log.topics import Topic, check, describe, ensure, ensure_keys, ensure_policies
    from infra.settings import Settings
    from infra.terminal import plain, show, table

    settings = Settings()
    found: tuple[Topic, ...]
    if create:
        found = ensure(settings)
        ensure_policies(settings)
    else:
        found = describe(settings, settings.commands_topic), describe(settings, settings.events_topic)
        check(settings)
    if has_personal_fields():
        found = *found, ensure_keys(settings, create=create)

    def text(found: dict[str, Any]) -> Iterator[Table]:
        rows = (
            (
                *(name, topic["id"], topic["partitions"]),
                f"{sum(topic['end'].values()) - sum(topic['first'].values())}",
                " ".join(str(end) for _, end in sorted(topic["end"].items())),
            )
            for name, topic in found.items()
        )
        yield table(("topic", "id", "partitions", "records", "ends"), rows)

    as_found = {topic["name"]: topic for topic in map(plain, found)}
    show(as_found, text, as_json=as_json)
