"""The business and nothing else: one pure file per bounded context, on the standard library and pydantic alone.

Yours, all of it; `language.py`, the words that contexts are written in, is Samefold's.
"""
