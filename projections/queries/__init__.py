"""Questions over one view or several: one file per query, found by being here, served at `GET /queries/NAME` (docs/queries.md).

Yours. A file whose name begins with `_` is no query.
"""
