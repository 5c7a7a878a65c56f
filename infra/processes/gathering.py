"""How long to gather under load: in proportion to what a batch takes, or until as many are there as there were lately."""

LONGEST_S = 0.05
"""Gathering that takes longer would be felt."""
SHARE = 2.0
"""A batch is gathered for twice as long as one takes: most of a batch's cost does not depend on its size."""


class Window:
    """Follows the last batches, so that a slow machine, or a store that is far away, gets fuller ones.

    Few clients that all wait for their answers are not kept waiting: then no more come than came before.
    """

    def __init__(self, longest_s: float = LONGEST_S, share: float = SHARE) -> None:
        self.seconds = self._longest_s = longest_s
        """How long to gather: `share` of what a batch takes, at most `longest_s`."""
        self.enough = 0
        """There is no need to wait for more."""
        self._share = share

    def began(self, count: int) -> None:
        """A batch of so many was begun."""
        self.enough = max(count, self.enough // 2)

    def took(self, seconds: float) -> None:
        """A batch took so long."""
        self.seconds += (min(self._share * seconds, self._longest_s) - self.seconds) / 4
