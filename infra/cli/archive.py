"""`samefold archive`: the log into Parquet files, and Kafka relieved of what they hold."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from infra.archive.trim import Cut

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
EngineName = Annotated[str, typer.Option("--engine", help="local, spark or auto.")]
Master = Annotated[str | None, typer.Option(help="Where Spark runs: spark://…, k8s://…, yarn, local[2].")]
Processes = Annotated[int | None, typer.Option(min=1, help="Worker processes of the local engine.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Move the log up to now into Parquet files; run again, it does only what is new.")
    group.callback(invoke_without_command=True)(archive)
    group.command()(status)
    group.command()(check)
    group.command()(trim)
    app.add_typer(group, name="archive")


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
    import time

    from infra.archive.jobs import archive_log
    from infra.settings import Settings
    from infra.terminal import Stages, print_json, stdout
    from spark_jobs.choose import engine_for

    settings = Settings()
    began = time.monotonic()
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=_quiet) as engines:
        done = archive_log(settings, engine_for=engines, progress=stages)
    seconds = time.monotonic() - began
    files, records, size = (sum(getattr(one, name) for one in done) for name in ("files", "records", "size"))
    if as_json:
        print_json(
            {
                "url": settings.archive,
                "files": files,
                "records": records,
                "bytes": size,
                "swept": sum(one.swept for one in done),
                "ms": round(1000 * seconds, 1),
                "partitions": {one.partition: {"first": one.first, "end": one.end} for one in done},
            }
        )
    elif not files:
        stdout.print("Nothing is new: all of the log is archived.")
    else:
        rate = records / seconds
        stdout.print(
            f"{records:,} records archived in {files:,} files, {_size(size)}, in {seconds:,.1f} s ({rate:,.0f}/s): "
            f"{settings.archive}",
            soft_wrap=True,
            markup=False,
        )


def status(as_json: Json = False) -> None:
    """What is archived, and what Kafka still holds."""
    from rich.table import Table

    from infra.archive.jobs import status as ask
    from infra.settings import Settings
    from infra.terminal import print_json, stdout

    settings = Settings()
    found = ask(settings)
    if as_json:
        named = {"partition", "first", "end", "archived", "files", "records"}
        partitions = [
            {name: getattr(one, name) for name in sorted(named)} | {"bytes": one.size, "until": _time(one.until_ms)}
            for one in found
        ]
        print_json({"url": settings.archive, "partitions": partitions})
        return
    table = Table("partition", "in the archive", "until", "files", "size", "in Kafka", "not archived")
    for one in found:
        archived = f"[0, {one.archived:,})"
        kafka = f"[{one.first:,}, {one.end:,})"
        new = f"{one.end - one.archived:,}"
        until = (_time(one.until_ms) or "")[:19].replace("T", " ")
        table.add_row(str(one.partition), archived, until, f"{one.files:,}", _size(one.size), kafka, new)
    stdout.print(table)
    stdout.print(settings.archive, soft_wrap=True, markup=False)


def check(
    engine: EngineName = "local", master: Master = None, processes: Processes = None, as_json: Json = False
) -> None:
    """Read every file again: hashes, records, and that they follow one another. Exit code 1 when anything differs."""
    from infra.archive.jobs import check_archive
    from infra.settings import Settings
    from infra.terminal import Stages, print_json, stdout
    from spark_jobs.choose import engine_for

    settings = Settings()
    with Stages(quiet=as_json) as stages, engine_for(engine, master, processes, tell=_quiet) as engines:
        found = check_archive(settings, engine_for=engines, progress=stages)
    files, records, size = (sum(getattr(one, name) for one in found) for name in ("files", "records", "size"))
    wrong = [sentence for one in found for sentence in one.wrong]
    if as_json:
        print_json({"url": settings.archive, "files": files, "records": records, "bytes": size, "wrong": wrong})
    else:
        for sentence in wrong:
            stdout.print(sentence, style="red", soft_wrap=True, markup=False)
        stdout.print(f"{files:,} files, {records:,} records, {_size(size)}: {len(wrong):,} files differ")
    if wrong:
        raise typer.Exit(1)


def trim(
    before: Annotated[
        datetime | None, typer.Option(help="Only records older than this, in UTC: 2026-01-31 or 2026-01-31T12:00:00.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Keep so many newest records of each partition.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Have Kafka delete what the archive holds and nobody is about to read; the archive's files are checked first.

    Never `commands`, and never beyond the slowest agent, a build that is made or could catch up, or what a restored database knows.
    """
    from datetime import UTC

    from infra.archive.jobs import plan_trim, trim_log
    from infra.settings import Settings
    from infra.terminal import Stages, print_json, stdout

    settings = Settings()
    topic, cuts = plan_trim(settings, before=before and before.replace(tzinfo=before.tzinfo or UTC), keep=keep)
    asked = [cut for cut in cuts if cut.records]
    if not as_json:
        _tell(topic.name, cuts)
    if asked and not yes:
        typer.confirm(f"Delete {sum(cut.records for cut in asked):,} records from Kafka?", abort=True, err=True)
    with Stages(quiet=as_json) as stages:
        done = trim_log(settings, topic, asked, progress=stages) if asked else []
    if as_json:
        held = {cut.partition: cut.held for cut in cuts if cut.held}
        print_json(
            {"records": sum(cut.records for cut in done), "to": {cut.partition: cut.to for cut in done}, "held": held}
        )
    elif done:
        stdout.print(f"{sum(cut.records for cut in done):,} records deleted from Kafka; the archive has them.")
    else:
        stdout.print("Nothing was deleted.")


def _tell(topic: str, cuts: list[Cut]) -> None:
    from infra.terminal import stdout

    for cut in cuts:
        what = f"[{cut.first:,}, {cut.to:,}) can go" if cut.records else "nothing can go"
        why = f"; held by {cut.held}" if cut.held else ""
        stdout.print(f"{topic}[{cut.partition}]: {what}{why}", soft_wrap=True, markup=False)


def _size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def _time(time_ms: int | None) -> str | None:
    from infra.log.records import time_of

    return None if time_ms is None else time_of(time_ms).isoformat()


def _quiet(_why: str) -> None:
    """Which engine it is was said by whoever asked for it."""
