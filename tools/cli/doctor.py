"""`samefold doctor`: what is installed, what is missing, and how to get it."""

from typing import Any

import typer

from tools.cli import Json
from tools.doctor import examine
from tools.terminal import Output, Text, show


def doctor(as_json: Json = False) -> None:
    """Check all that Samefold needs. Exit code 1 if something is missing; changes nothing."""

    def text(found: dict[str, Any]) -> Output:
        for one in found["findings"]:
            line = Text(f"{'ok' if one.ok else 'no'}  {one.name:<22}{one.found}")
            line.stylize("green" if one.ok else "red", 0, 2)
            yield line
            if one.hint:
                yield Text(f"    {'':<22}→ {one.hint}")

    findings = examine()
    ok = all(finding.ok for finding in findings)
    show({"ok": ok, "findings": findings}, text, as_json=as_json)
    if not ok:
        raise typer.Exit(1)
