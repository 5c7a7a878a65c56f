"""`samefold doctor`: what is there, what is missing, and the cure."""

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False) -> None:
    """Look at all that Samefold needs. Exit code 1 if something is missing; changes nothing."""
    from infra.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps({"ok": all(f.ok for f in findings), "findings": [f.as_dict() for f in findings]}))
    else:
        for finding in findings:
            mark = typer.style("ok", fg="green") if finding.ok else typer.style("no", fg="red")
            typer.echo(f"{mark}  {finding.name:<22}{finding.found}")
            if finding.cure:
                typer.echo(f"    {'':<22}→ {finding.cure}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
