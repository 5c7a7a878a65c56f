"""For operators: the overview of views and agents, and the replay of parked streams.

Samefold's: an update replaces it.
"""
