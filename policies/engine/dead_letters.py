"""Why wishes are dead letters, and the line that each has in the log."""

import logging
from collections.abc import Iterable
from enum import StrEnum

log = logging.getLogger(__name__)


class DeadReason(StrEnum):
    """The code that the column `dead` begins with. docs/policies.md says what each means, and what to do."""

    INVALID_WISH = "invalid-wish"
    BAD_MESSAGE = "bad-message"
    REFUSED = "refused"
    TOO_DEEP = "too-deep"
    ID_REUSED = "id-reused"
    REFUSED_BY_KAFKA = "refused-by-kafka"
    GONE = "gone"
    GAVE_UP = "gave-up"


def log_dead_letters(rows: Iterable[tuple[str, str, str]]) -> None:
    """Log dead letters: id, stream of the event, and why."""
    for ident, stream, dead in rows:
        log.error("wish %s of %s is a dead letter: %s", ident, stream, dead)
