"""The read side: one file per view, and the engine that folds them and commits rows and positions together."""
