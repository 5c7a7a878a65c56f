"""Views of every kind over the sample bank, in modules of their own, so that worker processes and Spark find them too.

Those that park refuse a movement whose purpose carries their letter behind `POISON`.
"""

POISON = "poison:"


def refuse(purpose: str, letter: str) -> None:
    """Raises ValueError where the purpose is poison for the view of this letter."""
    if purpose.startswith(POISON) and letter in purpose.removeprefix(POISON):
        raise ValueError(f"{purpose} is nothing for {letter}")
