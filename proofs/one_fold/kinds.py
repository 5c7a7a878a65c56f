"""The views that are folded: the sample's and the write side's, and one of each other kind."""

from __future__ import annotations

from projections.engine.views.core_views import agent_views
from projections.engine.views.view import View, view_of
from proofs.one_fold.views import extremes, holders, moves, purposes, strict


def all_kinds() -> dict[str, View]:
    """By name: entity (with and without key function), journal, summary, snapshot, outcomes; some stop at poison, some park."""
    own = [view_of(module) for module in (extremes, holders, moves, purposes, strict)]
    found = {**agent_views("core"), **{view.name: view for view in own}}
    # the histories here are of accounts only
    return {name: view for name, view in sorted(found.items()) if {*view.contexts} <= {"accounts"}}
