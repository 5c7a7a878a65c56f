"""For operators: the overview of views and agents, verification, the repair of parked streams, and trimming the log.

Samefold's: an update replaces it.
"""
