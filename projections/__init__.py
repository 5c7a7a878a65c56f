"""The read side: one file per view, found by being here.

Yours, like `migrations/`; `engine/`, which folds, commits, rebuilds and verifies, is Samefold's.
"""
