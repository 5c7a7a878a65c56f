"""The agent: reads the log as it grows and commits batch after batch.

Samefold's: an update replaces it.
"""
