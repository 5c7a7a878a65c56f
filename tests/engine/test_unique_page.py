"""`docs/unique.md` is walked from the first line to the last, and what it says is tried in every order of arrival.

The model is the page's own `decide`, `evolve` and `react`. It assumes less than Samefold gives: each wish and each follow-up arrives
once, but whenever it likes and in any order, timers too. A process killed anywhere is one whose wishes arrive later; a client killed
anywhere is one that sends no more, so every state in which nothing is on its way is an end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from infra.testing.fixtures import ROOT
from policies.engine import At, Send
from tests.engine.pages import Author, author, blocks, check_files, data, files, home, hotel, made, source  # noqa: F401
from tests.engine.test_new_service import Tree

PAGE = (ROOT / "docs" / "unique.md").read_text()
A, B = "a" * 64, "b" * 64
MODULES = ("domain.emails", "domain.members", "policies.emails")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.integration
def test_the_pages_files_pass_the_checks_of_a_service(hotel: Tree) -> None:  # noqa: F811
    check_files(PAGE, hotel)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.integration
def test_the_page_from_the_first_line_to_the_last(author: Author) -> None:  # noqa: F811
    for language, block in blocks(PAGE):
        author.walk(language, block)


class Sent(NamedTuple):
    """A command on its way, and who gets the follow-ups."""

    stream: str
    command: Any
    then: Any = None
    otherwise: Any = None
    source: str = ""


class Place(NamedTuple):
    """All that is: the streams' states, what each client has still to send, and what is on its way."""

    streams: tuple[tuple[str, Any], ...]
    clients: tuple[tuple[Sent, ...], ...]
    on_their_way: tuple[Sent, ...]


class Pages:
    """The page's modules."""

    def __init__(self, patch: pytest.MonkeyPatch, old: str = "", new: str = "") -> None:
        texts = {path: text for path, text in files(PAGE) if not path.startswith("tests/")}
        assert not old or sum(text.count(old) for text in texts.values()) == 1, f"the page has {old!r} elsewhere, too"
        for name in MODULES:
            module = ModuleType(name)
            patch.setitem(sys.modules, name, module)
            code = texts[f"{name.replace('.', '/')}.py"]
            exec(compile(code.replace(old, new) if old else code, name, "exec"), vars(module))  # noqa: S102
        self.emails, self.members, self.policy = (sys.modules[name] for name in MODULES)

    def of(self, stream: str) -> ModuleType:
        return self.emails if stream.startswith("emails/") else self.members

    def claim(self, member: str, email: str) -> Sent:
        return Sent(f"emails/{email}", self.emails.ClaimEmail(member=member))

    def change(self, member: str, email: str) -> Sent:
        return Sent(f"members/{member}", self.members.ChangeEmail(email=email))

    def leave(self, member: str) -> Sent:
        return Sent(f"members/{member}", self.members.Leave())

    def refuse(self, member: str, change: int) -> Sent:
        """An operator's, for a confirmation that was thought to be lost."""
        return Sent(f"members/{member}", self.members.RefuseEmail(change=change, refusal="lost"))

    def after(self, place: Place) -> Iterator[Place]:
        """Whatever may be next: a client sends, or something arrives."""
        for number, rest in enumerate(place.clients):
            if rest:
                clients = (*place.clients[:number], rest[1:], *place.clients[number + 1 :])
                yield self.decided(place._replace(clients=clients), rest[0])
        for number, sent in enumerate(place.on_their_way):
            if number == 0 or sent != place.on_their_way[number - 1]:
                rest = place.on_their_way[:number] + place.on_their_way[number + 1 :]
                yield self.decided(place._replace(on_their_way=rest), sent)

    def decided(self, place: Place, sent: Sent) -> Place:
        context, streams = self.of(sent.stream), dict(place.streams)
        state = streams.get(sent.stream, context.State())
        try:
            events = context.decide(sent.command, state)
        except context.Refusal as refusal:
            events, follows = [], sent.otherwise
            if follows and hasattr(follows, "refusal"):
                follows = type(follows)(change=follows.change, refusal=refusal.code)
        else:
            follows = sent.then
        found = [Sent(sent.source, follows)] if follows else []
        for event in events:
            state = context.evolve(state, event)
            if isinstance(event, (self.emails.EmailClaimed, self.members.EmailRequested, self.members.EmailGivenUp)):
                wishes: list[Send] = list(self.policy.react(event, At(sent.stream)))
                found += [Sent(one.stream, one.command, one.then, one.otherwise, sent.stream) for one in wishes]
        streams[sent.stream] = state
        on_their_way = sorted((*place.on_their_way, *found), key=repr)
        return Place(tuple(sorted(streams.items())), place.clients, tuple(on_their_way))

    def search(self, *clients: tuple[Sent, ...]) -> int:
        """Every order in which these may be sent and arrive. Raises AssertionError where a promise is broken."""
        todo = [Place((), clients, ())]
        seen = set(todo)
        while todo:
            place = todo.pop()
            self.require(place)
            for following in self.after(place):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return len(seen)

    def require(self, place: Place) -> None:
        users = [
            (state.email, name.removeprefix("members/"), state.change)
            for name, state in place.streams
            if name.startswith("members/") and state.email is not None
        ]
        streams = dict(place.streams)
        assert len({email for email, _, _ in users}) == len(users), f"two members have one address: {place}"
        for email, member, change in users:
            kept = streams[f"emails/{email}"]
            assert (kept.member, kept.change) == (member, change), f"it is free, or another's: {place}"
        if not place.on_their_way:
            used = {email for email, _, _ in users}
            for name, state in place.streams:
                if name.startswith("emails/"):
                    assert state.member is None or name.removeprefix("emails/") in used, f"it is blocked: {place}"
                else:
                    assert state.wanted is None, f"a change has no end: {place}"


def scenarios(of: Pages) -> dict[str, tuple[tuple[Sent, ...], ...]]:
    claim, change, leave, refuse = of.claim, of.change, of.leave, of.refuse
    return {
        "two members want one address, and leave": (
            (claim("ada", A), change("ada", A), leave("ada")),
            (claim("bob", A), change("bob", A), leave("bob")),
        ),
        "one claims twice and changes to the same, the other never registers": (
            (claim("ada", A), claim("ada", A), change("ada", A), change("ada", A)),
            (claim("bob", A),),
        ),
        "to another address and back": (
            (change("ada", A), claim("ada", B), change("ada", B), claim("ada", A), change("ada", A)),
            (claim("bob", A), change("bob", A)),
        ),
        "two members exchange their addresses": (
            (change("ada", A), change("ada", B), leave("ada")),
            (change("bob", B), change("bob", A)),
        ),
        "an operator ends a change that was not lost": (
            (change("ada", A), refuse("ada", 1), change("ada", A), leave("ada")),
            (change("bob", A),),
        ),
        "one who has left claims": ((leave("ada"), claim("ada", A), change("ada", A)), (change("bob", A),)),
    }


SCENARIOS = [
    "two members want one address, and leave",
    "one claims twice and changes to the same, the other never registers",
    "to another address and back",
    "two members exchange their addresses",
    "an operator ends a change that was not lost",
    "one who has left claims",
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_in_every_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Pages(monkeypatch)
    import time

    began = time.perf_counter()
    n = page.search(*scenarios(page)[name])
    print(name, n, time.perf_counter() - began)
