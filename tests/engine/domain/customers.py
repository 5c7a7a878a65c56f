"""Customers: a bounded context with personal values of every form, for tests of forgetting."""

import sys
from dataclasses import dataclass
from typing import Annotated, TypeAlias, assert_never

from domain.engine.contexts import context_of
from domain.language import Personal, PersonalText, SubjectId, Text, fact

Name = Annotated[Text, PersonalText("a former customer")]


@fact
class Address:
    street: Personal[Text]
    country: Text = ""


@fact
class CustomerRegistered:
    name: Name
    mail: Personal[Text] = ""
    addresses: tuple[Address, ...] = ()
    notes: dict[str, Personal[str] | None] | None = None


@fact
class LetterWritten:
    text: Personal[Text]
    pages: int = 1
    subject: str = ""
    """A text around it, which is not declared personal."""


Event: TypeAlias = CustomerRegistered | LetterWritten


@fact
class Register:
    name: Name
    mail: Personal[Text] = ""
    addresses: tuple[Address, ...] = ()
    notes: dict[str, Personal[str] | None] | None = None


@fact
class WriteLetter:
    """About the customer whom it names. `leak` is what no author should do: plain text in a personal field of an event."""

    customer: SubjectId
    text: Personal[Text]
    pages: int = 1
    leak: bool = False


Command: TypeAlias = Register | WriteLetter

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class State:
    name: str = ""
    letters: int = 0


def decide(command: Command, state: State) -> list[Event]:
    match command:
        case Register(name=name, mail=mail, addresses=addresses, notes=notes):
            return [CustomerRegistered(name=name, mail=mail, addresses=addresses, notes=notes)]
        case WriteLetter(text=text, pages=pages, leak=leak):
            return [LetterWritten(text="Dear customer" if leak else text, pages=pages, subject=f"Re: {text}")]
        case _:
            assert_never(command)


def evolve(state: State, event: Event) -> State:
    match event:
        case CustomerRegistered(name=name):
            return State(name, state.letters)
        case LetterWritten():
            return State(state.name, state.letters + 1)
        case _:
            assert_never(event)


CUSTOMERS = context_of(sys.modules[__name__])
