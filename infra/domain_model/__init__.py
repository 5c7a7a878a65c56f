"""How the files in `domain/` are found, checked, and their states stored.

Samefold's: an update replaces it.
"""
