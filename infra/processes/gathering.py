"""How long to gather under load: about as long as a batch takes."""

LONGEST_S = 0.05
SHARE = 2.0
"""A batch is gathered for twice as long as one takes: most of a batch's cost does not depend on its size."""


class Window:
    """How long to gather for the next batch, in seconds: a slow machine, or a store that is far away, gets fuller batches.

    It follows the time that the last batches took, and is never longer than `longest_s`, where it begins.
    """

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.seconds = self._longest_s = longest_s

    def took(self, seconds: float) -> None:
        """A batch took so long."""
        self.seconds += (min(SHARE * seconds, self._longest_s) - self.seconds) / 4
