"""Move the log up to now into Parquet files; run again, it does only what is new."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from infra.archive import jobs
from infra.settings import Settings
from projections.engine.operate.trim import plan_trim, trim_log
from spark_jobs.engine.choose import engine_for
from tools.cli import EngineName, Json, Master, Processes, Yes, confirm, new_app
from tools.terminal import Output, Stages, Text, show, stdout, table

app = new_app(__doc__)


@app.callback(invoke_without_command=True)
def archive(
    context: typer.Context,
    engine: EngineName = "local",
    master: Master = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Move the log up to now into Parquet files; run again, it does only what is new. Kafka keeps all until `trim`."""
    if context.invoked_subcommand is not None:
        return
    settings = Settings()
    began = time.monotonic()
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=_quiet) as engines:
        done = jobs.archive_log(settings, engine_for=engines, progress=stages)
    result = _sums(settings.archive, done) | {
        "swept": sum(one.swept for one in done),
        "ms": round(1000 * (time.monotonic() - began), 1),
        "partitions": {one.partition: {"first": one.first, "end": one.end} for one in done},
    }

    def text(found: dict[str, Any]) -> Output:
        seconds = found["ms"] / 1000
        if not found["files"]:
            yield "Nothing is new: all of the log is archived."
        else:
            yield (
                f"{found['records']:,} records archived in {found['files']:,} files, {decimal(found['bytes'])}, "
                f"in {seconds:,.1f} s ({found['records'] / seconds:,.0f}/s): {found['url']}"
            )

    show(result, text, as_json=as_json)


@app.command()
def status(as_json: Json = False) -> None:
    """What is archived, and what Kafka still holds."""
    settings = Settings()
    partitions = list(jobs.status(settings))

    def text(found: dict[str, Any]) -> Output:
        columns = ("partition", "in the archive", "until", "files", "size", "in Kafka", "not archived")
        rows = (
            (
                f"{one['partition']}",
                f"[0, {one['archived']:,})",
                (one["until"] or "")[:19].replace("T", " "),
                f"{one['files']:,}",
                decimal(one["bytes"]),
                f"[{one['first']:,}, {one['end']:,})",
                f"{one['end'] - one['archived']:,}",
            )
            for one in found["partitions"]
        )
        yield table(columns, rows)
        yield found["url"]

    show({"url": settings.archive, "partitions": partitions}, text, as_json=as_json)


@app.command()
def check(
    engine: EngineName = "local", master: Master = None, processes: Processes = None, as_json: Json = False
) -> None:
    """Read every file again: hashes, records, and that they follow one another. Exit code 1 when anything differs."""
    settings = Settings()
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=_quiet) as engines:
        done = jobs.check_archive(settings, engine_for=engines, progress=stages)

    def text(found: dict[str, Any]) -> Output:
        yield from (Text(sentence, "red") for sentence in found["wrong"])
        yield (
            f"{found['files']:,} files, {found['records']:,} records, {decimal(found['bytes'])}: "
            f"{len(found['wrong']):,} files differ"
        )

    wrong = [sentence for one in done for sentence in one.wrong]
    show(_sums(settings.archive, done) | {"wrong": wrong}, text, as_json=as_json)
    if wrong:
        raise typer.Exit(1)


@app.command()
def trim(
    before: Annotated[
        datetime | None, typer.Option(help="Only records older than this, in UTC: 2026-01-31 or 2026-01-31T12:00:00.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Keep so many newest records of each partition.")] = 0,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete from Kafka what the archive holds and no reader still needs. Checks the archive's files first.

    Never `commands`, and never beyond the slowest agent, a build that is made or could catch up, or what a restored database knows.
    """
    settings = Settings()
    topic, cuts = plan_trim(settings, before=before and before.replace(tzinfo=before.tzinfo or UTC), keep=keep)
    asked = [cut for cut in cuts if cut.records]
    for cut in () if as_json else cuts:
        what = f"[{cut.first:,}, {cut.to:,}) can be deleted" if cut.records else "nothing can be deleted"
        why = f"; limited by {cut.held}" if cut.held else ""
        stdout.print(f"{topic.name}[{cut.partition}]: {what}{why}", soft_wrap=True, markup=False)
    confirm(f"Delete {sum(cut.records for cut in asked):,} records from Kafka?", yes=yes or not asked)
    with Stages(quiet=as_json) as stages:
        done = trim_log(settings, topic, asked, progress=stages) if asked else []
    result = {
        "records": sum(cut.records for cut in done),
        "to": {cut.partition: cut.to for cut in done},
        "held": {cut.partition: cut.held for cut in cuts if cut.held},
    }

    def text(found: dict[str, Any]) -> Output:
        deleted = f"{found['records']:,} records deleted from Kafka; the archive has them."
        yield deleted if found["to"] else "Nothing was deleted."

    show(result, text, as_json=as_json)


def _sums(url: str, done: list[Any]) -> dict[str, Any]:
    files, records, size = (sum(getattr(one, name) for one in done) for name in ("files", "records", "size"))
    return {"url": url, "files": files, "records": records, "bytes": size}


def _quiet(_why: str) -> None:
    """The engine was chosen by an option: nothing to print."""
