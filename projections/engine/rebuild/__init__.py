"""Rebuilds, in the order of `rebuild`: claim the views (`claims`), make empty tables (`builds`), fill them from the log (`load`,
which folds as `folded` does), catch up with the agents (`catch_up`), make them live (`switch`); later, drop old ones (`builds`).

Samefold's: an update replaces it.
"""
