"""How commands print: results to standard output, progress and errors to standard error."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeAlias, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as RichText

from domain.engine.personal.tokens import key_ids, opened_value
from infra.errors import printable
from infra.settings import Settings

T = TypeVar("T")
Output: TypeAlias = Iterator[RenderableType]
"""What a command prints for people, piece by piece."""

# no terminal, no terminal's width: tables in a pipe or a file keep their lines whole
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
stderr = Console(stderr=True, highlight=False)


class Text(RichText):
    """A text, with what is not printable escaped: a name or a value of the log may hold what a terminal would obey."""

    def __init__(self, text: str = "", style: str = "") -> None:
        super().__init__(printable(text, keep="\n"), style)


def show(result: Any, text: Callable[[Any], Iterable[RenderableType]], *, as_json: bool) -> None:
    """Print a command's result as one line of JSON, or as text, without interpreting markup."""
    if as_json:
        print_json(result)
        return
    for one in text(result):
        stdout.print(Text(one) if isinstance(one, str) else one, soft_wrap=isinstance(one, str | Text))


def print_json(value: Any) -> None:
    """One line of JSON, whatever the terminal's width."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False, default=str) + "\n")


def plain(value: Any) -> Any:
    """The value for JSON: a dataclass as an object, its measured times to a tenth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: round(one, 1) if isinstance(one, float) else one for name, one in found.items()}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def opened(settings: Settings, value: T) -> T:
    """A value of JSON as people may see it: personal values, or what is shown for a forgotten one.

    Asks for the keys once, and not at all where nothing is sealed. Raises MasterKeyUnusable, DatabaseUnavailable, KafkaUnavailable.
    """
    if not (ids := key_ids(json.dumps(value, default=str))):
        return value
    from domain.engine.personal.keys import Keys  # brings the clients of Kafka and PostgreSQL
    from infra.database.connect import session

    keys = Keys(settings)
    with session(settings, "samefold personal values") as connection:
        keys.start(connection)
        found: T = opened_value(value, keys.keys_for(connection, ids))
    return found


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of texts, in which no markup counts; an empty cell is a dash."""
    made = Table(*columns)
    for row in rows:
        made.add_row(
            *(cell if isinstance(cell, Text) else Text("–" if cell in ("", None) else str(cell)) for cell in row)
        )
    return made


class Stages:
    """A bar per stage of a longer piece of work, with what it does in a second and the time left, on standard error."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._bar = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=stderr,
            disable=quiet,
            transient=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._end()
        if self._bar.tasks:
            self._bar.stop()

    def begin(self, stage: str, total: int | None = None) -> None:
        """The stage before has ended; this one has so many steps, if that is known."""
        self._end()
        self._bar.start()  # not before: a bar without a stage leaves an empty line
        self._bar.add_task(stage, total=total, done="", left="")

    def advance(self, count: int) -> None:
        if not self._bar.tasks:
            return
        task = self._bar.tasks[-1]
        self._bar.advance(task.id, count)
        of = f" of {task.total:,.0f}" if task.total else ""
        speed = f", {task.speed:,.0f}/s" if task.speed and task.completed > 1 else ""
        left = f"{timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
        self._bar.update(task.id, done=f"{task.completed:,.0f}{of}{speed}", left=left)

    def _end(self) -> None:
        for task in self._bar.tasks[-1:]:
            self._bar.update(task.id, total=task.total or 1, completed=task.total or 1, left="")


@contextmanager
def progress(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar of one stage; the function it gives advances it by so many."""
    with Stages(quiet=quiet) as stages:
        stages.begin(what, total)
        yield stages.advance
