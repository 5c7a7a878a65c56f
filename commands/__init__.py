"""The write side: from a record in `commands` to a commit in `events`. Names no event and no command of any domain.

Samefold's: an update replaces it.
"""
