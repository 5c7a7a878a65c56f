"""What the demo prints: its steps, its proof, what became of the next release, what to try next."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote

from rich.markup import escape
from rich.table import Table

from demo import tree
from demo.crew import Role
from demo.question import QUESTION
from tools.terminal import stdout

if TYPE_CHECKING:
    from demo.load import Kill
    from demo.release import Released
    from demo.run import Result

SHOWN = 20


@dataclass(slots=True)
class Reporter:
    """Prints each step with its duration; `took` has them, in seconds."""

    took: dict[str, float] = field(default_factory=dict)
    ending: bool = False
    """Whether the demo is stopping its processes: Ctrl-C no longer interrupts it."""

    def done(self, what: str, seconds: float) -> None:
        self.took[what] = seconds
        stdout.print(f"  {escape(what):<64}[dim]{seconds:>8.2f} s[/dim]")

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.done(what, time.monotonic() - started)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ending = True


def show_proof(result: Result) -> None:
    """The proof, and what it rests on."""
    if result.loaded.kills:
        stdout.print("\n[bold]Killed with kill -9, in the midst of the load[/bold]")
        for kill in result.loaded.kills:
            stdout.print(_kill(kill))
    stdout.print(f"\n[bold]The proof[/bold]: {escape(result.bank.origin)}")
    stdout.print(_proof(result))
    verified = result.verified
    different = [
        f"{one.view}, {one.what}: {one.key} should be {one.expected} and is {one.found}"
        for one in chain(verified.positions, *(view.differences for view in verified.views.values()))
    ]
    for wrong in [*result.proof.disagreements, *result.transfers.violations, *different][:SHOWN]:
        stdout.print(f"  [red]{escape(wrong)}[/red]")
    if result.holds:
        took = f"Visible in {result.loaded.seconds:.1f} s."
        stdout.print(f"\n[green]Nothing was lost, nothing was applied twice.[/green] {took}")
        return
    short = [
        f"{done} of {result.options.kills} kills of the {role} took effect"
        for role in get_args(Role)
        if (done := result.loaded.effective(role)) != result.options.kills
    ]
    stdout.print(f"\n[red]The proof does not hold.[/red] {escape('; '.join(short))}")


def _kill(kill: Kill) -> str:
    back = "[red]not back at work[/red]"
    if kill.back_after_s is not None:
        back = f"back at work after {kill.back_after_s:.1f} s"
    hit = f"{kill.on_the_way:>6,} {'requests broken off' if kill.role == 'api' else 'commands on their way'}"
    return f"  at {kill.at:>4.0%}  {kill.child.name:<14} pid {kill.pid:<8}{hit}, {back}"


def _proof(result: Result) -> Table:
    proof, kills, moved = result.proof, result.as_dict()["kills"], result.transfers
    rows = sum(view.rows for view in result.verified.views.values())
    by_role = f"{kills['handler']} handlers, {kills['agent']} agents, {kills['policies']} policies, {kills['api']} times the API"
    ended = (
        f"completed, {moved.failed:,} failed or refunded, {moved.in_flight:,} in flight; in {moved.snapshots} snapshots"
    )
    return _grid(
        ("accounts", f"{proof.accounts:,}", "opened"),
        ("transactions", f"{proof.accepted:,}", f"accepted, {proof.rejected:,} rejected"),
        ("credits", grouped(proof.credits), ""),
        ("debits", grouped(proof.debits), ""),
        (
            "balance",
            grouped(proof.balance),
            "" if proof.disagreements else "by balances, statement, daily totals and file",
        ),
        ("statement", f"{proof.statement['within_0_50']:,}", "lines within 0.50 of the bank's own running balance,"),
        ("", f"{proof.statement['within_1_00']:,}", "more within 1.00,"),
        ("", f"{proof.statement['beyond']:,}", "beyond"),
        ("transfers", f"{moved.completed:,}", ended),
        *([("killed", str(sum(kills.values())), by_role)] if result.options.kills else []),
        (
            "over HTTP",
            f"{sum(proof.over_http.values()):,}",
            "of the commands, each answered with what is recorded of it",
        ),
        ("lost", f"{proof.lost:,}", "commands without a commit, an outcome, an answer or a line"),
        ("doubled", f"{proof.doubled:,}", "commits, outcomes or lines beyond one"),
        ("differences", f"{result.differences:,}", f"in {rows:,} rows, each folded again from the log"),
    )


def show_change(diff: str) -> None:
    """What the next release changes."""
    stdout.print(f"\n[bold]The next release[/bold]: {tree.EVENT} gets a currency, and commands keep coming")
    for line in diff.splitlines():
        if not line.startswith("@@"):
            colour = "dim" if line.startswith(("---", "+++")) else "green" if line.startswith("+") else "red"
            stdout.print(f"    [{colour}]{escape(line)}[/{colour}]", soft_wrap=True)


def show_release(found: Released) -> None:
    """What became of the next release."""
    rebuilt, switch = found.rebuilt, found.rebuilt["switch"]
    took = f"Spark up in {rebuilt['start_up_ms'] / 1000:.1f} s, loaded in {rebuilt['load_ms'] / 1000:.1f} s"
    stdout.print()
    stdout.print(
        _grid(
            ("commands", f"{found.sent:,}", "sent meanwhile"),
            ("lost", f"{found.lost:,}", "without a commit or an outcome"),
            ("doubled", f"{found.doubled:,}", "commits beyond one"),
            ("rebuilt", f"{rebuilt['events']:,}", f"events into {rebuilt['tables'][tree.VIEW]}: {took}"),
            ("caught up", f"{switch['commits']:,}", "commits that came meanwhile"),
            ("switched", f"{switch['switch_ms']:,.1f} ms", f"agents paused for {switch['gap_ms']:,.1f} ms"),
            ("differences", f"{found.differences:,}", f"in {found.rows:,} rows, each folded again from the log"),
            ("balance", grouped(found.now.balance), "now"),
            ("", grouped(found.then.balance), f"as of {found.as_of:%H:%M:%S} UTC, in {found.table_then}"),
            (tree.COLUMN, grouped(found.now.deposited), "now, in CZK, in the new column"),
            ("", grouped(found.then.deposited), "then, when deposits had no currency"),
        )
    )
    for label, event in zip(("stored before", "which is read as", "stored now"), found.bodies, strict=True):
        body = json.dumps(event["data"], ensure_ascii=False)
        stdout.print(
            f"  [dim]{label:<16}[/dim] {escape(event['type'])} {escape(body)}", soft_wrap=True, highlight=False
        )
    same = "the file gives the same answer" if found.years == found.expected_years else "the file gives another answer"
    stdout.print(f"\n[bold]A question to the log[/bold], in SQL, as of then; {same}")
    for line in QUESTION.splitlines():
        stdout.print(f"    [dim]{escape(line)}[/dim]", highlight=False)
    stdout.print(
        _grid(
            *((str(one.year), grouped(one.cents), f"{one.currency}, {one.deposits:,} deposits") for one in found.years)
        )
    )
    for wrong in found.disagreements:
        stdout.print(f"  [red]{escape(wrong)}[/red]")
    took = f"All of it took {sum(found.took.values()):.1f} s."
    stdout.print(
        f"\n[green]The next release has taken over.[/green] {took}"
        if found.holds
        else "\n[red]The next release has not taken over as it should.[/red]"
    )
    stdout.print("The table of the past was made, and is dropped, with", soft_wrap=True)
    stdout.print(f"  {found.look_back}\n  {found.drop}", soft_wrap=True)


def show_next(result: Result) -> None:
    """What to try next."""
    transactions = result.bank.transactions
    account = transactions[0].account if transactions else "1"
    day = max((transaction.on for transaction in transactions), default=date(1993, 1, 1))
    order = shlex.quote(f'{{"cents": 100, "on": "{day}"}}')
    where = quote(account, safe="")
    code = f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(result.folder / tree.FOLDER))}   # what is live is its code"
    lines = (
        f"export SAMEFOLD_DATA_DIR={shlex.quote(str(result.folder))}",
        *([code] if result.released else []),
        "samefold dev up                     # Kafka and PostgreSQL again, with all of this in them",
        f"samefold history accounts/{account:<10}# what happened to an account, from the log",
        "samefold views                      # the read models: versions, tables, positions",
        "samefold verify                     # compare them with a fold of the log",
        "samefold run all                    # handler, agent and API; Ctrl-C stops them. Meanwhile, from another terminal:",
        f"curl --json {order} {result.url}/accounts/{where}/deposit",
        f"curl {result.url}/views/balances/{where}",
        "samefold dev down",
    )
    stdout.print(f"\nAll is stopped; data and logs stay in {escape(str(result.folder))}.\nNext:", soft_wrap=True)
    for line in lines:
        stdout.print(f"  {line}", soft_wrap=True, markup=False)


def _grid(*rows: tuple[str, str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    for label, figure, what in rows:
        table.add_row(f"  {label}" if label else "", figure, escape(what))
    return table


def grouped(cents: int) -> str:
    """`-1,234.50`, exactly."""
    return f"{Decimal(cents).scaleb(-2):,}"
