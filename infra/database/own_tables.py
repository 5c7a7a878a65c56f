"""The names of tables, apart from their declarations: to import SQLAlchemy takes a third of a second."""

import re

OWN_TABLES = (
    "activations",
    "archive_files",
    "build_parts",
    "build_positions",
    "builds",
    "command_types",
    "event_types",
    "forgotten_subjects",
    "keys_position",
    "lanes",
    "live",
    "outbox",
    "parked",
    "personal_keys",
    "positions",
    "posts",
    "relay_leases",
    "skips",
    "stopped_views",
    "topics",
)
"""Those of `schema.py`."""

VIEW_TABLE = re.compile(r"(?P<view>.+)_v(?P<version>\d+)(_(r|(?P<past>asof_))\d+)?")
"""A table of a view, of Samefold's too: its version's, a later build's, or one of the past."""
