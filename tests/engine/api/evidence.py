"""What clients were told over HTTP, held against the log and the rows: who was told a thing that is not so?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from commands.outcomes import Outcome, outcomes_of
from infra.archive.whole_log import read_range
from infra.database.connect import connect
from infra.log.records import Commit
from infra.log.rule import START, read
from infra.log.topics import describe
from infra.settings import Settings

Key = tuple[str, str]
"""Stream and command id."""

RECORDED = {200: "accepted", 409: "rejected", 412: "rejected"}
"""Statuses that answer a command which the log must hold, and how. So does a 500 for a recorded defect of the domain's code."""
OPEN = {202, 500, 503}
"""Statuses that leave open what becomes of the command, unless they say that nothing was appended."""
FAILED = "failed"


class Told(NamedTuple):
    """One answer to a command. `status` is None where the connection broke before there was one."""

    stream: str
    key: str
    status: int | None
    code: str | None = None
    version: int | None = None
    appended: str | None = None

    @property
    def is_open(self) -> bool:
        return not self.recorded and (self.status is None or (self.status in OPEN and self.appended != "no"))

    @property
    def recorded(self) -> str | None:
        """The outcome which the log must hold, None where this answer says that there is none."""
        if self.status == 422 and self.code == "key-reused":
            return "other"
        if (self.status, self.code) in {(500, FAILED), (422, "unclear-stream")}:
            return "rejected"
        return RECORDED.get(self.status or 0)


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Both by stream and command id: the commits that count, in their order, and their outcomes."""

    log: Mapping[Key, Sequence[Commit]]
    rows: Mapping[Key, Outcome]


def told(stream: str, key: str, status: int, body: Mapping[str, Any]) -> Told:
    return Told(stream, key, status, body.get("code"), body.get("version"), body.get("appended"))


def witnesses(world: Settings, stream: str = "") -> Witnesses:
    log: dict[Key, list[Commit]] = defaultdict(list)
    topic = describe(world, world.events_topic)
    for partition, end in topic.end.items():
        reading = START
        for records in read_range(world, topic.name, partition, 0, end):
            reading, counted, _ = read(reading, records)
            for one in counted:
                if stream in ("", one.commit.stream):
                    log[one.commit.stream, one.commit.command_id].append(one.commit)
    with connect(world, "test") as db:
        return Witnesses(log, outcomes_of(db, list(log)))


def contradictions(answers: Iterable[Told], seen: Witnesses) -> list[str]:
    """Sentences, one for each thing that clients, log and rows do not agree on."""
    by_key: dict[Key, list[Told]] = defaultdict(list)
    for answer in answers:
        by_key[answer.stream, answer.key].append(answer)
    found = [
        f"{key} has no answer, but {len(commits)} commits" for key, commits in seen.log.items() if key not in by_key
    ]
    for key, mine in by_key.items():
        found += [f"{key}: {problem}" for problem in _wrong(mine, seen.log.get(key, ()), seen.rows.get(key))]
    return found


def _wrong(answers: Sequence[Told], commits: Sequence[Commit], row: Outcome | None) -> Iterable[str]:
    if len(commits) > 1:
        yield f"done {len(commits)} times"
    recorded = [answer for answer in answers if answer.recorded]
    if not commits:
        yield from (f"told {answer.status} {answer.code}, but nothing is in the log" for answer in recorded)
        return
    commit = commits[0]
    if not recorded and not any(answer.is_open for answer in answers):
        yield f"told {[answer.status for answer in answers]}, but the log holds it as {commit.outcome}"
    if commit.outcome == "rejected" and commit.events:
        yield "refused, with events"
    code = commit.reason.code if commit.reason else None
    if row is None or (row.outcome, row.code, row.version) != (commit.outcome, code, commit.version):
        yield f"the log says {commit.outcome} at version {commit.version}, the rows {row and row.outcome}"
    for answer in recorded:
        if answer.recorded == "other":
            continue
        if answer.recorded != commit.outcome:
            yield f"told {answer.status} {answer.code}, but the log holds it as {commit.outcome}"
        elif answer.status == 200 and answer.version != commit.version:
            yield f"told version {answer.version}, but the log says {commit.version}"
        elif answer.status != 200 and answer.code != code:
            yield f"told '{answer.code}', but the log says '{code}'"
