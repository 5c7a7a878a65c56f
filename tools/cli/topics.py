"""`samefold topics`: commands, events and keys, as the broker has them."""

from itertools import groupby
from typing import Annotated, Any

import typer

from domain.engine.contexts import has_personal_fields
from infra.log import topics as kafka
from infra.log.acls import acls
from infra.settings import Settings
from policies.engine.policy import discover, has_public
from projections.engine.views.core_views import all_views
from tools.cli import Json
from tools.terminal import Output, plain, show, table

Prefix = Annotated[
    str | None, typer.Option(help="What principals' names begin with; by default SAMEFOLD_GROUP_PREFIX.")
]


def topics(
    create: Annotated[bool, typer.Option("--create", help="Make the topics that are missing.")] = False,
    acls: Annotated[
        bool, typer.Option("--acls", help="Print the least rights that each process needs, as commands of kafka-acls.")
    ] = False,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Show and check the topics: ids, partitions, offsets, and whether their settings keep the promises. Exit code 1 if not."""
    if acls:
        _print_acls(prefix, as_json=as_json)
        return
    settings = Settings()
    if create:
        _, events = kafka.ensure(settings)
        kafka.ensure_policies(settings)
        if has_public():
            kafka.ensure_public(settings, events)
        if settings.inbox_topic in _received(settings):
            kafka.ensure_inbox(settings)
        if has_personal_fields():
            kafka.ensure_keys(settings)
    log = [settings.commands_topic, settings.events_topic]
    found = [kafka.describe(settings, name) for name in log]
    others = [name for name in kafka.existing(settings, kafka.Admin(settings)) if name not in log]
    found += [kafka.describe(settings, name) for name in others]
    kafka.check(settings, log + others)

    def text(found: dict[str, Any]) -> Output:
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


def _received(settings: Settings) -> set[str]:
    """The topics of this Kafka that policies receive from. A source without settings may be a webhook: they hold secrets."""
    found = [settings.sources.get(policy.source.name) for policy in discover().values() if policy.source]
    return {(one and one.topic) or settings.inbox_topic for one in found if one is None or one.bootstrap is None}


def _print_acls(prefix: str | None, *, as_json: bool) -> None:
    settings = Settings()
    principals = prefix or settings.group_prefix
    agents, policies = {view.agent for view in all_views().values()}, {policy.agent for policy in discover().values()}
    kinds = {"public": has_public(), "personal": has_personal_fields()}
    found = [*acls(settings, agents, policies, sorted(_received(settings)), **kinds)]

    def text(_: object) -> Output:
        for process, rights in groupby(found, lambda one: one.process):
            yield f"# {process}"
            yield from (one.command(settings, principals) for one in rights)

    show([one._asdict() | {"principal": f"User:{principals}-{one.process}"} for one in found], text, as_json=as_json)
