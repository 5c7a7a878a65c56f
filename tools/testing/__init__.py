"""What tests need of Samefold: a real Kafka, PostgreSQL and Spark as fixtures, and values made from the domain's own types.

Samefold's: an update replaces it.
"""
