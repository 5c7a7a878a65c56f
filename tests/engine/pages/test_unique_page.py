"""make test: a model in memory. What `docs/unique.md` says is tried in every order of arrival.

The model is the page's own `decide`, `evolve` and `react`. It assumes less than Samefold gives: each wish and each follow-up is
decided once, but at any later moment and in any order, timers too. A killed process is one whose wishes arrive later. A killed
client is one that sends no more, so every state in which nothing is on its way is an end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest

from policies.engine import At, Send
from tests.engine.pages.pages import files
from tools.testing.fixtures import ROOT

PAGE = (ROOT / "docs" / "unique.md").read_text()
A, B = "a" * 64, "b" * 64
MODULES = ("domain.emails", "domain.members", "policies.emails")


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
            exec(compile(code.replace(old, new) if old else code, name, "exec"), vars(module))
        self.emails, self.members, self.policy = (sys.modules[name] for name in MODULES)
        self.subscription: tuple[type, ...] = get_args(get_type_hints(self.policy.react)["event"])

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
            if isinstance(event, self.subscription):
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


SCENARIOS: dict[str, Callable[[Pages], tuple[tuple[Sent, ...], ...]]] = {
    "two members want one address, and leave": lambda page: (
        (page.claim("ada", A), page.change("ada", A), page.leave("ada")),
        (page.claim("bob", A), page.change("bob", A), page.leave("bob")),
    ),
    "one claims twice and changes to the same, the other never registers": lambda page: (
        (page.claim("ada", A), page.claim("ada", A), page.change("ada", A), page.change("ada", A)),
        (page.claim("bob", A),),
    ),
    "to another address and back": lambda page: (
        (
            page.change("ada", A),
            page.claim("ada", B),
            page.change("ada", B),
            page.claim("ada", A),
            page.change("ada", A),
        ),
        (page.claim("bob", A), page.change("bob", A)),
    ),
    "on and on, and then they leave": lambda page: (
        (*(page.change("ada", email) for email in (A, B, A, B)), page.leave("ada")),
        (*(page.change("bob", email) for email in (B, A)), page.leave("bob")),
    ),
    "three members": lambda page: (
        (page.claim("ada", A), page.change("ada", A), page.change("ada", B)),
        (page.claim("bob", A), page.change("bob", A)),
        (page.change("cyd", B), page.change("cyd", A), page.leave("cyd")),
    ),
    "an operator ends a change that was not lost": lambda page: (
        (page.change("ada", A), page.refuse("ada", 1), page.change("ada", A), page.leave("ada")),
        (page.change("bob", A),),
    ),
    "a member who has left claims": lambda page: (
        (page.leave("ada"), page.claim("ada", A), page.change("ada", A)),
        (page.change("bob", A),),
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_every_order_an_address_has_one_member_and_is_free_when_unused(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Pages(monkeypatch)
    assert page.search(*SCENARIOS[scenario](page)) > 25


MUTANTS = {
    "free, or another's": (
        "return replace(state, changes=change, wanted=email)",
        "return replace(state, changes=change, wanted=email, email=email, change=change)",
    ),
    "blocked": ("yield Send(at.stream, TakeBack(claim=claim), due=at.time + PATIENCE)", "yield from ()"),
    "no end": (", otherwise=refuse)", ")"),
}


@pytest.mark.parametrize("found", MUTANTS)
def test_each_promise_that_the_page_breaks_is_found(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Pages(monkeypatch, *MUTANTS[found])
    with pytest.raises(AssertionError, match=found):
        any(page.search(*scenario(page)) == 0 for scenario in SCENARIOS.values())
