"""Finds and checks the contexts in `domain/`, and says which types events and states may have.

Samefold's: an update replaces it.
"""
