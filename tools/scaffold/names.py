"""Names of a service and its parts, and the names that follow from them."""

import builtins
import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from domain.language import kebab
from infra.errors import SamefoldError

COLUMNS = {"name", "line", "what", "events", "count", "index"}
"""Columns of the skeletons' views, and attributes of every tuple: a key column can't have these names."""


class BadName(SamefoldError):
    """A name that Samefold can't use for this purpose."""


@dataclass(frozen=True, slots=True)
class Names:
    """The words for a bounded context: `rooms`, `room`, `Room`."""

    many: str
    one: str
    type: str

    def apply(self, text: str) -> str:
        """A skeleton's text, which speaks of `things`, in these words; KEBAB stands for a `thing` in URLs and codes."""
        mine = {
            "things": self.many,
            "thing": self.one,
            "Things": self.many.replace("_", " ").capitalize(),
            "Thing": self.type,
            "KEBAB": kebab(self.type),
        }
        return re.sub(r"((?<![a-z])things?|Things?|KEBAB)(?![a-z])", lambda found: mine[found[0]], text)


def check_service(name: str, requirements: Path) -> None:
    """Raises BadName unless it is a name such as `hotel`, and no package that the service installs has it."""
    module(name, "a service (--name)", "hotel")
    pinned = "".join((requirements / file).read_text() for file in ("build.txt", "development.txt"))
    installed = re.findall(r"^([\w.-]+)(?:\[.*\])?==", pinned, re.MULTILINE)
    if name in {"pip", *(re.sub(r"[.-]", "_", package.lower()) for package in installed)}:
        raise BadName(
            f"'{name}' is the name of a package that the service installs.", "Choose another name with `--name`."
        )


def check_context(name: str) -> None:
    """Raises BadName unless it is one or more words in lower case, such as `rooms` or `room_bookings`."""
    from api.commands import RESERVED  # brings FastAPI, which takes long

    module(name, "a context", "rooms", most=30)
    if name in RESERVED | {"engine", "language", "service"}:
        raise BadName(f"The name '{name}' is reserved.", "Choose another name for the context.")


def names_of(context: str) -> Names:
    """The words for a context."""
    one = singular(context)
    kind = "".join(word.capitalize() for word in one.split("_"))
    return Names(context, f"{one}_id" if keyword.iskeyword(one) or one in COLUMNS else one, kind)


def singular(many: str) -> str:
    """The singular of a regular English plural; other words stay as they are: `inventory`."""
    if many.rpartition("_")[2] in ("series", "species"):
        return many
    ends = {"ies": "y", "sses": "ss", "xes": "x", "ches": "ch", "shes": "sh", "ss": "ss", "us": "us", "s": ""}
    for end, instead in ends.items():
        if many.endswith(end) and len(many) > len(end) + 1:
            return many.removesuffix(end) + instead
    return many


def module(name: str, what: str, example: str, most: int = 40) -> str:
    """A name for a Python file. Raises BadName."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name) or len(name) > most:
        raise BadName(
            f"{name!r} can't be the name of {what}.",
            f"Use words in lower case with underscores between them, at most {most} characters, such as `{example}`.",
        )
    return name


def class_name(name: str, what: str, example: str) -> str:
    """A name for a class. Raises BadName."""
    if not re.fullmatch(r"([A-Z][a-z0-9]+)+", name) or keyword.iskeyword(name) or len(name) > 40:
        raise BadName(
            f"{name!r} can't be the name of {what}.",
            f"Begin each word with a capital, at most 40 characters, such as `{example}`.",
        )
    if hasattr(builtins, name):
        raise BadName(f"{name!r} is a name of Python's own.", f"Choose another name for {what}.")
    return name


def words(name: str) -> str:
    """`RoomAdded` as `room_added`."""
    return kebab(name).replace("-", "_")
