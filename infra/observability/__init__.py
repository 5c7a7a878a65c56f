"""Logs, metrics and traces of every process.

Samefold's: an update replaces it.
"""
