"""The business rules: one pure file per bounded context, on the standard library and pydantic alone.

Yours, except `language.py` and `engine/`, which are Samefold's.
"""
