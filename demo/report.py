"""How the demo tells what it found, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from itertools import chain
from typing import get_args
from urllib.parse import quote

from rich.markup import escape
from rich.table import Table

from demo.crew import Role
from demo.load import Kill
from demo.release import FOLDER
from demo.run import Result
from infra.terminal import stdout

SHOWN = 20


def told(what: str, seconds: float) -> None:
    """One line for what is done."""
    stdout.print(f"  {escape(what):<64}[dim]{seconds:>8.2f} s[/dim]")


def show_proof(result: Result) -> None:
    """The proof, and what it rests on."""
    if result.loaded.kills:
        stdout.print("\n[bold]Killed with kill -9, in the midst of the load[/bold]")
        for kill in result.loaded.kills:
            stdout.print(_kill(kill))
    stdout.print(f"\n[bold]The proof[/bold]: {escape(result.bank.origin)}")
    stdout.print(_proof(result))
    for wrong in [*result.proof.disagreements, *_differences(result)][:SHOWN]:
        stdout.print(f"  [red]{escape(wrong)}[/red]")
    stdout.print(_verdict(result))


def show_next(result: Result) -> None:
    """What to try next."""
    stdout.print(_next(result), soft_wrap=True)


def _kill(kill: Kill) -> str:
    back = (
        "[red]not back at work[/red]" if kill.back_after_s is None else f"back at work after {kill.back_after_s:.1f} s"
    )
    hit = f"{kill.on_the_way:>6,} {'requests broken off' if kill.role == 'api' else 'commands on their way'}"
    return f"  at {kill.at:>4.0%}  {kill.child.name:<14} pid {kill.pid:<8}{hit}, {back}"


def _proof(result: Result) -> Table:
    found, proof = result.as_dict(), result.proof
    rows = sum(view.rows for view in result.verified.views.values())
    statement, kills = found["statement"], found["kills"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("  accounts", f"{proof.accounts:,}", "opened")
    table.add_row("  transactions", f"{proof.accepted:,}", f"accepted, {proof.rejected:,} rejected")
    table.add_row("  credits", grouped(proof.credits), "")
    table.add_row("  debits", grouped(proof.debits), "")
    table.add_row(
        "  balance",
        grouped(proof.balance),
        "" if proof.disagreements else "by balances, statement, daily totals and file",
    )
    table.add_row(
        "  statement", f"{statement['within_0_50']:,}", "lines within 0.50 of the bank's own running balance,"
    )
    table.add_row("", f"{statement['within_1_00']:,}", "more within 1.00,")
    table.add_row("", f"{statement['beyond']:,}", "beyond")
    if result.options.kills:
        by_role = f"{kills['handler']} handlers, {kills['agent']} agents and {kills['api']} times the API"
        table.add_row("  killed", str(sum(kills.values())), by_role)
    answered = sum(proof.over_http.values())
    table.add_row("  over HTTP", f"{answered:,}", "of the commands, each answered with what is recorded of it")
    table.add_row("  lost", f"{proof.lost:,}", "commands without a commit, an outcome, an answer or a line")
    table.add_row("  doubled", f"{proof.doubled:,}", "commits, outcomes or lines beyond one")
    table.add_row("  differences", f"{result.differences:,}", f"in {rows:,} rows, each folded again from the log")
    return table


def _differences(result: Result) -> Iterator[str]:
    verified = result.verified
    for one in chain(verified.positions, *(view.differences for view in verified.views.values())):
        yield f"{one.view}, {one.what}: {one.key} should be {one.expected} and is {one.found}"


def grouped(cents: int) -> str:
    """`-1,234.50`, exactly."""
    return f"{Decimal(cents).scaleb(-2):,}"


def _verdict(result: Result) -> str:
    if result.holds:
        return (
            f"\n[green]Nothing was lost, nothing was applied twice.[/green] Visible in {result.loaded.seconds:.1f} s."
        )
    asked = result.options.kills
    short = [
        f"{done} of {asked} kills of the {role} took effect"
        for role in get_args(Role)
        if (done := result.as_dict()["kills"][role]) != asked
    ]
    return f"\n[red]The proof does not hold.[/red] {escape('; '.join(short))}"


def _asked(result: Result, account: str) -> tuple[str, str]:
    """A command and a read over HTTP, to be typed."""
    day = max((transaction.on for transaction in result.bank.transactions), default=date(1993, 1, 1))
    body = f'{{"cents": 100, "on": "{day}"}}'
    return (
        f"curl --json {shlex.quote(body)} {result.url}/accounts/{quote(account, safe='')}/deposit",
        f"curl {result.url}/views/balances/{quote(account, safe='')}",
    )


def _next(result: Result) -> str:
    account = result.bank.transactions[0].account if result.bank.transactions else "1"
    lines = (
        f"export SAMEFOLD_DATA_DIR={shlex.quote(str(result.folder))}",
        *(
            [
                f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(result.folder / FOLDER))}   # what is live is its code"
            ]
            if result.released
            else []
        ),
        "samefold dev up                     # Kafka and PostgreSQL again, with all of this in them",
        f"samefold history accounts/{account:<10}# what happened to an account, from the log",
        "samefold views                      # the read models: versions, tables, positions",
        "samefold verify                     # compare them with a fold of the log",
        "samefold run all                    # handler, agent and API; Ctrl-C stops them. Meanwhile, from another terminal:",
        *_asked(result, account),
        "samefold dev down",
    )
    return "\n".join(
        (
            "",
            f"All is stopped; data and logs stay in {escape(str(result.folder))}.",
            "Next:",
            *(f"  {escape(line)}" for line in lines),
        )
    )
