"""How fast Samefold's own processes are, compared with what a user would pick instead.

Not part of a new service: delete it when you like.
"""
