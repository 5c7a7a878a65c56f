"""What the rest stands on: settings, the log, the database, the embedded development stack, the command line.

Samefold's: an update replaces it.
"""
