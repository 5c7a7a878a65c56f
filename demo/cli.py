"""`samefold demo`: a bank's transactions, processes killed on the way, and the proof that nothing was lost or doubled."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Annotated

import typer

LARGEST_LIMIT = Decimal(10) ** 12


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    data: Annotated[
        Path | None, typer.Option(help="Transactions to load (CSV, plain or .gz), instead of the ones at hand.")
    ] = None,
    overdraft_limit: Annotated[
        str, typer.Option(metavar="AMOUNT", help="How far an account may be overdrawn, e.g. 0 or 5000.00.")
    ] = "5000.00",
    kills: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            help="Of handlers, as many of agents, policies and the API. With 0, everything is sent at once.",
        ),
    ] = 5,
    no_release: Annotated[
        bool, typer.Option("--no-release", help="End with the proof: no next release, and no Spark.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Generate the transactions from this seed.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the proof as one JSON object, as the last line.")
    ] = False,
) -> None:
    """Load a bank's transactions and transfers, kill handlers, agents, policies and the API on the way, and prove that nothing was
    lost or doubled.

    Transfers that were refused or refunded count as failed.

    Then the next release of the code changes an event and a read model, is rolled out in parallel, rebuilds with Spark and takes
    over. Finally the log answers a question in SQL, which the file answers, too.

    Works in a folder `demo` of its own in the data folder; stops all that it starts. Exit code 1 if the proof does not hold.
    """
    from demo.report import Reporter, show_next, show_release
    from demo.run import Options, run
    from infra.processes.interrupts import one_interrupt
    from infra.settings import Settings
    from tools.terminal import print_json, stdout

    if data is not None and seed is not None:
        raise typer.BadParameter("--data and --seed exclude each other.")
    options = Options(data, _cents(overdraft_limit), kills, seed, release=not no_release)
    reporter = Reporter()
    stdout.print("[bold]Samefold's demo[/bold]")
    with one_interrupt(lambda: reporter.ending):
        result = run(Settings(), options, reporter)
    if result.released:
        show_release(result.released)
    show_next(result)
    if as_json:
        print_json(result.as_dict())
    if not result.holds:
        raise typer.Exit(1)


def _cents(amount: str) -> int:
    try:
        value = Decimal(amount)
        if 0 <= value <= LARGEST_LIMIT and value == value.quantize(Decimal("0.01"), ROUND_DOWN):
            return int(value * 100)
    except ArithmeticError:
        pass
    raise typer.BadParameter(f"--overdraft-limit: {amount!r} is not an amount such as 5000.00.")
