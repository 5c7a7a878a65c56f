"""The names of tables, apart from their declarations: to import SQLAlchemy takes a third of a second."""

import re

OWN_TABLES = (
    *("positions", "live", "stopped_views", "builds", "build_positions", "build_parts", "parked", "skips"),
    *("command_types", "event_types", "topics", "archive_files", "log_marks"),
    *("activations", "outbox", "relay_leases", "posts", "lanes", "source_positions", "received_messages"),
    *("personal_keys", "forgotten_subjects", "keys_position"),
    "operator_actions",
)
"""Those of `schema.py`: of views, of the log and its archive, of policies, of personal values, of the console."""

VIEW_TABLE = re.compile(r"(?P<view>.+)_v(?P<version>\d+)(_(r|(?P<past>asof_))\d+)?")
"""A table of a view, of Samefold's too: its version's, a later build's, or one of the past."""
