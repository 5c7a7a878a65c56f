"""Where the tasks of a load or of a verification run: in local processes or on a cluster.

Catching up and the switch are always local: they fold little, and agents wait for the switch.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from infra.processes import workers
from infra.processes.workers import Advance
from infra.settings import Settings


class Progress(Protocol):
    """Shows the progress of a long command."""

    def begin(self, stage: str, total: int | None = None) -> None:
        """A stage begins, with so many steps if that is known; the stage before has ended."""

    def advance(self, count: int) -> None:
        """So many more steps are done."""


class Silent:
    """Shows nothing."""

    def begin(self, stage: str, total: int | None = None) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT = Silent()


class Argument(Protocol):
    """A task's argument: a frozen dataclass.

    Settings hold secrets: an engine that leaves this machine sends the argument without them, and the remote
    process puts in its own.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def settings(self) -> Settings: ...


A = TypeVar("A", bound=Argument)
R = TypeVar("R")


class Engine(Protocol):
    """Runs tasks. `name` is for people; `slots` is how many run at once, if there is enough to do."""

    name: str
    slots: int

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        """`task(argument, advance)` for each argument, results in the arguments' order. `records` is what they read in all.

        `task` is a module's function. A task may run twice, even at once. The first error stops the other tasks and is raised
        unchanged. `advance` is called several times a second, also with 0, from the caller's thread.
        """


class Local:
    """Local processes: as many as asked for, else as the number of records is worth."""

    name = "local"

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes
        self.slots = processes or os.cpu_count() or 1

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        return workers.run(task, arguments, workers.processes_for(records, self.processes), advance)


EngineFor = Callable[[int], Engine]
"""The engine for so many records; starts it if necessary."""


def local(_records: int) -> Engine:
    return Local()
