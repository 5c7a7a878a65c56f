"""`samefold run handler | agent | all`: the long-running processes, supervised."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from infra.supervisor import Child

run = typer.Typer(help="Run handlers and agents; they are started again when they end. One Ctrl-C stops all cleanly.")

Count = Annotated[int, typer.Option("--count", "-n", min=1, max=64, help="How many processes.")]


def register(app: typer.Typer) -> None:
    app.add_typer(run, name="run")


@run.command()
def handler(
    count: Count = 1,
    name: Annotated[
        str, typer.Option(help="What the names of the processes begin with; unique among all machines.")
    ] = "",
) -> None:
    """Run handlers: they decide commands and append the commits. Several share the partitions."""
    from infra.supervisor import handlers

    _supervise(handlers(count, name or _host()))


@run.command()
def agent(
    count: Count = 1,
    agent: Annotated[str, typer.Option("--agent", help="The group of views to keep.")] = "core",
) -> None:
    """Run agents: they fold the log into the read models. Several share the partitions."""
    from infra.supervisor import agents

    _supervise(agents(count, agent))


@run.command("all")
def run_all(
    handler_count: Annotated[int, typer.Option("--handlers", min=0, max=64)] = 1,
    agent_count: Annotated[int, typer.Option("--agents", min=0, max=64)] = 1,
) -> None:
    """Run handlers, and agents for every agent that a view names."""
    from infra.supervisor import agents, handlers
    from projections.engine.system import all_views

    names = sorted({view.agent for view in all_views().values()})
    _supervise([*handlers(handler_count, _host()), *(child for name in names for child in agents(agent_count, name))])


def _supervise(children: list[Child]) -> None:
    from infra import logs
    from infra.settings import Settings
    from infra.supervisor import Supervisor

    settings = Settings()
    # refuse at once what every child would refuse
    _ = settings.kafka, settings.database
    logs.configure(settings.log_level)
    supervisor = Supervisor(children)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    supervisor.run()


def _host() -> str:
    import socket

    return socket.gethostname()
