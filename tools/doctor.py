"""`samefold doctor`: checks this machine, and says what to do."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psycopg

from commands.release import decided
from domain.engine.contexts import has_personal_fields
from domain.engine.personal.masters import masters
from infra.archive.manifest import ends_of
from infra.archive.store import opened
from infra.database.connect import DatabaseBehind, DatabaseRefused, session
from infra.errors import NotConfigured, SamefoldError, in_words
from infra.log.clients import KafkaRefused
from infra.log.topics import Admin, TopicMissing, check, describe, existing
from infra.processes.java import find_java
from infra.settings import PREFIX, Settings
from infra.tls import unprotected
from policies.engine.activations import held_policies
from projections.engine.operate.overview import differences
from projections.engine.rebuild.indexing import HINT as INDEXES_HINT
from projections.engine.rebuild.indexing import compare, hand_made
from projections.engine.rebuild.switch import pointers
from projections.engine.store.positions import AGENTS, stopped_views
from projections.engine.views.core_views import all_views
from tools.dev import jars
from tools.dev.postgres import VERSION, binaries
from tools.dev.stack import Stack
from tools.scaffold.copying import MANIFEST, changed

T = TypeVar("T")

MIN_DISK_GB = 2
KAFKA_S = 5.0
STILL_S = 7.0
"""Handlers tell how far they are every five seconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `hint` is empty if it is ok."""

    name: str
    ok: bool
    found: str
    hint: str = ""


def examine() -> list[Finding]:
    """Run all checks. Changes nothing, and takes at most a few seconds if Kafka or PostgreSQL is unavailable."""
    of_machine = {"Python": _python, "Java": _java, "Kafka's jars": _jars, "PostgreSQL's binaries": _binaries}
    findings = [_look(name, look) for name, look in (of_machine | {"Samefold's files": _files}).items()]
    try:
        settings = Settings()
    except SamefoldError as error:
        return [*findings, Finding("settings", False, error.message, error.hint)]
    changed = ", ".join(sorted(settings.model_fields_set)) or "all defaults"
    findings.append(Finding("settings", True, f"{changed} ({len(type(settings).model_fields)} in all)"))
    of_settings = {"callers": _callers, "files of secrets": _secrets, "data folder": _data_folder}
    of_settings |= {"development stack": _stack, "TLS": _tls, "Kafka": _kafka, "PostgreSQL": _database}
    findings += [_look(name, look, settings) for name, look in of_settings.items()]
    if all(found.ok for found in findings[-2:]):  # else it would only repeat that Kafka or PostgreSQL is unavailable
        of_data = {"topics": _topics, "archive": _archive, "personal values": _personal, "views": _views}
        of_data |= {"indexes": _indexes, "standing still": _still}
        findings += [_look(name, look, settings) for name, look in of_data.items()]
    return findings


class Unfit(SamefoldError):
    """Something on this machine is not as Samefold needs it."""


def _look(name: str, look: Callable[..., str], *settings: Settings) -> Finding:
    try:
        return Finding(name, True, look(*settings))
    except SamefoldError as error:
        return Finding(name, False, error.message, error.hint)


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _java() -> str:
    java = find_java()
    return f"{java.major} ({java.path})"


def _jars() -> str:
    jars.classpath()
    return f"{jars.KAFKA}, {len(jars.locked())} jars ({jars.FOLDER})"


def _binaries() -> str:
    return f"{VERSION} ({binaries()})"


def _files() -> str:
    """Changed ones are no fault: an update merges them."""
    found = changed(Path(__file__).parents[1])
    if found is None:
        return f"this is Samefold itself (no {MANIFEST})"
    return f"{len(found)} changed here: {', '.join(found)}" if found else "none changed here"


def _callers(settings: Settings) -> str:
    if settings.auth == "jwt":
        return f"those with a token of {settings.jwt_issuer}"
    if settings.auth == "in-front":
        return "all that reach the API (SAMEFOLD_AUTH=in-front): a gateway in front of it must decide who may pass"
    return "all on this machine (SAMEFOLD_AUTH=off)"


def _secrets(settings: Settings) -> str:
    settings.require_webhooks_read()
    if exposed := settings.exposed_files():
        raise Unfit(
            f"Every user of this machine may read {', '.join(map(str, exposed))}.",
            "`chmod 600` them; in Kubernetes set the volume's defaultMode to 0400.",
        )
    return "none, or only their owner reads them"


def _data_folder(settings: Settings) -> str:
    folder = settings.data_dir.resolve()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise Unfit(f"{nearest} can't be written to.", "Set SAMEFOLD_DATA_DIR to a folder of yours.")
    free = shutil.disk_usage(nearest).free / 1e9
    if free < MIN_DISK_GB:
        raise Unfit(f"Only {free:.1f} GB are free in {nearest}.", f"Free {MIN_DISK_GB} GB, or set SAMEFOLD_DATA_DIR.")
    return f"{folder}, {free:.0f} GB free"


def _stack(settings: Settings) -> str:
    """That it is down is no fault: the settings may name another Kafka and PostgreSQL."""
    if not settings.data_dir.is_dir():
        return "never started here (`samefold dev up` starts it)"
    status = Stack(settings.data_dir).status()
    services = {"Kafka": status["kafka"], "PostgreSQL": status["postgres"]}
    hung = [name for name, service in services.items() if service["running"] and not service["answers"]]
    if hung:
        raise Unfit(
            f"{' and '.join(hung)} runs but does not answer.", "Run `samefold dev down`, then `samefold dev up`."
        )
    up = [name for name, service in services.items() if service["running"]]
    if len(up) == 1:
        raise Unfit(f"Only {up[0]} runs.", "Run `samefold dev up`: it starts what is missing.")
    return "up" if up else "down (`samefold dev up` starts it)"


def _tls(settings: Settings) -> str:
    if found := [*unprotected(settings)]:
        raise Unfit(f"{'; '.join(found)}.", "docs/on-the-wire.md shows how.")
    return "all connections that leave this machine are encrypted, and the names of servers are verified"


def _not_yet(variable: str) -> str:
    """No fault either: that is how a fresh clone is."""
    return f"not configured yet (`samefold dev up` starts one; {PREFIX}{variable} names another)"


def _kafka(settings: Settings) -> str:
    if settings.kafka_bootstrap is None:
        return _not_yet("KAFKA_BOOTSTRAP")
    metadata = Admin(settings, KAFKA_S).ask(lambda client, within_s: client.list_topics(timeout=within_s))
    missing = [name for name in (settings.commands_topic, settings.events_topic) if name not in metadata.topics]
    return f"{settings.kafka} answers" + (f"; not yet made: {', '.join(missing)}" if missing else "")


def _topics(settings: Settings) -> str:
    if settings.kafka_bootstrap is None:
        return _not_yet("KAFKA_BOOTSTRAP")
    admin = Admin(settings, KAFKA_S)
    if names := existing(settings, admin):
        check(settings, names, admin=admin)
    return f"{', '.join(names) or 'none yet'}: no setting loses history"


def _database(settings: Settings) -> str:
    if settings.database_url is None:
        return _not_yet("DATABASE_URL")
    by_hand = list[str]()
    with session(settings, "doctor") as connection:
        [(version, user, is_superuser)] = connection.execute(
            "select current_setting('server_version_num')::int / 10000, current_user, rolsuper "
            "from pg_roles where rolname = current_user"
        )
        with suppress(psycopg.Error):  # no migration has run, or this role may not see what is live
            by_hand = hand_made(connection, [one.table for one in pointers(connection).values()])
    left = f"; made by hand, and left behind by the next switch: {', '.join(by_hand)}" if by_hand else ""
    # as all are on the development stack
    too_much = f"; {user} is a superuser: `samefold db roles` makes a role for each process" if is_superuser else ""
    return f"answers, version {version}{too_much}{left}"


def _archive(settings: Settings) -> str:
    """That there is none is no fault, as long as Kafka holds the whole log."""
    if settings.kafka_bootstrap is None or settings.database_url is None:
        return "not checked: Kafka or PostgreSQL is not configured yet"
    try:
        topic = describe(settings, settings.events_topic)
    except TopicMissing:
        return f"nothing to archive yet ({settings.archive})"
    with session(settings, "doctor") as connection:
        row = connection.execute("select to_regclass('archive_files')").fetchone()
        ends = ends_of(connection, topic.name) if row and row[0] else {}
        if ends:
            opened(settings, connection, topic.name)
    for partition, first in topic.first.items():
        if first > ends.get(partition, 0):
            raise Unfit(
                f"{topic.name}[{partition}] begins at {first}, but the archive ends at {ends.get(partition, 0)}.",
                "Records are missing: restore the topic, or the database that knows the archive.",
            )
    return f"{sum(ends.values()):,} of {sum(topic.end.values()):,} records ({settings.archive})"


def _views(settings: Settings) -> str:
    """Compares the views that are live with those of this code: an agent folds only while they are the same."""
    views = _imported("domain/ or projections/", all_views)
    try:
        with session(settings, "doctor") as connection:
            live = pointers(connection)
            started = connection.execute("select agent from positions where topic = %s", (settings.events_topic,))
            found = differences(views, live, {agent for (agent,) in started})
    except (NotConfigured, DatabaseBehind, DatabaseRefused) as error:
        return f"not checked: {error.message}"
    if not live:
        return "none is live yet: an agent's first start makes them live (`samefold run agent`)"
    if found:
        raise Unfit(
            " ".join(f"Agent {agent}: {difference}" for agent, difference in found.items()),
            "An agent folds only while the live views are those of its code. docs/change-a-read-model.md has the steps.",
        )
    return f"{len(live)} are live, in this code's versions"


def _indexes(settings: Settings) -> str:
    """Of views. Those that were made by hand are no fault, and told with the database."""
    views = _imported("projections/", all_views)
    try:
        with session(settings, "doctor") as connection:
            found = compare(connection, views.values())
    except (NotConfigured, DatabaseBehind, DatabaseRefused) as error:
        return f"not checked: {error.message}"
    if found:
        raise Unfit(f"{', '.join(map(str, found))}.", INDEXES_HINT)
    return "as this code declares them"


def _still(settings: Settings) -> str:
    """Compares two looks at who has something to do, and names the views that have stopped."""

    def look() -> set[tuple[str, int, int]]:
        commands, events = (describe(settings, topic).end for topic in (settings.commands_topic, settings.events_topic))
        with session(settings, "doctor") as connection:
            query = f"select agent, partition, next_offset, command_offset from positions where topic = %s and agent in {AGENTS}"  # noqa: S608
            agents = connection.execute(query, [settings.events_topic]).fetchall()
        told = decided(settings, len(commands))  # of commands that were repeated, the read model knows nothing
        there = {at: max(told.get(at, 0), command + 1) for who, at, _, command in agents if who == "core"}
        return {(who, at, offset) for who, at, offset, _ in agents if offset < events[at]} | {
            ("handlers", at, offset) for at, offset in there.items() if offset < commands[at]
        }

    try:
        if before := look():
            time.sleep(STILL_S)
            before &= look()
        still = f"did not move within {STILL_S:.0f} s, although there is more"
        found = [f"{who}: partition {at} at offset {offset} {still}" for who, at, offset in sorted(before)]
        with session(settings, "doctor") as connection:
            views, held = stopped_views(connection), held_policies(connection)
        found += [f"{one.view}: stopped at event {one.stream_version} of {one.stream}: {one.error}" for one in views]
        found += [
            f"policy {one}: held, as this database is new to it (`samefold policies` says what to do)" for one in held
        ]
        if found:
            raise Unfit(
                f"{'; '.join(found)}.",
                "Are the processes running (`samefold run`)? Their logs say why they wait. A view that has stopped goes on once "
                "its code is corrected: `samefold views resume NAME`, or of a journal `samefold rebuild NAME`.",
            )
    except (NotConfigured, TopicMissing, DatabaseBehind, DatabaseRefused, KafkaRefused) as error:
        return f"not checked: {error.message}"
    return "nothing"


def _imported(folders: str, read: Callable[[], T]) -> T:
    """What `read` finds in the service's own code. Raises Unfit where that can't be imported."""
    try:
        return read()
    except SamefoldError:
        raise
    except Exception as error:
        raise Unfit(f"{folders} can't be imported: {in_words(error)}.", "Correct it.") from error


def _personal(settings: Settings) -> str:
    """The master key; their topic is checked with the others."""
    if not _imported("domain/", has_personal_fields):
        return "no field is personal"
    if settings.kafka_bootstrap is None and settings.master_key_file is None:
        return _not_yet("MASTER_KEY_FILE")
    return f"master key '{masters(settings).first}'"
