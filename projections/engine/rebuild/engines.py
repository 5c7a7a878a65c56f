"""Where the tasks of a load or of a comparison run: one task per partition, in this machine's processes or on a cluster.

Catching up and the switch are always local: what they fold is short, and somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from infra.settings import Settings
from projections.engine.rebuild import workers
from projections.engine.rebuild.workers import Advance


class Argument(Protocol):
    """A frozen dataclass that a task is given. An engine that leaves this machine sends it without its settings, which hold
    secrets, and puts in those of the place where it runs."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def settings(self) -> Settings: ...


A = TypeVar("A", bound=Argument)
R = TypeVar("R")


class Engine(Protocol):
    """Runs tasks. `name` is what people call it."""

    name: str

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        """`task(argument, advance)` for each argument; the results in the arguments' order. `records` is what they read in all.

        `task` is a module's function. Tasks may be run twice, even at once; an error that one raises stops the others and is
        raised as it was. `advance` is called several times a second, with 0 too, from the thread that called.
        """


class Local:
    """Processes of this machine: as many as asked for, else as the size is worth."""

    name = "local"

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes

    def run(self, task: Callable[[A, Advance], R], arguments: Sequence[A], records: int, advance: Advance) -> list[R]:
        memory_mb = arguments[0].settings.task_memory_mb if arguments else None
        processes = workers.processes_for(records, self.processes)
        return workers.run(task, arguments, processes, advance, memory_mb=memory_mb)


EngineFor = Callable[[int], Engine]
"""The engine for so many records, which starts it if it has to be started."""
