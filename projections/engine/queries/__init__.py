"""Queries of the author's, over several views: their declaration, the check of their SQL, and the statement that answers them.

Samefold's: an update replaces it.
"""
