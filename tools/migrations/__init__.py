"""Migrates the database, with Alembic: Samefold's tables, and those of this service's contexts and views.

Samefold's: an update replaces it.
"""
