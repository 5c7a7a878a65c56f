"""The record of what was released: `domain/released/<context>.json`.

The log holds events of every release, and handlers may meet commands of the one before. So the record keeps the JSON Schema of each
version of each event and command, bodies that stand for what the log may hold ("golden" ones), and of each state, view, policy and
the publication its version and what it makes of these bodies (`results.py`). `samefold events release` writes it.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

import domain
from domain.engine.versions import type_of
from infra.errors import SamefoldError

FOLDER = Path(domain.__path__[0]) / "released"
Kind = Literal["events", "commands"]
KINDS: tuple[Kind, ...] = ("events", "commands")


class _Golden(TypedDict):
    body: dict[str, Any]


class _Entry(TypedDict):
    schema: dict[str, Any]
    golden: list[_Golden]


class _View(TypedDict):
    version: int
    shape: str
    results: NotRequired[str]


_Versions = Annotated[
    dict[Annotated[str, msgspec.Meta(pattern="^[1-9][0-9]{0,2}$")], _Entry], msgspec.Meta(min_length=1)
]


class _Record(TypedDict):
    events: dict[str, _Versions]
    commands: dict[str, _Versions]
    views: dict[str, _View]


class UnreadableRelease(SamefoldError):
    """A file of the record can't be read."""


def read(context: str, folder: Traversable | None = None) -> dict[str, Any]:
    """A context's record; an empty one where none was released. Raises UnreadableRelease.

    By default that of this code, which may lie in a zip file.
    """
    file = (folder or files(domain) / "released") / f"{context}.json"
    try:
        text = file.read_text(encoding="utf-8")
        if "\n<<<<<<< " in f"\n{text}":
            raise UnreadableRelease(
                f"domain/released/{file.name} has the conflict of a merge.",
                "Take the version of the branch that was deployed (`git checkout --ours` or `--theirs`), then run "
                "`samefold events check`, and release again.",
            )
        found = json.loads(text)
        msgspec.convert(found, _Record)
    except FileNotFoundError:
        return {"events": {}, "commands": {}, "views": {}}
    except (OSError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise UnreadableRelease(
            f"domain/released/{file.name} can't be read: {error}.", "Take it from version control again."
        ) from error
    return dict(found)


def golden_bodies(released: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stored type and golden body of all versions of all events or commands of a record."""
    for name, versions in released.items():
        for version, entry in versions.items():
            for one in entry["golden"]:
                yield type_of(name, int(version)), one
