"""Samefold's own tests, with the sample bank as their service.

Not part of a new service: delete it when you delete the bank.
"""
