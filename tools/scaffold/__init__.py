"""What writes a new service and its parts: `samefold new`, `add` and `update`.

Samefold's: an update replaces it.
"""
