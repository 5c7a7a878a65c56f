"""Tests of the deciders and views, and one from end to end.

Yours; `engine/` holds Samefold's own and is not part of a new service.
"""
