"""`samefold run handler | agent | policies | publisher | api | all`: the long-running processes, supervised."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from infra.processes.supervisor import Child

log = logging.getLogger(__name__)

run = typer.Typer(
    help="Run handlers, agents, policies and the HTTP API; they are restarted when they end. One Ctrl-C stops all cleanly.",
    no_args_is_help=True,
)


class On(StrEnum):
    """What runs an agent."""

    FAUST = "faust"
    SPARK = "spark"


IDLE = "nothing runs until there is one and this is started again."
"""Not an error: a container that ended would be started again and again."""

Count = Annotated[int, typer.Option("--count", "-n", min=1, max=64, help="How many processes.")]
Host = Annotated[str | None, typer.Option(help="The address that the API listens on; by default SAMEFOLD_API_HOST.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65_535, help="Its port, 0 for a free one; by default SAMEFOLD_API_PORT.")
]
Name = Annotated[
    str,
    typer.Option(help="What the processes' names begin with, unique among all machines; by default the host's name."),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65_535,
        help="Expose metrics from this port on, one port per process; by default SAMEFOLD_METRICS_PORT.",
    ),
]


def register(app: typer.Typer) -> None:
    app.add_typer(run, name="run")


@run.command()
def handler(count: Count = 1, name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run handlers: they decide commands and append the commits. Several share the partitions."""
    from infra.processes.supervisor import handlers

    _supervise(name, metrics_port, lambda place: handlers(count, place))


@run.command()
def agent(
    count: Count = 1,
    name: Name = "",
    agent: Annotated[str, typer.Option("--agent", help="The group of views to keep.")] = "core",
    on: Annotated[On, typer.Option(help="What runs it; they may take over from each other at any moment.")] = On.FAUST,
    master: Annotated[str, typer.Option(help="Spark's master, for `--on spark`.")] = "local[*,4]",
    metrics_port: MetricsPort = None,
) -> None:
    """Run agents: they fold the log into the read models. Several share the partitions."""
    from infra.processes.supervisor import agents, spark_agent

    if on is On.SPARK and count > 1:
        raise typer.BadParameter(
            "one query has a task for each partition: give it a larger --master", param_hint="--count"
        )
    if agent not in (known := _agents()):
        raise typer.BadParameter(f"no view names agent '{agent}': give one of {', '.join(known)}", param_hint="--agent")
    _supervise(
        name,
        metrics_port,
        lambda place: agents(count, place, agent) if on is On.FAUST else [spark_agent(place, agent, master)],
    )


@run.command()
def policies(count: Count = 1, name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run policies: they react to events with commands and webhooks. Each process runs all; several share the partitions."""
    from infra.processes.supervisor import policies

    if not _has_policies():
        typer.echo(f"policies/ holds no policy; {IDLE} `samefold add policy NAME` writes one.", err=True)
        count = 0
    _supervise(name, metrics_port, lambda place: policies(count, place))


@run.command()
def publisher(name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run the publisher: it writes what policies/public.py names into the public topic."""
    from infra.processes.supervisor import publisher
    from policies.engine.policy import has_public

    there = has_public()
    if not there:
        typer.echo(f"There is no policies/public.py; {IDLE} docs/policies.md shows one.", err=True)
    _supervise(name, metrics_port, lambda place: [publisher(place)] if there else [])


@run.command()
def api(host: Host = None, port: Port = None, name: Name = "") -> None:
    """Run the HTTP API: commands in, their outcomes and the read models out."""
    from infra.processes.supervisor import api

    _require_safe(host)
    _supervise(name, None, lambda place: [api(place, host, port)])


@run.command()
def exporter(name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Expose the agents' lag and parked streams as metrics. The API exposes them too."""
    from infra.processes.supervisor import exporter

    _supervise(name, metrics_port, lambda place: [exporter(place)], needs_port=True)


@run.command("all")
def run_all(
    handler_count: Annotated[int, typer.Option("--handlers", min=0, max=64, help="How many handlers.")] = 1,
    agent_count: Annotated[int, typer.Option("--agents", min=0, max=64, help="How many processes of each agent.")] = 1,
    policy_count: Annotated[
        int, typer.Option("--policies", min=0, max=64, help="How many processes of the policies, if there are any.")
    ] = 1,
    with_api: Annotated[bool, typer.Option("--api/--no-api", help="Whether to run the HTTP API too.")] = True,
    host: Host = None,
    port: Port = None,
    name: Name = "",
    metrics_port: MetricsPort = None,
) -> None:
    """Run handlers, agents for every agent that a view names, policies and publisher if there are any, and the HTTP API."""
    from infra.processes.supervisor import agents, api, handlers, policies, publisher
    from policies.engine.policy import has_public

    if with_api:
        _require_safe(host)
    names, with_policies, with_public = _agents(), _has_policies(), has_public()
    _supervise(
        name,
        metrics_port,
        lambda place: [
            *handlers(handler_count, place),
            *(child for agent in names for child in agents(agent_count, place, agent)),
            *(policies(policy_count, place) if with_policies else ()),
            *((publisher(place),) if with_public else ()),
            *((api(place, host, port),) if with_api else ()),
        ],
    )


def _agents() -> list[str]:
    """The agents that views name."""
    from projections.engine.views.core_views import all_views

    return sorted({view.agent for view in all_views().values()})


def _has_policies() -> bool:
    """Raises BadPolicy, as every process of theirs would."""
    from policies.engine.policy import discover

    return bool(discover())


def _require_safe(host: str | None) -> None:
    """Refuse at once what the API would refuse each time that it is started."""
    from api.safe_start import require_safe
    from infra.settings import Settings

    settings = Settings()
    require_safe(settings, host or settings.api_host)


def _supervise(
    name: str, metrics_port: int | None, children: Callable[[str], list[Child]], *, needs_port: bool = False
) -> None:
    from domain.engine.contexts import has_personal_fields
    from domain.engine.personal.masters import masters
    from infra.database import revisions
    from infra.observability import logs
    from infra.processes.interrupts import ending_signals
    from infra.processes.supervisor import Supervisor, place
    from infra.settings import Settings
    from infra.tls import unprotected

    settings = Settings(**({} if metrics_port is None else {"metrics_port": metrics_port}))
    if needs_port and settings.metrics_port is None:
        raise typer.BadParameter("say where, or set SAMEFOLD_METRICS_PORT", param_hint="--metrics-port")
    # refuse at once what every child would refuse
    _ = settings.kafka, settings.database, revisions.heads()
    logs.configure(settings.log_level, settings.log_format)
    for where in unprotected(settings):
        log.warning("%s: docs/on-the-wire.md", where)
    for file in settings.exposed_files():
        log.warning("every user of this machine may read the secret in %s", file)
    modules = {child.module for child in children(name)}
    if "policies.engine.process" in modules:
        settings.require_webhooks_read()
    opening = {"api", "policies.engine.process"} if settings.webhooks else {"api"}
    if modules & opening and has_personal_fields():
        masters(settings)
    with place(settings.group_prefix) as here:
        supervisor = Supervisor(children(name or here), settings.secret_files(), metrics_port=settings.metrics_port)
        for number in ending_signals():
            signal.signal(number, lambda *_: supervisor.stop())
        supervisor.run()
