"""The archive: the raw log in Parquet files, of which a table in PostgreSQL is the only list (docs/archive.md).

Samefold's: an update replaces it.
"""
