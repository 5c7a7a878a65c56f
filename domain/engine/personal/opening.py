"""Personal values in what a command prints. Other edges open them with the connections that they have."""

from __future__ import annotations

import json
from typing import TypeVar

from domain.engine.personal.keys import Keys
from domain.engine.personal.tokens import key_ids, opened_value
from infra.database.connect import session
from infra.settings import Settings

T = TypeVar("T")


def shown(settings: Settings, value: T) -> T:
    """A value of JSON as people may see it: personal values, or what is shown for a forgotten one.

    Asks for the keys once, and not at all where nothing is sealed. Raises MasterKeyUnusable, DatabaseUnavailable, KafkaUnavailable.
    """
    if not (ids := key_ids(json.dumps(value, default=str))):
        return value
    keys = Keys(settings)
    with session(settings, "samefold personal values") as connection:
        keys.start(connection)
        shown: T = opened_value(value, keys.keys_for(connection, ids))
    return shown
