"""The refusals of a context: what its business may say no with."""

from __future__ import annotations

from collections.abc import Iterator

from domain.language import Refusal
from infra.contexts import BadContext, Context

RECORDED = frozenset({"version-conflict", "malformed", "too-large", "misrouted", "failed"})
"""Codes that the handler itself rejects commands with."""


def refusals_of(context: Context) -> dict[str, type[Refusal]]:
    """By code, in the order of the codes: all that the context's module declares.

    Raises BadContext where two have one code, or one has a code that means something else in a recorded outcome.
    """
    found: dict[str, type[Refusal]] = {}
    module = context.decide.__module__
    own = (refusal for refusal in _below(Refusal) if refusal.__module__ == module)
    for refusal in sorted(own, key=lambda one: one.code):
        if refusal.code in found or refusal.code in RECORDED:
            raise BadContext(
                f"{module} has a refusal {refusal.__qualname__} with the code '{refusal.code}', which is taken.",
                "Give the class another name: its code is its name in kebab case.",
            )
        found[refusal.code] = refusal
    return found


def _below(root: type[Refusal]) -> Iterator[type[Refusal]]:
    for refusal in root.__subclasses__():
        yield refusal
        yield from _below(refusal)
