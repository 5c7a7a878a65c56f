"""make test: pure, and quick. Personal values: what an author declares, and how a command's are sealed before they are appended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    Json,
    OnErrorOmit,
    SkipValidation,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    computed_field,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType, TypedDict

from commands import client
from commands.decision import Versioned, decide
from commands.intake import Intake, fingerprint_of, receive, validator
from commands.sealing import NotSealed, Unsealed, holds_token
from domain.engine.contexts import BadContext, Context
from domain.engine.personal import tokens
from domain.engine.personal.fields import is_personal, sealed_validator, subject_field
from domain.engine.personal.keys import DataKey
from domain.language import TOKEN, Personal, PersonalText, SubjectId, Text, fact
from infra.log.partitioner import partition_of
from infra.log.records import Command, Commit, Record, encode
from infra.settings import Settings
from policies.engine import outbox
from policies.engine.policy import Policy, Send
from projections.engine.views.event_context import At
from tests.engine.domain import customers
from tests.engine.domain.customers import CUSTOMERS, CustomerRegistered, LetterWritten, Register, State, WriteLetter
from tests.engine.purse import Fill
from tools.testing.facts import facts

KEY = DataKey("0123456789abcdef", bytes(range(32)))
KEYS = {KEY.id: KEY.key}
OTHER = DataKey("fedcba9876543210", bytes(32))
INTAKE = Intake("topic", 4, contexts={"customers": CUSTOMERS})
ADA: dict[str, Any] = {
    "name": "Ada Lovelace",
    "addresses": [{"street": "St James's Square", "country": "UK"}, {"street": ""}],
    "notes": {"b": "likes “numbers”", "a": None},
}
SECRETS = ("Ada", "Square", "numbers")


def command(kind: str, body: bytes | dict[str, Any], stream: str = "customers/1", command_id: str = "c") -> Command:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Command(command_id, stream, kind, msgspec.Raw(data))


def sealed(given: Command, key: DataKey = KEY) -> Command:
    return Unsealed(given, CUSTOMERS.commands[given.type]).sealed(key)


def kind_of(one: Any, *default: Any, check: Any = None, **others: Any) -> type:
    """A command with a field of this type, with a default or none, others, and a validator of the class."""
    names: dict[str, Any] = {"__module__": __name__, "__annotations__": {"one": one, **others}, "check": check}
    return fact(type("Kind", (), names | ({"one": default[0]} if default else {})))


def decided(given: Command) -> Commit:
    record = Record(partition_of(given.stream, 4), 0, 0, given.stream.encode(), encode(given))
    return decide(receive(record, INTAKE), Versioned(0, State()), epoch=1, seq=1, max_bytes=900_000).commit


def test_sealed_values_are_those_of_the_body_and_nothing_else_changes() -> None:
    notes, addresses = b'{"b":"likes \\u201cnumbers\\u201d", "a":null}', b'[{"street":"x","country":"UK"}]'
    body = b' {"notes": ' + notes + b',"name" :"Ada Lovelace",  "addresses":' + addresses + b"}"
    found = bytes(sealed(command("Register", body)).data)
    assert not any(secret.encode() in found for secret in SECRETS)
    assert len(TOKEN.findall(found.decode())) == 3
    assert json.loads(tokens.opened(found, KEYS)) == json.loads(body)
    assert b'"UK"' in found


@given(facts(Register) | facts(WriteLetter))
def test_every_command_is_sealed_as_the_handler_wants_it(plain: Register | WriteLetter) -> None:
    kind: Any = type(plain)
    found = bytes(sealed(command(kind.__name__, msgspec.json.encode(plain))).data)
    assert sealed_validator(kind)(found) == msgspec.json.decode(found, type=kind)
    assert validator(kind)(tokens.opened(found, KEYS)) == plain


def test_a_command_that_is_sealed_again_has_the_same_fingerprint_and_another_one_has_not() -> None:
    first = fingerprint_of(sealed(command("Register", ADA)))
    assert fingerprint_of(sealed(command("Register", dict(reversed(ADA.items()))))) == first
    assert fingerprint_of(sealed(command("Register", ADA | {"name": "Ada"}))) != first
    assert fingerprint_of(sealed(command("Register", ADA), OTHER)) != first


def test_equal_values_differ_in_each_place_command_and_stream() -> None:
    twice = ADA | {"mail": ADA["name"]}
    others: list[dict[str, Any]] = [{}, {"command_id": "d"}, {"stream": "customers/2"}]
    bodies = [bytes(sealed(command("Register", twice, **other)).data).decode() for other in others]
    found = [token[0] for body in bodies for token in TOKEN.finditer(body)]
    assert len({*found}) == len(found) == 3 * 4


def test_a_subject_is_the_stream_or_what_the_command_names() -> None:
    assert Unsealed(command("Register", ADA), Register).subject == "customers/1"
    letter = command("WriteLetter", {"customer": "ada", "text": "Dear Ada"}, stream="letters/1")
    assert Unsealed(letter, WriteLetter).subject == "ada"


def test_a_forgotten_value_is_shown_as_its_fallback() -> None:
    found = json.loads(tokens.opened(bytes(sealed(command("Register", ADA)).data), {}))
    assert found["name"] == "a former customer"
    assert found["addresses"][0] == {"street": "(forgotten)", "country": "UK"}


@pytest.mark.parametrize(
    "body",
    [{"name": "x" * 201}, {"name": "two\nlines"}, {"name": 5}, {"name": None}, {"addresses": [{"street": ["Ada"]}]}],
)
def test_plain_text_is_checked_before_it_is_sealed(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Unsealed(command("Register", ADA | body), Register)
    with pytest.raises(ValidationError, match="64 bits"):
        Unsealed(command("Kind", {"one": 2**63, "name": "Ada"}), kind_of(int, name=Personal[Text]))


def test_what_pydantic_makes_of_a_text_is_what_is_sealed() -> None:
    kind = kind_of(Personal[Annotated[str, StringConstraints(strip_whitespace=True)]])
    for plain, kept in ((" Ada ", "Ada"), ("  ", "")):
        body = Unsealed(command("Kind", {"one": plain}), kind).sealed(KEY).data
        assert json.loads(tokens.opened(bytes(body), KEYS)) == {"one": kept}


@pytest.mark.parametrize(
    ("member", "around"),
    [("alias", Field(validation_alias="alias", serialization_alias="other")), ("one", Field(exclude=True))],
)
def test_a_value_that_can_not_be_found_in_the_body_is_never_left_there_as_plain_text(member: str, around: Any) -> None:
    kind = kind_of(Annotated[Personal[Text], around])
    with pytest.raises(NotSealed, match="must be sealed") as refusal:
        Unsealed(command("Kind", {member: "Ada"}), kind).sealed(KEY)
    assert "Ada" not in str(refusal.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name":"Ada","name":""}',
        b'{"name":"x","mail":"Ada","mail":""}',
        b'{"name":"x","addresses":[{"street":"Ada","street":""}]}',
        b'{"name":"x","notes":{"a":"Ada","a":null}}',
        b'{"name":"x","n\\u0061me":""}',
    ],
)
def test_a_member_that_occurs_twice_hides_no_plain_text(body: bytes) -> None:
    """Of two, pydantic reads the last."""
    with pytest.raises(ValueError, match="twice") as refusal:
        sealed(command("Register", body))
    assert "Ada" not in str(refusal.value)


TOKEN_TEXT = TOKEN.search(bytes(sealed(command("Register", ADA)).data).decode())[0]  # type: ignore[index]


@pytest.mark.parametrize(
    "given",
    [
        command("Register", ADA | {"name": TOKEN_TEXT}),
        command("Register", ADA | {"name": f"Ada {TOKEN_TEXT}"}),
        command("Register", ADA | {"addresses": [{"street": "x", "country": TOKEN_TEXT}]}),
        command("Register", json.dumps({"name": TOKEN_TEXT}).replace("~", "\\u007e").encode()),
        command("Register", ADA | {"notes": {TOKEN_TEXT: None}}),
        command("Register", ADA, stream=f"customers/{TOKEN_TEXT}"),
        command("Register", ADA, command_id=TOKEN_TEXT),
        msgspec.structs.replace(command("Register", ADA), correlation_id=TOKEN_TEXT),
    ],
)
def test_a_token_from_outside_is_found_wherever_it_is(given: Command) -> None:
    """An edge would open it, whoever sent it."""
    assert holds_token(given)


def test_a_text_that_only_looks_alike_is_none() -> None:
    assert not holds_token(command("Register", ADA | {"name": "~Personal~", "mail": "\\u007e~1~"}))


@pytest.mark.parametrize(("kind", "body"), [("Register", ADA), ("WriteLetter", {"customer": "a", "text": "Dear Ada"})])
def test_plain_text_in_commands_is_malformed_and_never_reaches_events(kind: str, body: dict[str, Any]) -> None:
    commit = decided(command(kind, body))
    assert commit.reason is not None
    assert commit.reason.code == "malformed"
    assert "must be sealed" in commit.reason.message
    assert not any(secret.encode() in encode(commit) for secret in SECRETS)


def test_a_sealed_command_becomes_events_and_a_state_of_tokens() -> None:
    commit = decided(sealed(command("Register", ADA)))
    assert commit.outcome == "accepted"
    assert not any(secret.encode() in encode(commit) for secret in SECRETS)
    assert (
        json.loads(tokens.opened(bytes(commit.events[0].data), KEYS))["addresses"][0]["street"] == "St James's Square"
    )


def test_decide_that_returns_plain_text_failed() -> None:
    commit = decided(sealed(command("WriteLetter", {"customer": "ada", "text": "Dear Ada", "leak": True})))
    assert commit.reason is not None
    assert commit.reason.code == "failed"
    assert re.search(r"LetterWritten: text: .*must be sealed", commit.reason.message)
    assert b"customer" not in encode(commit).replace(b"customers/1", b"")


def test_a_policy_that_sends_plain_text_gets_a_dead_letter_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand in the outbox and in `commands`, and be malformed only then."""
    monkeypatch.setattr(outbox, "contexts", lambda: {"customers": CUSTOMERS})
    at = At("customers/1")

    def wishes(name: str) -> list[Any]:
        policy = Policy("greeting", 1, lambda _event, _at: [Send("customers/2", Register(name=name))], frozenset())
        return list(outbox.view_of(policy).function(None, None, at))

    assert TOKEN_TEXT in wishes(TOKEN_TEXT)[0].body
    [dead] = wishes("Ada")
    assert re.search(r"invalid-wish: .*name: .*must be sealed", dead.dead)
    assert "Ada" not in str(dead)


def test_a_value_in_the_code_may_be_plain_or_sealed() -> None:
    assert LetterWritten(text="Dear Ada").text == "Dear Ada"
    assert LetterWritten(text=TOKEN_TEXT).text == TOKEN_TEXT
    long = tokens.sealed("x" * 200, *KEY, command_id="1", number=0)
    assert len(long) > 200
    assert LetterWritten(text=long).text == long
    for text in ("x" * 201, f"x{long}"):
        with pytest.raises(ValidationError):
            LetterWritten(text=text)


@pytest.mark.parametrize("changed", [str.lower, str.upper, str.swapcase])
def test_a_token_in_another_case_is_refused(changed: Callable[[str], str]) -> None:
    """It could never be opened: a person would look forgotten."""
    with pytest.raises(ValidationError, match="must be sealed"):
        sealed_validator(LetterWritten)(msgspec.json.encode({"text": changed(TOKEN_TEXT)}))


def test_an_empty_text_needs_no_seal() -> None:
    assert sealed_validator(Register)(b'{"name":"","mail":""}') == Register(name="")
    assert bytes(sealed(command("Register", b'{"name":""}')).data) == b'{"name":""}'


def test_the_schema_is_the_plain_texts_and_says_that_it_is_personal() -> None:
    found = TypeAdapter(Register).json_schema()
    name, street = found["properties"]["name"], found["$defs"]["Address"]["properties"]["street"]
    assert (name["type"], name["maxLength"], name["x-personal"]) == ("string", 200, True)
    assert street["x-personal"]
    assert "x-personal" not in found["$defs"]["Address"]["properties"]["country"]


def test_personal_classes_are_found_with_their_parts() -> None:
    assert all(map(is_personal, (Register, WriteLetter, CustomerRegistered, customers.Address)))
    assert not is_personal(Fill)
    assert (subject_field(WriteLetter), subject_field(Register)) == ("customer", None)


CustomerId: Any = TypeAliasType("CustomerId", SubjectId)


def test_a_subject_is_found_under_any_name_of_its_type() -> None:
    @fact
    class Rename:
        customer: Annotated[CustomerId, Field(alias="of", description="Whose name it is")]
        default: Personal[Text]
        """A keyword of JSON Schema as a field's name."""

    assert subject_field(Rename) == "customer"
    assert Unsealed(command("Rename", {"of": "ada", "default": "Ada"}), Rename).subject == "ada"


Name: Any = Personal[Text]
T = TypeVar("T")


@fact
class Node:
    name: Name
    below: Node | None = None


@fact
class Box(Generic[T]):
    value: T


@fact
class Named:
    """One of two, which a field tells apart."""

    kind: Literal["named"]
    name: Name


@fact
class Numbered:
    kind: Literal["numbered"]
    number: int


class Pair(NamedTuple):
    number: int
    name: Name


class Members(TypedDict):
    type: Name


FORMS: list[tuple[Any, Any]] = [
    (TypeAliasType("Alias", Name), "Ada"),
    (TypeAliasType("Quoted", "list[Name]"), ["Ada"]),
    (NewType("New", Name), "Ada"),
    (Annotated[Name, Field(description="Who it is")], "Ada"),
    (Annotated[tuple[Name, ...], Field(max_length=3), AfterValidator(tuple)], ["Ada"]),
    (Sequence[Name], ["Ada"]),
    (Mapping[str, dict[int, Name | None]], {"a": {"1": "Ada"}}),
    (Annotated[Named | Numbered, Field(discriminator="kind")], {"kind": "named", "name": "Ada"}),
    (tuple[Node | None, ...], [{"name": "Ada", "below": {"name": "Ada"}}]),
    (Box[Name], {"value": "Ada"}),
    (Pair, [1, "Ada"]),
    (Members, {"type": "Ada"}),
]


@pytest.mark.parametrize(("form", "value"), FORMS)
def test_a_personal_text_is_found_and_sealed_in_whatever_form_it_is_declared(form: Any, value: Any) -> None:
    kind = kind_of(form)
    context_with(kind)
    body = bytes(Unsealed(command("Kind", {"one": value}), kind).sealed(KEY).data)
    assert b"Ada" not in body
    assert json.loads(tokens.opened(body, KEYS)) == {"one": value}


def copied(self: Any) -> Any:
    """A validator that copies a value to a field beside it."""
    object.__setattr__(self, "beside", self.one)
    return self


def in_words(self: Any) -> Any:
    object.__setattr__(self, "beside", f"{self.one}, of course")
    return self


def refused(self: Any) -> Any:
    raise ValueError(f"{self.one} is nobody")


def broken(text: str) -> str:
    raise KeyError(text)


COMPUTED: Any = computed_field(return_type=str)(property(lambda self: self.one))
COPIES: list[dict[str, Any]] = [
    {"check": model_validator(mode="after")(copied)},
    {"check": model_validator(mode="after")(in_words)},
    {"check": model_validator(mode="after")(refused)},
    {"check": field_validator("beside")(classmethod(lambda _cls, _value, info: info.data["one"]))},
    {"computed": COMPUTED},
    {"__post_init__": in_words},
    {"__post_init__": refused},
]


@pytest.mark.parametrize("more", COPIES)
def test_what_a_class_makes_of_its_own_values_is_sealed_or_refused(more: dict[str, Any]) -> None:
    names = {"__annotations__": {"one": Name, "beside": str}, "beside": "", **more}
    kind: Any = fact(type("Kind", (), names))
    context_with(kind)
    for body in ({"one": "Ada"}, {"one": "Ada", "beside": "x"}):
        try:
            found = bytes(Unsealed(command("Kind", body), kind).sealed(KEY).data)
        except ValidationError as error:
            found = str(error.errors(include_url=False, include_input=False)).encode()
        assert b"Ada" not in found


def test_a_text_that_its_checks_make_another_type_of_is_refused_by_name() -> None:
    kind = kind_of(Personal[Annotated[str, AfterValidator(date.fromisoformat)]])
    with pytest.raises(ValidationError, match="a personal text stays a text"):
        Unsealed(command("Kind", {"one": "2000-01-01"}), kind)


def test_a_defect_in_a_command_s_checks_is_told_by_samefold_send_without_the_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = context_with(kind_of(Personal[Annotated[str, AfterValidator(broken)]]))
    monkeypatch.setattr(client, "contexts", lambda: {"things": context})
    monkeypatch.setattr(client, "has_personal_fields", lambda: True)
    sent = command("Kind", {"one": "Ada"}, stream="things/1")
    with pytest.raises(client.BadCommandLine, match="the checks or upcasters of Kind failed with KeyError") as refusal:
        client.sealed(Settings(), {1: sent}, tmp_path)
    assert "Ada" not in str(refusal.value)


def test_the_pattern_is_that_of_tokens() -> None:
    assert TOKEN.pattern == tokens._TOKEN.pattern


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


class Open(BaseModel):
    """It takes unknown fields, and ignores them; they stay in the body."""

    name: Personal[str]


def context_with(kind: type) -> Context:
    return Context("things", {kind.__name__: kind}, {}, Nothing, 1, lambda _c, _s: [], lambda state, _: state)


Address: Any = customers.Address


@pytest.mark.parametrize(
    "kind",
    [
        Name | None,
        Name | int | UUID | Literal["nobody"],
        Address | Name,
        Address | str | None,
        tuple[Name, ...] | tuple[int, ...] | dict[str, Name],
    ],
)
def test_a_personal_text_may_be_one_of_several_types(kind: Any) -> None:
    context_with(kind_of(kind))


@fact
class Plain:
    street: str


@fact
class Parts:
    """Whose parts stand elsewhere too, and are written once in the schema."""

    one: customers.Address
    others: frozenset[customers.Address]


SKIPPED: Any = SkipJsonSchema
REFUSED: list[tuple[str, Any]] = [
    ("field, one, that is personal, but no text", Personal[int]),
    ("no text", Personal[UUID]),
    ("keys of a mapping", dict[Name, int]),
    ("set", frozenset[Name]),
    ("set", Parts),
    ("twice", Annotated[Name, PersonalText("x")]),
    ("unknown ones", Open),
    ("within one", SubjectId | None),
    ("many people", Annotated[SubjectId, PersonalText()]),
    ("SubjectId, one, that .* hides", Annotated[SubjectId, SKIPPED()]),
    ("union", Name | str),  # a name that is too long for the one would pass as the other
    ("union", tuple[Name | Any, ...]),
    ("union", Name | bytes),
    ("union", Name | Path),
    ("union", Name | Annotated[str | int, Field(description="x")]),
    ("union", tuple[Name, ...] | tuple[str, ...]),
    ("union", dict[str, Name] | dict[str, str]),
    ("union", Address | Plain),
    ("union", Address | dict[str, str]),
]
ERRORS_OMITTED: Any = OnErrorOmit
AS_JSON: Any = Json
SWALLOWS: Any = WrapValidator(lambda value, check: check(value))
HIDDEN: list[Any] = [
    Annotated[Text, PersonalText(), WithJsonSchema({"type": "string"})],
    Annotated[Name, Field(json_schema_extra={"x-personal": False})],
    Annotated[Name, SKIPPED()] | None,
    tuple[Name, Annotated[Name, WithJsonSchema({"type": "string"})]],
    Annotated[tuple[Address, ...], WithJsonSchema({"type": "array"})],
    Annotated[Name, SkipValidation],
    Annotated[Name, GetPydanticSchema(lambda _kind, _handler: core_schema.str_schema())],
    list[ERRORS_OMITTED[Name]],
    AS_JSON[Name],
    Annotated[Name, BeforeValidator(str)],
    Annotated[Name, SWALLOWS],
    Annotated[dict[str, Name], SWALLOWS],
    Annotated[Name, AfterValidator(str.upper)],
    Annotated[Text, PersonalText(), Field(max_length=50)],
]
"""What hides the mark, has the plain text before it is sealed, or checks the token instead of it."""
SAME: Any = classmethod(lambda _cls, value: value)
SAME_AFTER: Any = classmethod(lambda _cls, value, check: check(value))
CHECKS: list[Any] = [
    model_validator(mode="before")(SAME),
    model_validator(mode="wrap")(SAME_AFTER),
    field_validator("one", mode="before")(SAME),
    field_validator("one")(SAME),
]
UNSEALED = [
    *(("plain text could stay", kind_of(kind)) for kind in HIDDEN),
    *(("plain text could stay", kind_of(Name, check=check)) for check in CHECKS),
    ("plain text could stay", kind_of(Annotated[str, Field(json_schema_extra={"x-personal": True})])),
    ("default", kind_of(Personal[str], "nobody")),
    ("default", kind_of(tuple[Address, ...], field(default_factory=lambda: (Address(street="x"),)))),
    ("two subjects", kind_of(SubjectId, other=SubjectId, name=Personal[str])),
    ("many people", kind_of(SubjectId, "", name=Personal[str])),
]
"""What could not be sealed, and what nothing would seal or forget."""


@pytest.mark.parametrize(
    ("wrong", "kind"), [*((wrong, kind_of(kind, name=Personal[str])) for wrong, kind in REFUSED), *UNSEALED]
)
def test_personal_fields_that_can_not_be_sealed_or_forgotten_are_refused_at_start(wrong: str, kind: type) -> None:
    with pytest.raises(BadContext, match=wrong):
        context_with(kind)
