"""Rows and positions in PostgreSQL: a batch is one transaction.

Samefold's: an update replaces it.
"""
