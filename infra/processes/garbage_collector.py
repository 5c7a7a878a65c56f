"""Python's garbage collector, for processes that keep many objects for long and make few cycles."""

import gc

THRESHOLDS = (2_000_000, 50, 100)


def collect_seldom() -> None:
    """Never scan the objects that exist now again, and scan new ones rarely.

    Almost everything these processes make dies by its reference count. With Python's thresholds, the collector going through
    a handler's overlay again and again took a third of its time. What a start leaves in cycles, about a megabyte, stays: to find it
    would take a tenth of the start.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
