"""make test + test-all: files are compared; the walk takes stores.

`docs/journey.md` is walked: what the page shows at each stage is compared with what is really there at that moment.

Every fenced block says by its first line what it shows: a record (`events[3] offset 1, …`), a partition under the reading rule,
rows (`=> select …`), the statements of a transaction (`begin`), a command line (`$ samefold …`), or, as `jsonl`, lines to send.
A `…` stands for a value that chance decides, in the few places where it may.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from threading import get_ident
from typing import Any, NamedTuple

import psycopg
import pytest

from commands.client import read_lines
from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.log import topics
from infra.log.partitioner import partition_of
from infra.log.records import Commit, Opening, Record, decode_event
from infra.log.rule import START, read
from infra.settings import Settings
from projections.engine.live.worker import Worker
from projections.engine.store.commit import CommitStatus
from projections.engine.views.core_views import agent_views
from tests.engine.spine import handler, send
from tools.migrations.migrate import upgrade
from tools.testing.fixtures import ROOT, Samefold
from tools.testing.waiting import DEADLINE_S, until

PAGE = (ROOT / "docs" / "journey.md").read_text()
STREAM = "accounts/ada"
VIEWS = {"balances", "daily_totals", "statement"}
CHANCE = {"commands_topic_id", "topic_id", "generation", "at"}
"""Fields and columns in which `…` may stand for whatever is there."""


class Block(NamedTuple):
    section: str
    language: str
    text: str


def blocks() -> list[Block]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        found += [Block(title, *one) for one in re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]
    return found


class Journey:
    """The page's way through a real Kafka and PostgreSQL, a stage a method, and a look at what is there now."""

    def __init__(self, world: Settings, samefold: Samefold, folder: Path) -> None:
        self.world = world.model_copy(update={"partitions": Settings.model_fields["partitions"].default})
        self.samefold = samefold
        self.folder = folder
        self.partition = partition_of(STREAM, self.world.partitions)
        self.running = ExitStack()
        self.aside = self.running.enter_context(ThreadPoolExecutor(1))
        self.printed: dict[str, Future[CompletedProcess[str]]] = {}
        self.statements: list[str] = []
        self._seen: dict[str, Any] = {}
        self.stages: dict[str, Callable[[list[str]], None]] = {
            "Before": self.before,
            "The handler opens": self.open,
            "A line": self.send,
            "One transaction": self.fold,
            "A retry": self.again,
            "A fenced writer": self.supersede,
        }

    # ── the stages; each is given the lines that its section sends ──

    def before(self, lines: list[str]) -> None:
        upgrade(self.world)
        topics.ensure(self.world)
        with self._agent():
            pass  # its first start: positions and pointers
        with handler(self.world, "h1"):
            send(self.world, *read_lines(self._file(lines.pop())).values())
            self._until_events(2)
        self._fold()

    def open(self, _: list[str]) -> None:
        self.running.enter_context(handler(self.world, "h1"))
        self._until_events(3)

    def send(self, lines: list[str]) -> None:
        self._file(lines.pop())
        self._type(self._command_line("The answer"))
        self._until_events(5)

    def fold(self, _: list[str]) -> None:
        execute, mine = psycopg.Connection.execute, get_ident()

        def recorded(connection: Any, query: Any, parameters: Any = None, **options: Any) -> Any:
            if get_ident() == mine:  # the handler's thread reads, too
                text = query.decode() if isinstance(query, bytes) else query
                plain = parameters and all(isinstance(one, str) for one in parameters)
                self.statements.append(text % tuple(f"'{one}'" for one in parameters) if plain else text)
            return execute(connection, query, parameters, **options)

        with pytest.MonkeyPatch.context() as patch:
            self._fold(lambda: patch.setattr(psycopg.Connection, "execute", recorded))

    def again(self, lines: list[str]) -> None:
        self._file(lines.pop())
        self._type(self._command_line("A retry")).result(DEADLINE_S)

    def supersede(self, lines: list[str]) -> None:
        """The second handler is in a group of its own: it is given the partition while the first one still serves it."""
        elsewhere = self.world.model_copy(update={"group_prefix": f"{self.world.group_prefix}-other"})
        with handler(elsewhere, "h2"):
            self._until_events(6)
        send(self.world, *read_lines(self._file(lines.pop())).values())
        self._until_events(9)
        self._fold()

    def _command_line(self, section: str) -> str:
        [text] = [one.text for one in blocks() if one.section == section and one.text.startswith("$ ")]
        return text.partition("\n")[0]

    def _file(self, lines: str) -> Path:
        file = self.folder / "commands.jsonl"
        file.write_text(lines)
        return file

    def _type(self, line: str) -> Future[CompletedProcess[str]]:
        self.printed[line] = self.aside.submit(self.samefold, *line.split()[2:], settings=self.world)
        return self.printed[line]

    def _until_events(self, count: int) -> None:
        until(lambda: len(self.records("events")) == count, f"{count} records in the stream's partition of events")

    def _fold(self, started: Callable[[], None] = lambda: None) -> None:
        """What an agent that has just started does with everything that it finds in the log."""
        with self._agent() as work:
            positions = work.positions()
            assert positions is not None
            started()
            done = work.apply({self.partition: (positions.readings[self.partition], self.records("events"))})
        assert done.status is CommitStatus.APPLIED

    @contextmanager
    def _agent(self) -> Iterator[Worker]:
        """With the views that the page tells of: it stays true when others are added."""
        views = {name: view for name, view in agent_views("core").items() if view.is_system or name in VIEWS}
        work = Worker(self.world, "core", views, "a1")
        try:
            work.start(topics.describe(self.world, self.world.events_topic))
            yield work
        finally:
            work.close()

    # ── what is there ──

    def records(self, topic: str) -> list[Record]:
        """The stream's partition of `commands` or `events`."""
        name = {"commands": self.world.commands_topic, "events": self.world.events_topic}[topic]
        end = topics.describe(self.world, name).end[self.partition]
        return [record for batch in read_range(self.world, name, self.partition, 0, end) for record in batch]

    def rows(self, query: str) -> tuple[list[str], list[list[str]]]:
        """Names of the columns, and the rows as psql would write their values."""
        with connect(self.world, "test") as db:
            cursor = db.execute(query.encode())
            columns = [column.name for column in cursor.description or ()]
            return columns, [[self._cell(value) for value in row] for row in cursor]

    def _cell(self, value: Any) -> str:
        if isinstance(value, dict):
            return json.dumps(value, separators=(",", ":"))
        return "events" if value == self.world.events_topic else "" if value is None else str(value)

    def _once(self, what: str, look: Callable[[str], Any]) -> Any:
        """Within a stage nothing changes: one look is enough."""
        if what not in self._seen:
            self._seen[what] = look(what)
        return self._seen[what]

    # ── what the page says is there ──

    def walk(self, stage: str, lines: list[str]) -> None:
        """Go on to a section of the page; the lines it sends are taken from `lines`."""
        self._seen.clear()
        if stage in self.stages:
            self.stages.pop(stage)(lines)

    def check(self, block: str) -> None:
        """Raises AssertionError or ValueError where a block is not what is there now."""
        first, _, rest = block.partition("\n")
        if found := re.fullmatch(r"(commands|events)\[(\d+)\] offset (\d+), (?:key (\S+)|no key)", first):
            self._check_record(found[1], int(found[2]), int(found[3]), found[4], rest)
        elif first == f"events[{self.partition}] by the reading rule":
            shown = table(rest)
            assert shown == self._by_the_rule(since=int(shown[1][0]))
        elif first.startswith("=> "):
            self._check_rows(first.removeprefix("=> "), rest)
        elif first.startswith("$ "):
            done = self.printed[first].result(DEADLINE_S)
            assert (rest, done.returncode) == (done.stdout, 0)
        else:
            assert first == "begin"
            self._check_statements(block)

    def _check_record(self, topic: str, partition: int, offset: int, key: str | None, value: str) -> None:
        there = {(record.partition, record.offset): record for record in self._once(topic, self.records)}
        assert (partition, offset) in there
        record = there[partition, offset]
        assert record.key == (key.encode() if key else None)
        alike(json.loads(value, object_pairs_hook=list), json.loads(record.value, object_pairs_hook=list))

    def _check_rows(self, query: str, shown: str) -> None:
        columns, is_there = self._once(query, self.rows)
        if not is_there:
            assert shown == "(0 rows)\n"
            return
        header, *rows = table(shown)
        assert (header, len(rows)) == (columns, len(is_there))
        for row, real in zip(rows, is_there, strict=True):
            alike(list(zip(columns, row, strict=True)), list(zip(columns, real, strict=True)))

    def _by_the_rule(self, since: int) -> list[list[str]]:
        """The records from an offset on, what the rule makes of each, and the position after it."""
        seen = [["offset", "record", "its epoch, seq", "it", "next_offset", "epoch", "seq", "command_offset"]]
        reading = START
        for record in self._once("events", self.records):
            entry = decode_event(record)
            reading, counted, void = read(reading, [record])
            if isinstance(entry, Opening):
                told = [f"opening of {entry.writer}", "", "opens"]
            else:
                assert isinstance(entry, Commit)
                it = "counts" if counted else f"is void: {void[0].reason}"
                told = [f"commit of {entry.command_id}", f"{entry.epoch}, {entry.seq}", it]
            if record.offset >= since:
                seen.append([str(record.offset), *told, *map(str, reading)])
        return seen

    def _check_statements(self, block: str) -> None:
        """A line of the page, with those that are indented below it, is a statement; `…` is any part of it."""
        shown = [" ".join(line.split()) for line in re.split(r"\n(?! )", block.strip())]
        is_there = [" ".join(statement.split()) for statement in self.statements]
        assert len(shown) == len(is_there), is_there
        for pattern, statement in zip(shown, is_there, strict=True):
            assert re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), statement), (pattern, statement)


def table(text: str) -> list[list[str]]:
    """The cells of a table as psql draws it, header first; also where it is expanded, a line for each column."""
    if not text.startswith("-["):
        header, rule, *rows = text.splitlines()
        assert re.fullmatch(r"[-+]+", rule)
        return [[cell.strip() for cell in line.split("|")] for line in (header, *rows)]
    records = re.split(r"^(-\[ RECORD \d+ \])\n", text, flags=re.MULTILINE)[1:]
    assert records[::2] == [f"-[ RECORD {n} ]" for n in range(1, len(records) // 2 + 1)]
    lines = [[line.partition("|")[::2] for line in record.splitlines()] for record in records[1::2]]
    columns, *others = ([name.strip() for name, _ in record] for record in lines)
    assert all(other == columns for other in others)
    return [columns, *([value.strip() for _, value in record] for record in lines)]


Members = list[tuple[str, Any]]
"""Names and values of an object or a row, in order."""


def alike(shown: Members, is_there: Members) -> None:
    """Raises AssertionError unless both are the same in the same order; a shown `…` is any value of CHANCE."""
    assert [name for name, _ in shown] == [name for name, _ in is_there]
    for (name, value), (_, real) in zip(shown, is_there, strict=True):
        if value == "…":
            assert name in CHANCE, f"'{name}' is not left to chance: write {real!r}"
            assert real, f"'{name}' has no value"
        elif isinstance(value, list) and isinstance(real, list):
            alike(_members(value), _members(real))
        else:
            assert (type(value), value) == (type(real), real), name


def _members(value: list[Any]) -> Members:
    """Of an object as `object_pairs_hook=list` makes it, or of an array, by number."""
    return [one if isinstance(one, tuple) else (str(number), one) for number, one in enumerate(value)]


@pytest.fixture
def journey(world: Settings, samefold: Samefold, tmp_path: Path) -> Iterator[Journey]:
    journey = Journey(world, samefold, tmp_path)
    with journey.running:
        yield journey


@pytest.mark.slow
def test_what_the_page_shows_at_each_stage_is_there(journey: Journey) -> None:
    stage = None
    for block in blocks():
        if block.section != stage:
            stage = block.section
            lines = [one.text for one in blocks() if one.section == stage and one.language == "jsonl"]
            journey.walk(stage, lines)
            assert not lines, "lines of commands that nobody sent"
        if block.language == "jsonl":
            continue
        journey.check(block.text)
    assert not journey.stages, "stages that the page has no section for"


def test_the_files_and_names_that_the_page_tells_of_exist() -> None:
    paths = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path
    named = re.findall(r"`(\w+)` in\s+`([\w/]+\.py)`", PAGE)
    assert named
    for name, path in named:
        tree = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {getattr(node, "name", None) for node in tree}, f"{path} has no {name}"
