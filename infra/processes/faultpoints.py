"""Named points on the way of a command, a batch and a build, where a test kills or freezes the process that reaches them.

Each step lies between two points. No setting turns them on: `hook` is None unless code in the process sets it, which only
`proofs/chaos/armed.py` does. A point without a hook costs one call.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

HandlerPoint: TypeAlias = Literal[
    "position loaded",  # of a partition that was just assigned or lost: nothing is appended yet
    "opening sent",  # handed to the producer, which sends at once
    "opening acknowledged",
    "opening read",  # the log up to it, that is; the next thing is to serve
    "command read",
    "states loaded",
    "commit sent",  # handed to the producer; others of the same batch follow
    "commit acknowledged",  # by the broker; the writer has not heard of it
]
AgentPoint: TypeAlias = Literal[
    "positions read",
    "seek done",
    "batch read",  # and in the hands of the thread's queue
    "compare-and-set done",  # answered: the positions are locked (only where rows are read before they are written)
    "rows sent",  # the transaction holds everything
    "COMMIT sent",  # on its way to the server, which may have carried it out
    "COMMIT acknowledged",  # the reader has not heard of it
    "view stopped",  # its COMMIT is the next statement
]
BuilderPoint: TypeAlias = Literal[
    "build pinned",
    "build part written",  # its COMMIT is the next statement
    "build part committed",
    "build ready",
    "catch-up written",  # its COMMIT is the next statement
    "switch locked",  # all positions of the agent
    "switch written",  # its COMMIT is the next statement
    "switch done",
]
ArchiverPoint: TypeAlias = Literal[
    "range read",  # of one file, out of the log
    "file written",  # under a temporary name
    "file placed",  # under its own; the manifest does not know it yet
    "file entered",  # in the manifest
    "archive swept",  # of one partition
]
LakePoint: TypeAlias = Literal[
    "dataset written",  # its new files, where no reader looks
    "dataset assembled",  # new and old files in one folder, with the manifest; the next thing is to move the link
    "dataset committed",
]
TrimmerPoint: TypeAlias = Literal[
    "trim planned",
    "archive verified",  # all that is to be cut; the next thing is to cut
    "partition trimmed",
]
SourcePoint: TypeAlias = Literal[
    "messages written",  # wishes and positions; its COMMIT is the next statement
    "messages received",
]
RelayPoint: TypeAlias = Literal[
    "wish sent",  # handed to the producer
    "wish acknowledged",  # by the broker; the relay has not heard of it
    "wishes to be marked",  # as sent; the next thing is to write it
]
SwitcherPoint: TypeAlias = Literal["activation written",]  # into the table; the next thing is to append it to the topic
PublisherPoint: TypeAlias = Literal[
    "publisher's position read",  # after producers before it were fenced
    "public records sent",  # and acknowledged, in an open transaction
    "publisher's position sent",  # the COMMIT of the transaction is next
    "publication committed",
]
KeysPoint: TypeAlias = Literal[
    "key made",  # the next thing is to append it
    "keys wrapped again",  # the next thing is to append them
    "forgetting recorded",  # in the topic; no table has it yet
    "keys destroyed",  # in the topic; what led to it is not in the tables yet
]
Point: TypeAlias = (
    HandlerPoint
    | AgentPoint
    | BuilderPoint
    | ArchiverPoint
    | LakePoint
    | TrimmerPoint
    | SourcePoint
    | RelayPoint
    | SwitcherPoint
    | PublisherPoint
    | KeysPoint
)

HANDLER: tuple[HandlerPoint, ...] = get_args(HandlerPoint)
AGENT: tuple[AgentPoint, ...] = get_args(AgentPoint)
BUILDER: tuple[BuilderPoint, ...] = get_args(BuilderPoint)
ARCHIVER: tuple[ArchiverPoint, ...] = get_args(ArchiverPoint)
LAKE: tuple[LakePoint, ...] = get_args(LakePoint)
TRIMMER: tuple[TrimmerPoint, ...] = get_args(TrimmerPoint)
RELAY: tuple[RelayPoint, ...] = get_args(RelayPoint)
PUBLISHER: tuple[PublisherPoint, ...] = get_args(PublisherPoint)

hook: Callable[[Point], None] | None = None


def reach(point: Point) -> None:
    if hook is not None:
        hook(point)
