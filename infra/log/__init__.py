"""The log: records, the rule by which they are read, topics, and Kafka's clients.

Samefold's: an update replaces it.
"""
