"""Where the folds of `projections/engine` run on Spark: thin adapters over the same functions.

Samefold's: an update replaces it.
"""
