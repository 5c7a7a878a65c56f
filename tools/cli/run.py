"""Run handlers, agents, policies and the HTTP API; they are restarted when they end. One Ctrl-C stops all cleanly."""

import logging
import signal
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from api.safe_start import require_safe
from domain.engine.contexts import has_personal_fields
from domain.engine.personal.masters import masters
from infra.database import revisions
from infra.observability import logs
from infra.processes import supervisor
from infra.processes.interrupts import ending_signals
from infra.processes.supervisor import Child, Supervisor
from infra.settings import Settings, service_links
from infra.tls import unprotected
from policies.engine.inbox import hooks_of
from policies.engine.policy import discover, has_public
from projections.engine.views.core_views import all_views
from tools.cli import new_app

log = logging.getLogger(__name__)

app = new_app(__doc__, no_args_is_help=True)


IDLE = "nothing runs until you write one and start this again."
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


@app.command()
def handler(count: Count = 1, name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run handlers: they decide commands and append the commits. Several share the partitions."""
    _supervise(name, metrics_port, lambda place: supervisor.handlers(count, place))


@app.command()
def agent(
    count: Count = 1,
    name: Name = "",
    agent: Annotated[str, typer.Option("--agent", help="The agent, which is a group of views.")] = "core",
    on: Annotated[
        Literal["faust", "spark"], typer.Option(help="What runs the agent; either may take over at any moment.")
    ] = "faust",
    master: Annotated[str, typer.Option(help="Spark's master, for `--on spark`.")] = "local[*,4]",
    metrics_port: MetricsPort = None,
) -> None:
    """Run agents: they fold the log into the read models. Several share the partitions."""
    if on == "spark" and count > 1:
        raise typer.BadParameter(
            "one query has a task for each partition: give it a larger --master", param_hint="--count"
        )
    if agent not in (known := _agents()):
        raise typer.BadParameter(f"no view names agent '{agent}': give one of {', '.join(known)}", param_hint="--agent")
    _supervise(
        name,
        metrics_port,
        lambda place: (
            supervisor.agents(count, place, agent) if on == "faust" else [supervisor.spark_agent(place, agent, master)]
        ),
    )


@app.command()
def policies(count: Count = 1, name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run policies: they react to events with commands and webhooks. Each process runs all; several share the partitions."""
    if not discover():
        typer.echo(f"policies/ holds no policy; {IDLE} `samefold add policy NAME` writes one.", err=True)
        count = 0
    _supervise(name, metrics_port, lambda place: supervisor.policies(count, place))


@app.command()
def publisher(name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Run the publisher: it writes what policies/public.py names into the public topic."""
    there = has_public()
    if not there:
        typer.echo(f"There is no policies/public.py; {IDLE} docs/public-events.md shows one.", err=True)
    _supervise(name, metrics_port, lambda place: [supervisor.publisher(place)] if there else [])


@app.command()
def api(host: Host = None, port: Port = None, name: Name = "") -> None:
    """Run the HTTP API: commands in, their outcomes and the read models out."""
    _require_safe(host)
    _supervise(name, None, lambda place: [supervisor.api(place, host, port)])


@app.command()
def exporter(name: Name = "", metrics_port: MetricsPort = None) -> None:
    """Expose the agents' lag and parked streams as metrics. The API exposes them too."""
    _supervise(name, metrics_port, lambda place: [supervisor.exporter(place)], needs_port=True)


@app.command("all")
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
    if with_api:
        _require_safe(host)
    names, with_policies, with_public = _agents(), bool(discover()), has_public()
    _supervise(
        name,
        metrics_port,
        lambda place: [
            *supervisor.handlers(handler_count, place),
            *(child for agent in names for child in supervisor.agents(agent_count, place, agent)),
            *(supervisor.policies(policy_count, place) if with_policies else ()),
            *((supervisor.publisher(place),) if with_public else ()),
            *((supervisor.api(place, host, port),) if with_api else ()),
        ],
    )


def _agents() -> list[str]:
    """The agents that views name."""
    return sorted({view.agent for view in all_views().values()})


def _require_safe(host: str | None) -> None:
    """Refuse at once what the API would refuse each time that it is started."""
    settings = Settings()
    require_safe(settings, host or settings.api_host)
    hooks_of(settings)


def _supervise(
    name: str, metrics_port: int | None, children: Callable[[str], list[Child]], *, needs_port: bool = False
) -> None:
    settings = Settings(**({} if metrics_port is None else {"metrics_port": metrics_port}))
    if needs_port and settings.metrics_port is None:
        raise typer.BadParameter("say where, or set SAMEFOLD_METRICS_PORT", param_hint="--metrics-port")
    # refuse at once what every child would refuse
    _ = settings.kafka, settings.database, revisions.heads()
    logs.configure(settings.log_level, settings.log_format)
    if links := service_links():
        log.warning("left out, because they are a Service's of Kubernetes, and no settings: %s", ", ".join(links))
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
    with supervisor.place(settings.group_prefix) as here:
        supervised = Supervisor(children(name or here), settings.secret_files(), metrics_port=settings.metrics_port)
        for number in ending_signals():
            signal.signal(number, lambda *_: supervised.stop())
        supervised.run()
