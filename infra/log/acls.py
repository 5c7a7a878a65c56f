"""The least rights that each process needs in Kafka, as commands of `kafka-acls`: one principal for each process."""

import shlex
from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeAlias

from infra.log import names
from infra.settings import Settings

Rights: TypeAlias = dict[str, tuple[str, ...]]
"""Operations by topic."""
Names: TypeAlias = Collection[str]


class Acl(NamedTuple):
    """What a process may do with a resource: `topic`, `group` or `transactional-id`."""

    process: str
    resource: str
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False

    def command(self, settings: Settings, principals: str) -> str:
        """`kafka-acls …`, for the principal `User:<principals>-<process>`."""
        what = ["--allow-principal", f"User:{principals}-{self.process}"]
        what += [part for operation in self.operations for part in ("--operation", operation)]
        what += [f"--{self.resource}", self.name, *(("--resource-pattern-type", "prefixed") if self.prefixed else ())]
        where = ["--bootstrap-server", settings.kafka_bootstrap or "HOST:PORT", "--command-config", "admin.properties"]
        return shlex.join(["kafka-acls", *where, "--add", *what])


def acls(
    settings: Settings, agents: Names, policies: Names, received: Names = (), *, public: bool, personal: bool
) -> Iterator[Acl]:
    """The rights of each process, in a service with these agents of views and of policies, which receive from these topics.

    `public`: something is published. `personal`: keys of personal values are in use.
    """
    prefix, commands, events = settings.group_prefix, settings.commands_topic, settings.events_topic
    start: Rights = {commands: ("Describe", "DescribeConfigs"), events: ("Describe", "DescribeConfigs")}
    log: Rights = {**start, events: ("Read", "DescribeConfigs")}
    append: Rights = {commands: ("Write", "DescribeConfigs")}
    decide: Rights = {commands: ("Read", "DescribeConfigs"), events: ("Read", "Write", "DescribeConfigs")}
    switches: Rights = {settings.policies_topic: ("Read", "Write", "DescribeConfigs")} if policies else {}
    publish: Rights = {settings.public_topic: ("Read", "Write", "DescribeConfigs")}
    keys: Rights = {settings.keys_topic: ("Read", "Write", "DescribeConfigs")} if personal else {}
    receive: Rights = {
        name: ("Read", *(("DescribeConfigs",) if name == settings.inbox_topic else ())) for name in received
    }
    inbox: Rights = {name: ("Write", "DescribeConfigs") for name in received if name == settings.inbox_topic}
    handlers = f"{names.handlers(prefix)}."

    topics: dict[str, Rights] = {
        "handler": decide,
        "agent": log,
        "policies": log | append | switches | keys | receive if policies else {},
        "publisher": log | publish if public else {},
        "api": start | append | keys | inbox,
        "exporter": {events: ("Describe",)},
        "send": start | append | keys,
        "operator": log | switches | keys | receive,
        "archive": {events: ("Read", "Delete")},
    }
    groups: dict[str, list[tuple[str, str, bool]]] = {
        "handler": [("Read", handlers, True)],
        "agent": [("Read", names.agents(prefix, agent), True) for agent in sorted(agents)],
        "policies": [("Read", names.agents(prefix, agent), True) for agent in sorted(policies)],
        "publisher": [("Read", names.publisher(prefix), False)],
        "api": [("Describe", handlers, True)],
        # without it, a check that no other release's handlers run would see none
        "operator": [("Describe", handlers, True)],
    }
    for process, allowed in topics.items():
        for name, operations in allowed.items():
            yield Acl(process, "topic", name, operations)
        if not allowed:
            continue
        for right, name, prefixed in groups.get(process, []):
            yield Acl(process, "group", name, (right,), prefixed)
        if any("Read" in operations for operations in allowed.values()):
            yield Acl(process, "group", names.readers(prefix), ("Describe",))
        if process == "publisher":
            yield Acl(process, "transactional-id", names.transactions(prefix), ("Describe", "Write"), True)
    for name in {**start, **topics["policies"], **topics["publisher"], **topics["api"]}:
        if name in settings.topics:  # others make what only policies receive from
            yield Acl("admin", "topic", name, ("Create", "Describe", "DescribeConfigs"))
