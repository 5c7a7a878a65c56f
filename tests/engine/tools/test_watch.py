"""make test-all: one service that is made once, and follows what is saved.

`samefold dev run --watch`: from a saved file to its rows, whatever was changed, and back from every mistake."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from tests.engine.api.front import free_port
from tests.engine.tools.service_trees import SAMEFOLD, Tree
from tools.dev.stack import Stack
from tools.testing.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.xdist_group("services")]

SERVED = "s from the save"
VIEW = "projections/room_names.py"
CONTEXT = "domain/rooms.py"
KILLED = f"""
import os
from infra.processes import faultpoints
faultpoints.hook = lambda point: os.kill(os.getpid(), {int(signal.SIGKILL)}) if point == "switch done" else None
{SAMEFOLD}
"""
EVOLVED = "case RoomAdded(name=name):\n            return replace(state, added=True, name=name)"
SHOUTS = '''"""What is shouted at each door?"""

from typing import NamedTuple

from domain.rooms import RoomAdded
from projections.engine import At, Key

VERSION = 1


class Shout(NamedTuple):
    room: Key[str]
    shout: str


def evolve(row: Shout | None, event: RoomAdded, at: At) -> Shout:
    return Shout(at.id, event.name.upper())
'''


class Watched:
    """A service under `samefold dev run --watch`, and its author."""

    def __init__(self, service: Tree, folder: Path) -> None:
        self.service = service
        self.log = folder / "watch.log"
        self.database = Stack(folder).postgres.url()
        port = free_port()
        service.use(folder, port)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S)
        self._begin()

    def _begin(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SAMEFOLD, "dev", "run", "--watch"],
                cwd=self.service.folder,
                env=self.service.environment,
                stdout=log,
                stderr=log,
            )
        until(lambda: self.row("room_names", "none") is None, "the API serves")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(DEADLINE_S) == 0, self.told()

    def told(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def row(self, view: str, key: str) -> dict[str, Any] | str | None:
        """A row; None if there is none, and a text of why it can't be read."""
        try:
            answer = self.client.get(f"/views/{view}/{key}")
        except httpx.TransportError as error:
            return str(error) or "away"
        if answer.status_code == httpx.codes.OK:
            row: dict[str, Any] = answer.json()["row"]
            return row
        return None if answer.json().get("code") == "no-row" else answer.text

    def decides(self, outcome: str, stream: str, command: str, **data: object) -> None:
        """Wait until a command has this outcome, or is refused with this code. Each try is another command."""

        def found() -> str:
            key = uuid4()
            try:
                headers = {"Idempotency-Key": f'"{key}"'}
                answer = self.client.post(f"/{stream.format(key)}/{command}", json=data, headers=headers).json()
            except httpx.TransportError as error:
                return str(error)
            return str(answer.get("code") or answer.get("outcome"))

        until(lambda: found() == outcome, f"{command} of {stream} is {outcome}")

    def shows(self, view: str, key: str, **columns: object) -> None:
        """Wait until a row has these values."""

        def is_shown() -> bool:
            found = self.row(view, key)
            return isinstance(found, dict) and found.items() >= columns.items()

        until(is_shown, f"{view} shows {columns} for {key}")

    def paths(self) -> str:
        """Those of the API."""
        try:
            return self.client.get("/openapi.json").text
        except httpx.TransportError:
            return ""

    def tells(self, pattern: str) -> None:
        until(lambda: re.search(pattern, self.told(), re.DOTALL), f"it tells {pattern}")

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Wait until no other save is followed, and at the end until what is saved in this block serves."""
        until(
            lambda: re.search("from the | goes on|nothing runs", re.findall("watch: .*", self.told())[-1]), "it rests"
        )
        served = self.told().count(SERVED)
        yield
        until(lambda: self.told().count(SERVED) > served, "what is saved serves")

    def kill_sync_after_switch(self, view: str, old: str, new: str) -> None:
        """Save a view's file, and kill the process that follows the save between the switch and its end."""
        with psycopg.connect(self.database) as reader, psycopg.connect(self.database, autocommit=True) as db:
            [(table,)] = reader.execute("select table_name from live where view = %s", (view,))
            reader.execute(SQL("select from {}").format(Identifier(table)))  # now it can't be dropped
            self.service.write(f"projections/{view}.py", old, new)
            found = (
                "select split_part(application_name, ' ', 5) from pg_stat_activity "
                "where application_name like 'samefold views drop, pid %'"
            )
            until(lambda: db.execute(found).fetchall(), "it drops the table")
            os.kill(int(db.execute(found).fetchall()[0][0]), signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill what runs, and not what watches."""
        for started in psutil.Process(self.process.pid).children():
            if "forkserver" in " ".join(started.cmdline()):
                for child in started.children():
                    child.kill()

    def migrations(self) -> str:
        return "".join(file.read_text() for file in (self.service.folder / "projections/migrations").glob("*.py"))


@pytest.fixture
def watched(hotel: Tree, data: Path) -> Iterator[Watched]:
    found = Watched(hotel, data)
    try:
        yield found
    except BaseException:
        print(found.told()[-20_000:])
        raise
    finally:
        if found.process.poll() is None:
            found.end()
        found.client.close()
        hotel.samefold("dev", "down")


def test_what_runs_follows_each_saved_file(watched: Watched) -> None:
    """Each kind of change, one after the other, on one history."""
    service, write = watched.service, watched.service.write
    watched.decides("accepted", "rooms/12", "add-room", name="twelve")
    watched.shows("room_names", "12", name="twelve")

    # a fold
    write(VIEW, "RoomName(at.id, name)", "RoomName(at.id, name.title())")
    watched.shows("room_names", "12", name="Twelve")

    # two saves within a second, which leave size and seconds of the file as they were
    write(VIEW, "name.title()", "name + '?'   ")
    write(VIEW, "name + '?'   ", "name + '!'   ")
    watched.shows("room_names", "12", name="twelve!")

    # a shape: the version, which was never released, keeps its one migration
    write(VIEW, "    name: str\n", "    name: str\n    letters: int\n")
    write(VIEW, "RoomName(at.id, name + '!'   )", "RoomName(at.id, name, len(name))")
    watched.shows("room_names", "12", name="twelve", letters=6)
    assert watched.migrations().count("create_table") == 2
    assert '"letters"' in watched.migrations()

    # an index
    write(VIEW, "VERSION = 1", 'INDEXES = (Index("letters"),)\nVERSION = 1')
    write(VIEW, "import At, Key", "import At, Index, Key")
    until(lambda: "op.create_index" in watched.migrations(), "the migration has the index")

    # a new view
    (service.folder / "projections/shouts.py").write_text(SHOUTS)
    watched.shows("shouts", "12", shout="TWELVE")

    # a decision
    write(CONTEXT, "if state.added:", 'if name == "none" or state.added:')
    watched.decides("room-already-added", "rooms/{}", "add-room", name="none")

    # a state, from the history
    write(CONTEXT, "    added: bool = False", '    added: bool = False\n    name: str = ""')
    write(CONTEXT, "case RoomAdded():\n            return replace(state, added=True)", EVOLVED)
    write(CONTEXT, 'if name == "none" or state.added:', 'if state.name == "twelve":')
    watched.decides("room-already-added", "rooms/12", "add-room", name="again")

    # an event with its command, and without them again
    before = (service.folder / CONTEXT).read_text()
    service.samefold("add", "event", "RoomLocked")
    service.samefold("add", "command", "LockRoom", "--event", "RoomLocked")
    until(lambda: "/lock-room" in watched.paths(), "there is the command")
    served = watched.told().count(SERVED)
    (service.folder / CONTEXT).write_text(before)
    until(lambda: watched.paths() and "/lock-room" not in watched.paths(), "it is gone")
    watched.decides("accepted", "rooms/13", "add-room", name="thirteen")

    until(lambda: watched.told().count(SERVED) > served, "what runs has started again")

    # a mistake: it is shown with its line, and what runs goes on
    write(VIEW, "    letters: int", "    letters: it")
    watched.tells(r"room_names\.py:\d+: .*'it'")
    watched.decides("accepted", "rooms/14", "add-room", name="fourteen")
    watched.shows("room_names", "14", letters=8)
    write(VIEW, "    letters: it\n", "    letters: int\n")

    # a policy, which reacts from now on
    service.samefold("add", "policy", "copies", "--context", "rooms")
    watched.tells("policy copies reacts from now on as version 1")
    watched.decides("accepted", "rooms/example", "add-room", name="example")
    watched.shows("room_names", "example-copy", name="example")

    # a query
    service.samefold("add", "query", "many_rooms")
    until(lambda: "/queries/many_rooms" in watched.paths(), "there is the query")

    # a context
    service.samefold("add", "context", "guests")
    watched.decides("accepted", "guests/ada", "add-guest", name="Ada")

    # an import that never ends, and the mended file
    endless = f"open({str(service.folder / 'begun')!r}, 'w')\nwhile True:\n    pass\n"
    with watched.followed():
        write(VIEW, "VERSION = 1", f"{endless}VERSION = 1")
        until((service.folder / "begun").exists, "it is imported")
        write(VIEW, endless, "")

    # a database that is not the development stack's
    with psycopg.connect(watched.database, autocommit=True) as db:
        db.execute("create database elsewhere")
    elsewhere = make_conninfo(watched.database, dbname="elsewhere")
    (service.folder / ".env").write_text(f'SAMEFOLD_DATABASE_URL="{elsewhere}"\n')
    write("projections/shouts.py", ".upper()", ".lower()")
    watched.tells("another Kafka or database")
    with psycopg.connect(elsewhere) as db:
        assert db.execute("select from pg_tables where schemaname = 'public'").fetchall() == []
    (service.folder / ".env").unlink()
    with watched.followed():
        write("projections/shouts.py", ".lower()", ".upper()")

    # a save whose following is killed beside the switch, and that is taken back
    watched.kill_sync_after_switch("shouts", ".upper()", ".title()")
    watched.tells("It has ended before it was done.*after the next good save: agent-core-1")
    with watched.followed():
        write("projections/shouts.py", ".title()", ".upper()")
    watched.shows("shouts", "12", shout="TWELVE")
    watched.decides("accepted", "rooms/15", "add-room", name="fifteen")
    watched.shows("shouts", "15", shout="FIFTEEN")

    # a view that comes back after it was changed
    write("projections/shouts.py", "    shout: str\n", "    shout: str\n    letters: int\n")
    write("projections/shouts.py", ".upper()", ".upper(), len(event.name)")
    watched.shows("shouts", "12", shout="TWELVE", letters=6)
    with watched.followed():
        (service.folder / "projections/shouts.py").unlink()
        until(lambda: watched.paths() and "/views/shouts" not in watched.paths(), "it is gone")
    (service.folder / "projections/shouts.py").write_text(SHOUTS)
    watched.shows("shouts", "15", shout="FIFTEEN")

    # a view that goes, with what its migration made
    (service.folder / "projections/shouts.py").unlink()
    until(lambda: "shouts_v1" not in watched.migrations(), "its migration is gone")
    until(lambda: watched.paths() and "/views/shouts" not in watched.paths(), "it is gone")

    # what was released keeps its version
    service.samefold("events", "release")
    write(VIEW, "len(name)", "-len(name)")
    watched.tells("Raise VERSION in projections/room_names.py to 2")
    watched.shows("room_names", "12", letters=6)
    # and what is refused is not started
    watched.kill_all()
    watched.tells("agent-core-1 does not run; it starts after the next good save")
    write(VIEW, "-len(name)", "len(name)")
    watched.decides("accepted", "rooms/16", "add-room", name="sixteen")
    watched.shows("room_names", "16", letters=7)
    write(VIEW, "len(name)", "-len(name)")
    write(VIEW, "VERSION = 1", "VERSION = 2")
    watched.shows("room_names", "12", letters=-6)
    # the same once, where nothing runs; and nowhere but on the development stack
    watched.end()
    write(VIEW, "    letters: int\n", "    letters: int\n    twice: int\n")
    write(VIEW, "-len(name)", "-len(name), 2 * len(name)")
    assert "room_names_v2" in service.samefold("events", "release", code=1).stderr
    service.samefold("dev", "up")
    with psycopg.connect(watched.database, application_name="samefold here-1-agent-core-1"):
        assert "here-1-agent-core-1" in service.samefold("sync", code=1).stderr
    assert "room_names is folded into" in service.samefold("sync").stdout
    # it is killed beside the switch, and the save is taken back
    write(VIEW, "2 * len(name)", "3 * len(name)")
    service.run(sys.executable, "-c", KILLED, "sync", code=-signal.SIGKILL)
    write(VIEW, "3 * len(name)", "2 * len(name)")
    assert "room_names is folded into" in service.samefold("sync").stdout
    assert "Nothing to do" in service.samefold("sync").stdout
    assert service.samefold("db", "check").stdout
    assert "0 differences" in service.samefold("verify").stdout
    service.environment["SAMEFOLD_DATABASE_URL"] = "postgresql://samefold@127.0.0.1:1/elsewhere"
    assert "another Kafka or database" in service.samefold("sync", code=1).stderr
    del service.environment["SAMEFOLD_DATABASE_URL"]
