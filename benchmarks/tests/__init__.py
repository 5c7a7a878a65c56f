"""Tests of the benchmarks.

Not part of a new service: delete it with `benchmarks/`.
"""
