"""What an operator asks and does: the overview, and the replay of parked streams.

Samefold's: an update replaces it.
"""
