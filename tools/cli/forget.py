"""`samefold forget SUBJECT`: destroy the keys of somebody's personal values."""

from typing import Annotated

import typer

from domain.engine.personal.keys import Keys, require_subject
from infra.database.connect import session
from infra.settings import Settings
from tools.cli import Json, Yes, confirm
from tools.terminal import show


def forget(
    subject: Annotated[
        str, typer.Argument(help="The subject: a stream's name, or the value of a SubjectId.", show_default=False)
    ],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Destroy the keys of a subject: from now on the fallback is shown in place of its personal values. Final.

    Safe to run again. A subject without keys is forgotten too: no personal values can be written for it any more.
    """
    settings = Settings()
    require_subject(subject)
    keys = Keys(settings)
    confirm(f"Forget '{subject}' for good? No backup of Samefold's brings it back.", yes=yes)
    with session(settings, "samefold forget") as connection:
        found = keys.forget(connection, subject)
    destroyed = f"{found.keys} {'key was' if found.keys == 1 else 'keys were'} destroyed."
    nothing = "It was forgotten before." if found.before else "Nothing was found under this name: check it."
    show(
        found._asdict(),
        lambda _: [f"'{subject}' is forgotten. {destroyed if found.keys else nothing}"],
        as_json=as_json,
    )
