"""The names of Samefold's own tables, apart from their declarations: to import SQLAlchemy takes a third of a second."""

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
    "live",
    "outbox",
    "parked",
    "personal_keys",
    "positions",
    "skips",
    "topics",
)
"""Those of `schema.py`."""
