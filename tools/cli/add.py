"""Write a new part of the service, with its test, and print the next steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tools.cli import new_app
from tools.scaffold.parts import Kind, Parts, Written

Context = Annotated[str | None, typer.Option(help="The context that it belongs to; needed if there are several.")]
Fields = Annotated[
    list[str] | None, typer.Argument(metavar="[FIELD:TYPE]…", help="Its fields, such as guest:Text nights:int.")
]


app = new_app(__doc__, no_args_is_help=True)


@app.command()
def context(name: Annotated[str, typer.Argument(help="In lower case and the plural, such as rooms.")]) -> None:
    """Write a bounded context, domain/NAME.py: an event, a command and a refusal to rename."""
    _print(_parts().context(name))


@app.command()
def event(
    name: Annotated[str, typer.Argument(help="What happened, such as RoomBooked.")],
    fields: Fields = None,
    context: Context = None,
) -> None:
    """Write an event into its context, with a case in `evolve`."""
    _print(_parts().event(name, context, fields or []))


@app.command()
def command(
    name: Annotated[str, typer.Argument(help="What a client wants to happen, such as BookRoom.")],
    fields: Fields = None,
    event: Annotated[
        str | None, typer.Option(help="The event that it leads to; the command gets that event's fields.")
    ] = None,
    context: Context = None,
) -> None:
    """Write a command into its context, with a case in `decide`."""
    _print(_parts().command(name, context, fields or [], event))


@app.command()
def view(
    name: Annotated[str, typer.Argument(help="In lower case, such as free_rooms.")],
    kind: Annotated[
        Kind, typer.Option(help="A row per stream, lines that are only added, or sums over all streams.")
    ] = Kind.ENTITY,
    context: Context = None,
) -> None:
    """Write a view of a context, projections/NAME.py."""
    _print(_parts().view(name, context, kind))


@app.command()
def query(name: Annotated[str, typer.Argument(help="In lower case, such as largest_orders.")]) -> None:
    """Write a query over views, projections/queries/NAME.py."""
    _print(_parts().query(name))


@app.command()
def policy(
    name: Annotated[str, typer.Argument(help="In lower case, such as reminders.")], context: Context = None
) -> None:
    """Write a policy, policies/NAME.py: what follows from which event of a context."""
    _print(_parts().policy(name, context))


@app.command()
def source(
    name: Annotated[str, typer.Argument(help="Who sends the messages, in lower case, such as billing.")],
    context: Context = None,
) -> None:
    """Write a source, policies/from_NAME.py: what follows in a context from the messages of another service."""
    _print(_parts().source(name, context))


@app.command()
def dataset(
    name: Annotated[str, typer.Argument(help="In lower case, such as nights_by_month.")], context: Context = None
) -> None:
    """Write a dataset of the lake, spark_jobs/NAME.py: a table of an event of a context, for analysts."""
    _print(_parts().dataset(name, context))


def _parts() -> Parts:
    return Parts(Path(__file__).parents[2])


def _print(written: Written) -> None:
    for file in written.files:
        typer.echo(f"wrote  {file}")
    typer.echo("\nNext:")
    for number, step in enumerate(written.next, 1):
        typer.echo(f"  {number}. {step}")
