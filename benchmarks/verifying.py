"""`samefold verify`, the product's own function: prints how many commits it folded and how many differences it found, as JSON."""

from __future__ import annotations

from benchmarks.child import tell


def main() -> None:
    from infra.settings import Settings
    from projections.engine.operate.verify import verify
    from projections.engine.views.core_views import all_views

    found = verify(Settings(), all_views())
    tell({"commits": found.commits, "differences": found.differences})


if __name__ == "__main__":
    main()
