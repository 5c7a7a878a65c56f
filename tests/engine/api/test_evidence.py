"""What holds answers against log and rows must itself notice each kind of lie."""

from __future__ import annotations

from typing import Any

import pytest

from commands.outcomes import Outcome
from infra.log.records import Commit, EventRecord, Reason
from tests.engine.api.evidence import Told, Witnesses, contradictions

KEY = ("accounts/1", "k")
EVENT = EventRecord("MoneyDeposited", b"{}")  # type: ignore[arg-type]
POOR = Reason("insufficient-funds", "The balance does not cover it.")


def commit(version: int = 2, reason: Reason | None = None, events: list[EventRecord] | None = None) -> Commit:
    outcome: Any = "rejected" if reason else "accepted"
    made = ([] if reason else [EVENT]) if events is None else events
    return Commit(*KEY[:1], version, made, KEY[1], 0, "", outcome, reason, 0, 1)


def row(of: Commit) -> Outcome:
    code, message = (of.reason.code, of.reason.message) if of.reason else (None, None)
    return Outcome(of.outcome, code, message, of.version, "")


def answer(
    status: int | None, code: str | None = None, version: int | None = None, appended: str | None = None
) -> Told:
    return Told(*KEY, status, code, version, appended)


DONE, REFUSED = commit(), commit(reason=POOR)
OK, NO = answer(200, version=2), answer(409, POOR.code)
REUSED = answer(422, "key-reused")
FALSE = {
    "done twice": ([OK], [DONE, DONE]),
    "told as done, and not in the log": ([OK], []),
    "told as done, and refused": ([OK], [REFUSED]),
    "told with another version": ([answer(200, version=3)], [DONE]),
    "told as refused, and done": ([NO], [DONE]),
    "told as refused, and not in the log": ([NO], []),
    "told with another reason": ([answer(409, "account-is-closed")], [REFUSED]),
    "a version conflict with an effect": ([answer(412, "version-conflict")], [DONE]),
    "a refusal with events": ([NO], [commit(reason=POOR, events=[EVENT])]),
    "invalid, and done": ([answer(422, "invalid")], [DONE]),
    "invalid, and in the log as refused": ([answer(422, "invalid")], [REFUSED]),
    "promised as not appended": ([answer(503, "kafka-unavailable", appended="no")], [DONE]),
    "too many requests, and done": ([answer(429, "read-model-behind")], [DONE]),
    "two answers": ([OK, NO], [DONE]),
    "used again, and never used": ([REUSED], []),
    "a recorded defect that is in no record": ([answer(500, "failed")], []),
    "nobody asked for it": ([], [DONE]),
}
TRUE = {
    "done": ([OK], [DONE]),
    "told twice": ([OK, OK], [DONE]),
    "refused": ([NO], [REFUSED]),
    "invalid": ([answer(422, "invalid")], []),
    "unknown, and done": ([answer(None)], [DONE]),
    "unknown, and not done": ([answer(503, "kafka-unavailable", appended="unknown")], []),
    "in time": ([answer(202)], [DONE]),
    "at the second try": ([answer(503, "kafka-unavailable", appended="no"), OK], [DONE]),
    "used again": ([OK, REUSED], [DONE]),
}


def judged(answers: list[Told], commits: list[Commit]) -> list[str]:
    return contradictions(
        answers, Witnesses({KEY: commits} if commits else {}, {KEY: row(commits[0])} if commits else {})
    )


@pytest.mark.parametrize("name", FALSE)
def test_what_is_not_so_is_found(name: str) -> None:
    assert judged(*FALSE[name])


@pytest.mark.parametrize("name", TRUE)
def test_what_is_so_is_not(name: str) -> None:
    assert judged(*TRUE[name]) == []


def test_a_row_that_is_missing_or_says_something_else_is_found() -> None:
    assert contradictions([OK], Witnesses({KEY: [DONE]}, {}))
    assert contradictions([OK], Witnesses({KEY: [DONE]}, {KEY: row(REFUSED)}))
