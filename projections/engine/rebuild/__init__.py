"""New tables of views from the whole log, during live traffic, and the switch to them; time travel.

Samefold's: an update replaces it.
"""
