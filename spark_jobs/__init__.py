"""Where the folds of `projections/engine` run on Spark: thin adapters over the same functions. None yet: the local engine
(`projections/engine/local.py`, worker processes without a JVM) does all rebuilds and verifies so far."""
