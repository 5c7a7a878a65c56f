"""The ground floor: settings, errors, the log, the archive, the database, observability, processes, TLS. It imports nothing of the
floors above.

Samefold's: an update replaces it.
"""
