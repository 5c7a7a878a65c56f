"""How the demo tells of the next release, for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from demo import tree
from demo.release import Released
from demo.report import grouped
from infra.terminal import stdout


def show_change(diff: str) -> None:
    """The heading: what the next release changes."""
    stdout.print(f"\n[bold]The next release[/bold]: '{tree.VIEW}' gets a column, and commands keep coming")
    for line in diff.splitlines():
        if not line.startswith("@@"):
            colour = "dim" if line.startswith(("---", "+++")) else "green" if line.startswith("+") else "red"
            stdout.print(f"    [{colour}]{escape(line)}[/{colour}]", soft_wrap=True)


def show_release(found: Released) -> None:
    """What became of it."""
    stdout.print()
    stdout.print(_table(found))
    for wrong in found.disagreements:
        stdout.print(f"  [red]{escape(wrong)}[/red]")
    stdout.print(
        f"\n[green]The next release has taken over.[/green] All of it took {sum(found.took.values()):.1f} s."
        if found.holds
        else "\n[red]The next release has not taken over as it should.[/red]"
    )
    stdout.print("The table of the past was made, and is dropped, with", soft_wrap=True)
    stdout.print(f"  {found.look_back}\n  {found.drop}", soft_wrap=True)


def _table(found: Released) -> Table:
    rebuilt, switch = found.rebuilt, found.rebuilt["switch"]
    took = f"Spark up in {rebuilt['start_up_ms'] / 1000:.1f} s, loaded in {rebuilt['load_ms'] / 1000:.1f} s"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("  commands", f"{found.sent:,}", "sent meanwhile")
    table.add_row("  lost", f"{found.lost:,}", "without a commit or an outcome")
    table.add_row("  doubled", f"{found.doubled:,}", "commits beyond one")
    table.add_row("  rebuilt", f"{rebuilt['events']:,}", f"events into {rebuilt['tables'][tree.VIEW]}: {took}")
    table.add_row("  caught up", f"{switch['commits']:,}", "commits that came meanwhile")
    table.add_row("  switched", f"{switch['switch_ms']:,.1f} ms", f"agents stood still for {switch['gap_ms']:,.1f} ms")
    table.add_row("  differences", f"{found.differences:,}", f"in {found.rows:,} rows, each folded again from the log")
    then = f"as of {found.as_of:%H:%M:%S} UTC, in {found.table_then}"
    table.add_row("  balance", grouped(found.now.balance), "now")
    table.add_row("", grouped(found.then.balance), then)
    table.add_row(f"  {tree.COLUMN}", grouped(found.now.spent), "now, in the new column")
    table.add_row("", grouped(found.then.spent), "then, when there was no such column")
    return table
