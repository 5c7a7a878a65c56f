"""`samefold topics`: the two topics, as the broker has them."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(topics)


def topics(
    create: Annotated[bool, typer.Option("--create", help="Make the topics that are missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show and check the topics: ids, partitions, offsets, and whether their settings keep the promises. Exit code 1 if not."""
    from rich.table import Table

    from infra.log.topics import check, describe, ensure
    from infra.settings import Settings
    from infra.terminal import print_json, stdout

    settings = Settings()
    if create:
        found = ensure(settings)
    else:
        found = describe(settings, settings.commands_topic), describe(settings, settings.events_topic)
        check(settings)
    if as_json:
        print_json(
            {
                topic.name: {"id": topic.id, "partitions": topic.partitions, "first": topic.first, "end": topic.end}
                for topic in found
            }
        )
        return
    table = Table("topic", "id", "partitions", "records", "ends")
    for topic in found:
        held = sum(topic.end[p] - topic.first[p] for p in topic.end)
        table.add_row(
            topic.name,
            topic.id,
            str(topic.partitions),
            str(held),
            " ".join(str(topic.end[p]) for p in sorted(topic.end)),
        )
    stdout.print(table)
