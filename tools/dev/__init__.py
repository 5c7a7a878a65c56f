"""A real Kafka and a real PostgreSQL on this machine, for development and tests.

Samefold's: an update replaces it.
"""
