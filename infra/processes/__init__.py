"""How processes start, end, watch each other and hand each other work.

Samefold's: an update replaces it.
"""
