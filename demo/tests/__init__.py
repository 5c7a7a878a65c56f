"""Tests of the demo.

Not part of a new service: delete it with `demo/`.
"""
