"""Processes that lack one rule, so that the judge must find them: `… proofs.chaos.lacking --name NAME RULE MODULE`.

A run in which they pass for sound would prove nothing of the sound ones.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from commands import writer
from commands.writer import Action, Phase, ReadLog, Serve, Writer
from proofs.patches import Edit, edited


class ServesUnread(Writer):
    """Serves from where the database stands, without what stands in the log between there and its opening."""

    def on_opened(self, offset: int | None) -> Action:
        action = super().on_opened(offset)
        if not isinstance(action, ReadLog):
            return action
        self.last_command = self.reading.command_offset
        self.phase = Phase.SERVING
        return Serve(self.last_command + 1)


@contextmanager
def _serve_unread() -> Iterator[None]:
    writer.Writer = ServesUnread  # type: ignore[misc]
    yield


RULE, COMMIT = "infra/log/rule.py", "projections/engine/store/commit.py"
RULES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "a handler reads up to its opening": _serve_unread,
    "a commit counts in its epoch and in line": lambda: edited(
        Edit(RULE, "entry.epoch != epoch or epoch < 0", "False"), Edit(RULE, "entry.seq != seq + 1", "False")
    ),
    "a batch moves positions from where it was read": lambda: edited(
        Edit(COMMIT, "and (p.next_offset, p.epoch, p.seq) = (u.was, u.was_epoch, u.was_seq)", "")
    ),
}


def main() -> None:
    _, option, name, lacking, module = sys.argv
    sys.argv = [module, option, name]
    with RULES[lacking]():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
