"""The engine of the read side: what an author of a view imports from here, and nothing else.

A view is one module in `projections/`: a docstring with its question, `VERSION`, a NamedTuple for its row, and exactly
one function, whose event parameter's annotation is the subscription:

    evolve(row: Row | None, event: A | B, at: At) -> Row | None      entity view, one row per key; None deletes
    rows(event: A | B, after: State, at: At) -> Iterable[Row]        journal view, rows only ever added
    delta(event: A | B, at: At) -> Iterable[Row]                     summary view, each row a key and its increments

Samefold's: an update replaces it. Its rooms import each other one way only: views, queries, fold, store, live, rebuild, operate;
each may import those before it.
"""

from projections.engine.views.columns import First, Key, Latest, Max, Min, Sum
from projections.engine.views.event_context import At
from projections.engine.views.indexes import Index

__all__ = ["At", "First", "Index", "Key", "Latest", "Max", "Min", "Sum"]
