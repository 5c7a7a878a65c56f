"""What a view is: its declaration, columns, table, and how it is queried.

Samefold's: an update replaces it.
"""
