"""Personal values: sealed before they are appended, opened at the edges, unreadable for good once their subject is forgotten.

Samefold's: an update replaces it.
"""
