"""From commits of the log to changes of rows: pure, in memory.

Samefold's: an update replaces it.
"""
