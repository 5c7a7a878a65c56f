"""Verification that what readers see is the fold of the log.

Samefold's: an update replaces it.
"""
