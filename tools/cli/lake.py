"""Tables of Parquet files, for analysts: one for each event class, and the datasets of spark_jobs/."""

from typing import Annotated, Any

import typer
from rich.filesize import decimal

from infra.settings import Settings
from tools.cli import Json, Master, Yes, confirm, new_app
from tools.terminal import Output, Stages, Text, show, table

_UPDATE, _DROP = "`samefold lake update`", "`samefold lake drop {}`"
_NEXT = {"missing": _UPDATE, "outdated": _UPDATE, "newer": f"run newer code, or {_DROP}", "gone": _DROP}
_NEXT |= {"of another topic": f"{_DROP}, then {_UPDATE}"}
"""What to do about datasets in a state."""
app = new_app(__doc__, no_args_is_help=True)
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Datasets; `events` is all event classes.")]


@app.command()
def update(names: Names = None, master: Master = None, as_json: Json = False) -> None:
    """Bring datasets up to the log's end, each in one step."""
    from spark_jobs.engine.lake import lake_session
    from spark_jobs.engine.lake import update as run

    settings = Settings()
    with lake_session(settings, master) as spark, Stages(quiet=as_json) as stages:
        done = run(settings, spark, names or [], progress=stages)

    def text(found: dict[str, Any]) -> Output:
        changed = [one for one in found["datasets"] if one["what"] != "unchanged"]
        for one in changed:
            yield f"{one['name']}: {one['what']}, {one['rows']:,} rows"
        yield f"{len(changed):,} datasets written, {len(found['datasets']) - len(changed):,} unchanged: {found['url']}"

    show({"url": settings.lake, "datasets": done}, text, as_json=as_json)


@app.command()
def status(as_json: Json = False) -> None:
    """What is there, and how far behind the log. With --json also where each dataset's files are."""
    from spark_jobs.engine.lake import status as run

    settings = Settings()

    def text(found: dict[str, Any]) -> Output:
        columns = ("dataset", "state", "rows", "files", "size", "records behind", "made")
        yield table(columns, map(_line, found["datasets"]))
        for state, step in _NEXT.items():
            if names := [one["name"] for one in found["datasets"] if one["state"] == state]:
                yield f"{state}: {step.format(' '.join(names))}"
        yield found["url"]

    show({"url": settings.lake, "datasets": list(run(settings))}, text, as_json=as_json)


def _line(one: dict[str, Any]) -> tuple[str, ...]:
    numbers = (f"{one['rows']:,}", f"{len(one['files']):,}", decimal(one["bytes"]), f"{one['behind']:,}")
    return one["name"], one["state"], *numbers, (one["at"] or "")[:19].replace("T", " ")


@app.command()
def verify(names: Names = None, master: Master = None, as_json: Json = False) -> None:
    """Compare datasets with the log up to the same positions. Exit code 1 if one differs."""
    from spark_jobs.engine.lake import lake_session
    from spark_jobs.engine.lake import verify as run

    settings = Settings()
    with lake_session(settings, master) as spark, Stages(quiet=as_json) as stages:
        done = run(settings, spark, names or [], progress=stages)
    wrong = sum(one["differs"] for one in done)

    def text(found: dict[str, Any]) -> Output:
        for one in found["datasets"]:
            if one["differs"]:
                yield Text(
                    f"{one['name']} differs: it has {one['rows']:,} rows, the log gives {one['expected']:,}", "red"
                )
        yield f"{len(found['datasets']):,} datasets compared, {found['differences']:,} differ"

    show({"differences": wrong, "datasets": done}, text, as_json=as_json)
    if wrong:
        raise typer.Exit(1)


@app.command()
def drop(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Datasets of the lake.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove datasets with their files. Those that the code has come back with the next update."""
    from spark_jobs.engine.lake import chosen
    from spark_jobs.engine.lake import drop as run
    from spark_jobs.engine.lake_files import Lake

    asked = chosen(names, Lake(Settings()).datasets(left=True))
    confirm(f"Remove {', '.join(asked)}?", yes=yes)
    run(Settings(), asked)
    show({"dropped": asked}, lambda found: [f"{', '.join(found['dropped'])}: dropped."], as_json=as_json)
