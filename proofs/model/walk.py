"""Random walks through larger worlds, each reproducible by its seed; what breaks a promise is shrunk to a short trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from proofs import traces
from proofs.model.history import Violation
from proofs.model.setting import FAULTS, Bounds, Parts, Setting
from proofs.model.settle import settle
from proofs.model.traces import retraced
from proofs.model.world import World

STEPS = 150

WEIGHTS = {"lands": 30, "agent": 12, "born": 1, "switch": 0.5, "late": 3, "restore": 1.5, "crash": 0.5, "assign": 1}
"""How often a kind of choice is taken; a writer's own steps have 15 each, any other fault 2."""
OWN = {"go": 15, "hears": 15, "takes": 15}


@dataclass
class Walked:
    seed: int
    bounds: Bounds
    trace: list[str]
    violation: Violation | None

    def __str__(self) -> str:
        return "\n".join([f"walk({self.seed}): {self.violation}", *self.trace])


def bounds_of(random: Random) -> Bounds:
    """A world with several writers, two purses, repeated ids and decisions that depend on what was decided before."""
    commands = []
    for _ in range(random.randint(4, 8)):
        text = f"{random.choice(['fill', 'spend', 'spend'])} {random.randint(1, 3)} c{random.randint(1, 6)} {random.randint(1, 2)}"
        commands.append(text + (f" @{random.randint(0, 2)}" if random.random() < 0.15 else ""))
    return Bounds(
        tuple(commands),
        births=random.randint(2, 6),
        openings=random.randint(6, 16),
        faults=random.randint(0, 12),
        kinds=frozenset(random.sample(sorted(FAULTS), random.randint(1, len(FAULTS)))),
        run_ahead=random.choice([2, 3, 5, 8]),
        batch=3,
        split=random.random() < 0.5,
        prompt=random.random() < 0.3,
    )


def walk(seed: int, parts: Callable[[], Parts] = Parts, steps: int = STEPS) -> Walked:
    """One life of a world, to its end."""
    random = Random(seed)
    bounds = bounds_of(random)
    trace: list[str] = []
    some = parts()
    with some.in_force():
        world = World(Setting(bounds, some))
        try:
            for _ in range(steps):
                choices = world.choices()
                if not choices:
                    break
                [choice] = random.choices(choices, [OWN.get(c[0]) or WEIGHTS.get(c[0], 2) for c in choices])
                trace.append(" ".join(choice))
                world.do(choice)
            settle(world)
        except Violation as violation:
            return Walked(seed, bounds, trace, violation)
    return Walked(seed, bounds, trace, None)


def shrunk(walked: Walked, parts: Callable[[], Parts] = Parts) -> Walked:
    """The same violation by fewer choices: no single one of them can be left out."""
    assert walked.violation is not None
    promise = walked.violation.promise

    def fails(trace: list[str]) -> bool:
        found, _ = retraced(walked.bounds, trace, parts())
        return found is not None and found.promise == promise

    trace = traces.shrunk(walked.trace, fails)
    return replace(walked, trace=trace, violation=retraced(walked.bounds, trace, parts())[0])
