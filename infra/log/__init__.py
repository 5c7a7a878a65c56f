"""The log: its records, the rule by which they are read, its topics and its clients."""
