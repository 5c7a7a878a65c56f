"""Names of a service and its parts, and the names that follow from them."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

from infra.errors import SamefoldError


class BadName(SamefoldError):
    """A name that Samefold can't use for what it is to be."""


@dataclass(frozen=True, slots=True)
class Names:
    """The words for a bounded context: `rooms`, `room`, `Room`."""

    many: str
    one: str
    type: str

    def told(self, text: str) -> str:
        """A skeleton's text, which speaks of `things`, in these words."""
        for word, mine in (
            (r"(?<![a-z])things", self.many),
            (r"(?<![a-z])thing", self.one),
            ("Things", self.sentence),
            ("Thing", self.type),
        ):
            text = re.sub(rf"{word}(?![a-z])", mine, text)
        return text

    @property
    def sentence(self) -> str:
        return self.many.replace("_", " ").capitalize()


def names_of(context: str) -> Names:
    """Raises BadName unless it is one or more words in lower case, such as `rooms` or `room_bookings`."""
    module(context, "a context", "rooms")
    one = singular(context)
    return Names(context, one, "".join(word.capitalize() for word in one.split("_")))


def singular(many: str) -> str:
    """As most English nouns have it; what has no plural stays: `inventory`."""
    for end, instead in (
        ("ies", "y"),
        ("sses", "ss"),
        ("xes", "x"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("ss", "ss"),
        ("us", "us"),
        ("s", ""),
    ):
        if many.endswith(end) and len(many) > len(end) + 1:
            return many.removesuffix(end) + instead
    return many


def module(name: str, what: str, example: str) -> str:
    """A name that is to be a file of Python. Raises BadName."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > 40:
        raise BadName(
            f"{name!r} can't be the name of {what}.",
            f"Use words in lower case with underscores between them, at most 40 characters, such as `{example}`.",
        )
    return name


def class_name(name: str, what: str, example: str) -> str:
    """A name that is to be a class. Raises BadName."""
    if not re.fullmatch(r"([A-Z][a-z0-9]+)+", name) or keyword.iskeyword(name):
        raise BadName(f"{name!r} can't be the name of {what}.", f"Begin each word with a capital, such as `{example}`.")
    return name


def words(name: str) -> str:
    """`RoomAdded` as `room_added`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
