"""New tables of views from the whole log, beside live traffic, and the switch to them; time travel, too.

Samefold's: an update replaces it.
"""
