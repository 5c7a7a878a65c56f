"""The record of released events and commands."""

from typing import Any

import typer

from domain.engine.contexts import untried
from infra.processes.time_limit import calls_limited
from infra.settings import Settings
from tools import release_check
from tools.cli import Json, new_app
from tools.golden_results import released_views
from tools.release_check import NotReleasable, Report
from tools.terminal import Output, Text, plain, show

app = new_app(__doc__, no_args_is_help=True)


@app.command()
def check(as_json: Json = False) -> None:
    """Compare events, commands, states, views and policies with what was released, and say what a deployment needs.

    Needs neither Kafka nor PostgreSQL. Exit code 1 where the code does not keep to a release: each refusal has the lines to write.
    """
    untried.set(True)
    with calls_limited(Settings().decide_limit_s):  # checks of commands run
        report = release_check.check(released_views())
    steps = report.steps if report.news and not report.refused else []
    show(plain(report) | {"steps": steps}, lambda _: _text(report), as_json=as_json)
    if report.refused:
        raise typer.Exit(1)


@app.command()
def release(as_json: Json = False) -> None:
    """Write the record of this code, domain/released/. Part of each release: commit it, then deploy."""
    from tools.migrations.unreleased import in_releases, stale
    from tools.testing.golden import golden

    untried.set(True)
    views = released_views()
    if others := stale(views, in_releases()):
        raise NotReleasable(
            f"Migrations make another table than the code declares: {', '.join(others)}.",
            "Run `samefold dev up`, then `samefold sync`, which writes them anew. Or raise VERSION of the view or state.",
        )
    with calls_limited(Settings().decide_limit_s):
        written = [f"domain/released/{file.name}" for file in release_check.release(views, golden)]
    show({"written": written}, _written, as_json=as_json)


def _text(report: Report) -> Output:
    for one in report.refused:
        yield Text(f"{one.what}: {'; '.join(one.why)}", "red")
        first, *rest = one.hint.splitlines()
        yield Text("\n".join([f"  → {first}", *(f"      {line}" for line in rest)]))
    if report.refused:
        return
    if not report.news:
        yield Text("Everything is as it was released.")
        return
    yield Text("Since the last release:")
    for line in report.news:
        yield Text(f"  {line}")
    yield Text("To deploy it, in this order:")
    for number, step in enumerate(report.steps, 1):
        yield Text(f"  {number}. {step}")


def _written(result: dict[str, Any]) -> Output:
    if result["written"]:
        yield Text("\n".join([*(f"Wrote {file}" for file in result["written"]), "Commit it with the release."]))
    else:
        yield Text("The record is up to date.")
