"""make test: the declarations, and one API.

What holds in every service, whatever it declares: domain, policies and access.py are pure, events and commands can be stored."""

import ast
import inspect
import pickle
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import domain
import policies
from domain.engine.contexts import contexts
from infra.access import Access, Caller, Row, Rows, access
from infra.log.records import Commit, EventRecord, Record, decode_event, encode
from infra.processes.time_limit import limited
from infra.settings import Settings
from policies.engine.outbox import view_of
from policies.engine.policy import discover
from policies.engine.public_schema import NothingPublic, publication
from projections.engine.queries.query import discover as queries
from projections.engine.views.core_views import all_views
from projections.engine.views.queries import Readable
from projections.engine.views.view import Kind
from tools import release_check
from tools.golden_results import released_views
from tools.migrations import migrate
from tools.testing.facts import facts
from tools.testing.fixtures import ROOT
from tools.testing.given_views import answered
from tools.testing.histories import SEED, check, check_publication, histories, time_limit, unreached

# The modules that do no input or output and read no clock. All others are refused.
PURE = {
    *("__future__", "abc", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "hmac", "itertools", "math"),
    *("operator", "re", "statistics", "string", "types", "typing", "unicodedata"),
    *("pydantic", "pydantic_core", "domain"),
}
FORMATS = {"binascii", "csv", "ipaddress", "json", "struct", "zlib"}
"""What `decode` and `verify` of a source may need, too."""
CLOCKS = {"now", "utcnow", "today"}
REACHES_OUT = {"open", "print", "input", "eval", "exec", "compile", "__import__", "breakpoint"}

EVENTS = [event for context in contexts().values() for event in context.events.values()]
COMMANDS = [command for context in contexts().values() for command in context.commands.values()]


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    """What never ends is ended as in production, and named."""
    with time_limit():
        yield


def impurities(source: str, pure: Set[str] = PURE) -> Iterator[str]:
    """What in a module's text is not pure, each with its line. `pure`: the modules that it may import."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if alias.name.partition(".")[0] not in pure]
            case ast.ImportFrom(module="uuid", names=names):  # its functions read the clock, or are random
                found = [alias.name for alias in names if alias.name != "UUID"]
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] not in pure:
                found = [module]
            case ast.Attribute(attr=name) if name in CLOCKS:
                found = [name]
            case ast.Name(id=name, ctx=ast.Load()) if name in REACHES_OUT:  # a field may have the name
                found = [name]
            case _:
                continue
        yield from (f"line {node.lineno}: {name}" for name in found)


def test_the_domain_is_pure() -> None:
    """It decides by its arguments alone: no clock, no chance, no input or output, nothing of the program."""
    place = Path(domain.__path__[0])
    files = [file for file in place.rglob("*.py") if file.relative_to(place).parts[0] != "engine"]
    assert {file.name: found for file in files if (found := list(impurities(file.read_text())))} == {}


def test_the_policies_are_pure() -> None:
    """The same wishes follow from an event whenever it is read."""
    files = Path(policies.__path__[0]).glob("*.py")
    pure = PURE | FORMATS | {"policies"}
    found = {file.name: found for file in files if (found := list(impurities(file.read_text(), pure)))}
    assert found == {}, f"it may import {', '.join(sorted(pure))}"


@pytest.fixture(scope="module")
def who() -> Access:
    """The service's own access.py. One that was made before there was any has none, and needs it for SAMEFOLD_AUTH=jwt only."""
    if not (ROOT / "access.py").exists():
        pytest.skip("there is no access.py (docs/access.md)")
    return access()


@pytest.fixture(scope="module")
def callers(who: Access) -> list[Caller]:
    """One without rights, and for each text in access.py one who has it as a role and as a scope."""
    tree = ast.parse(Path(inspect.getfile(who.may_send)).read_text())
    texts = {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    some = [frozenset[str](), *(frozenset({text}) for text in sorted(texts))]
    return [Caller("anybody", rights, rights) for rights in some]


def test_access_is_pure(who: Access) -> None:
    """The same caller may do the same, whenever it asks."""
    source = Path(inspect.getfile(who.may_send)).read_text()
    assert [one for one in impurities(source) if not one.endswith(": infra.access")] == []


@settings(deadline=None)
@for_all(data=st.data())
def test_access_answers_for_every_command_and_names_rows_that_there_are(
    who: Access, callers: list[Caller], data: st.DataObject
) -> None:
    caller = data.draw(st.sampled_from(callers))
    for context in contexts().values():
        for cls in context.commands.values():
            command = data.draw(facts(cls))
            texts = [text for one in fields(cls) if isinstance(text := getattr(command, one.name), str)]
            caller = replace(caller, subject=data.draw(st.sampled_from([caller.subject, *texts])))
            answer = limited(who.may_send, caller, f"{context.name}/1", command)
            if isinstance(answer, Row):
                view = all_views()[answer.view]
                assert {column.name for column in view.key} <= answer.columns.keys() <= names_in(view), answer
            else:
                assert isinstance(answer, bool), cls


def test_access_answers_for_every_view_and_query_and_names_columns_that_there_are(
    who: Access, callers: list[Caller]
) -> None:
    found: list[Readable] = [*all_views().values(), *queries().values()]
    for caller, view in product(callers, found):
        answer = limited(who.may_read, caller, view.name)
        if isinstance(answer, Rows):
            assert all({*columns} <= names_in(view) for columns in answer.shape), answer
        else:
            assert isinstance(answer, bool), view.name


def names_in(view: Readable) -> set[str]:
    return {column.name for column in view.columns}


def test_states_views_and_policies_take_what_commands_lead_to() -> None:
    """And end with the same rows, live and rebuilt. What no command led to is a note: a test of its own can show what is rare."""
    views = [view for view in all_views().values() if view.kind is not Kind.OUTCOMES]
    folds = [view.function for view in views if not view.is_system]
    files = {inspect.getfile(one) for one in (*folds, *(policy.react for policy in discover().values()))}
    views += [view_of(policy) for policy in discover().values()]
    made = histories(contexts())
    for view in views:
        check(view, contexts(), made)
    with suppress(NothingPublic):
        check_publication(publication(), made)
    if missing := unreached(contexts(), views, files, made):
        pytest.skip(f"no fault found, but generated commands (seed {SEED}) never led to {', '.join(missing)}")


@settings(deadline=None)
@for_all(data=st.data())
def test_every_event_comes_back_from_the_log_as_it_went_in(data: st.DataObject) -> None:
    for cls in EVENTS:
        event = data.draw(facts(cls))
        written = EventRecord(cls.__name__, msgspec.Raw(msgspec.json.encode(event)))
        commit = Commit("context/1", 1, [written], "command", 0, "", "accepted", None, epoch=0, seq=1)
        read = decode_event(Record(0, 0, 0, None, encode(commit)))
        assert isinstance(read, Commit)
        body = read.events[0].data
        assert msgspec.json.decode(body, type=cls) == event
        assert TypeAdapter(cls).validate_json(bytes(body)) == event, (
            "a command with these values would be accepted again"
        )


def test_all_that_was_released_is_read_and_folded_as_it_was() -> None:
    """Bodies of every released version too. `samefold events check` says the same, and what to write."""
    assert release_check.check(released_views()).refused == []


@settings(deadline=None)
@for_all(data=st.data())
def test_every_command_comes_in_through_json_as_it_was_meant(data: st.DataObject) -> None:
    for cls in COMMANDS:
        command = data.draw(facts(cls))
        assert TypeAdapter(cls).validate_json(msgspec.json.encode(command)) == command


@settings(deadline=None, max_examples=10)
@for_all(data=st.data())
def test_commands_and_events_can_be_sent_to_another_process(data: st.DataObject) -> None:
    for cls in [*COMMANDS, *EVENTS]:
        fact = data.draw(facts(cls))
        assert pickle.loads(pickle.dumps(fact)) == fact


def test_commands_and_events_are_frozen_and_slotted_and_name_their_fields() -> None:
    for cls in [*COMMANDS, *EVENTS]:
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
        assert "__slots__" in vars(cls), cls
        assert all(field.kw_only for field in fields(cls)), cls


def test_queries_name_views_and_columns_that_there_are() -> None:
    assert all(query.views for query in queries().values())


def test_queries_give_the_columns_that_they_declare(world: Settings) -> None:
    """PostgreSQL says of which types they are."""
    migrate.upgrade(world)
    for query in queries().values():
        answered(world, query.name, **{one.name: None for one in query.parameters})


def test_migrations_make_every_table_that_the_code_declares(world: Settings) -> None:
    """Fails where a context or view is new or has a raised version: `samefold db revision` writes the migration."""
    migrate.upgrade(world)
    migrate.check(world)
