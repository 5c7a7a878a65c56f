"""What the domain's classes become in the log: contexts, versions, schemas, releases, storable values, personal fields.

Samefold's: an update replaces it. The files next to this folder import nothing of it.
"""
