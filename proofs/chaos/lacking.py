"""Processes that lack one rule, so that the judge must find them: `… proofs.chaos.lacking --name NAME RULE MODULE`.

A run in which they pass for sound would prove nothing of the sound ones.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable

from commands import writer
from commands.writer import Action, Phase, ReadLog, Serve, Writer
from infra.log import rule as reading_rule


class ServesUnread(Writer):
    """Serves from where the database stands, without what stands in the log between there and its opening."""

    def on_opened(self, offset: int | None) -> Action:
        action = super().on_opened(offset)
        if not isinstance(action, ReadLog):
            return action
        self.last_command = self.reading.command_offset
        self.phase = Phase.SERVING
        return Serve(self.last_command + 1)


def _serve_unread() -> None:
    writer.Writer = ServesUnread  # type: ignore[misc]


def _count_every_commit() -> None:
    """Whoever wrote it, and whatever is missing before it."""
    source = inspect.getsource(reading_rule.read)
    for condition in ("entry.epoch != epoch or epoch < 0", "entry.seq != seq + 1"):
        assert source.count(condition) == 1, condition
        source = source.replace(condition, "False")
    exec(source, vars(reading_rule))


def _commit_wherever_positions_stand() -> None:
    from projections.engine.store import commit

    condition = "and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)"
    assert commit.COMPARE_AND_SET.count(condition) == 1
    commit.COMPARE_AND_SET = commit.COMPARE_AND_SET.replace(condition, "")


RULES: dict[str, Callable[[], None]] = {
    "a handler reads up to its opening": _serve_unread,
    "a commit counts in its epoch and in line": _count_every_commit,
    "a batch moves positions from where it was read": _commit_wherever_positions_stand,
}


def main() -> None:
    _, option, name, lacking, module = sys.argv
    RULES[lacking]()
    sys.argv = [module, option, name]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
