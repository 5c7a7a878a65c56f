"""What attacks Samefold: model checkers, chaos runs, mutants, generated histories.

Not part of a new service: delete it when you like.
"""
