"""How fast Samefold's own processes are, beside what a user would pick instead.

Not part of a new service: delete it when you like.
"""
