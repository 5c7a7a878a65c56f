"""HTTP: commands, their outcomes and the views. Names no event, no command and no view.

Samefold's: an update replaces it.
"""
