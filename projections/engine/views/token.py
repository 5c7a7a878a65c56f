"""Position tokens: how far a client has seen the log, as text that it sends back: `1~<topic id>.<partition>-<offset>…`.

A token is a vector: the next offset of each partition of each topic, by the topic's id. Merging takes the larger of each, in any
order, so a client can keep one token for all answers that it got.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from infra.errors import SamefoldError

LONGEST = 65_536
"""Most characters of a token: enough for 4,096 partitions."""

_NUMBER = r"(?:0|[1-9][0-9]{0,17})"  # below 2**63
_TOPIC = re.compile(rf"([A-Za-z0-9_-]{{1,64}})((?:\.{_NUMBER}(?:-{_NUMBER})+)+)")
_FORMAT = "1"
_URL_SAFE = str.maketrans("+/", "-_")
"""librdkafka returns ids in base64 with plus and slash; Kafka's own tools and tokens use the URL-safe alphabet."""


class BadToken(SamefoldError):
    """A text that is not a position token."""

    is_public = True


class OtherLog(SamefoldError):
    """A position token of another log."""

    is_public = True


@dataclass(frozen=True)
class Token:
    """{topic id: {partition: next offset}}. Partitions that it does not name are not required."""

    positions: Mapping[str, Mapping[int, int]]

    def __post_init__(self) -> None:
        if any("+" in topic_id or "/" in topic_id for topic_id in self.positions):
            safe = {topic_id.translate(_URL_SAFE): offsets for topic_id, offsets in self.positions.items()}
            object.__setattr__(self, "positions", safe)

    @classmethod
    def of(cls, topic_id: str, next_offsets: Mapping[int, int]) -> Self:
        """The token of one log."""
        return cls({topic_id: dict(next_offsets)})

    @classmethod
    def parse(cls, text: str) -> Self:
        """The token that `str()` wrote as `text`. Raises BadToken."""
        form, *topics = text.split("~") if len(text) <= LONGEST else [""]
        if form != _FORMAT:
            raise _bad()
        positions: dict[str, dict[int, int]] = {}
        for topic in topics:
            match = _TOPIC.fullmatch(topic)
            if match is None or match[1] in positions:
                raise _bad()
            positions[match[1]] = _partitions(match[2])
        return cls(positions)

    @classmethod
    def merged(cls, tokens: Iterable[Token]) -> Self:
        """The token that covers exactly all of these."""
        merged: dict[str, dict[int, int]] = {}
        for token in tokens:
            for topic_id, partitions in token.positions.items():
                known = merged.setdefault(topic_id, {})
                for partition, offset in partitions.items():
                    known[partition] = max(offset, known.get(partition, 0))
        return cls(merged)

    def merge(self, other: Token) -> Token:
        return Token.merged((self, other))

    def covered_by(self, other: Token) -> bool:
        """Whether `other` is at least as far everywhere."""
        return all(
            other.positions.get(topic_id, {}).get(partition, 0) >= offset
            for topic_id, partitions in self.positions.items()
            for partition, offset in partitions.items()
        )

    def require_log(self, topic_id: str, partitions: int) -> None:
        """Raises OtherLog unless the token names only this topic, and only partitions that it has."""
        for named, offsets in self.positions.items():
            if named != topic_id.translate(_URL_SAFE) or max(offsets, default=0) >= partitions:
                raise OtherLog(
                    "The position token is of another log than this service's.",
                    "Send only tokens from this service's answers. Discard tokens from before its log was recreated.",
                )

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:  # made once: reads that share a query share its position
        topics = (f"~{topic_id}{''.join(_runs(self.positions[topic_id]))}" for topic_id in sorted(self.positions))
        return _FORMAT + "".join(topics)


def _runs(partitions: Mapping[int, int]) -> Iterator[str]:
    """Consecutive partitions are one run, which names only the first."""
    following = None
    for partition in sorted(partitions):
        yield f"-{partitions[partition]}" if partition == following else f".{partition}-{partitions[partition]}"
        following = partition + 1


def _partitions(text: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for run in text.split(".")[1:]:
        first, *offsets = map(int, run.split("-"))
        for partition, offset in enumerate(offsets, start=first):
            if partition in found:
                raise _bad()
            found[partition] = offset
    return found


def _bad() -> BadToken:
    return BadToken(
        "This is not a position token.", "Send the `position` of an answer, or its header Samefold-Position, unchanged."
    )
