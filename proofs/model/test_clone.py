"""A search rests on copies that are complete and on prints that tell states apart: checked against deep copies on the way."""

from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest

from commands.writer import Writer
from proofs.model.clone import clone_writer, fingerprint
from proofs.model.configurations import SMALL
from proofs.model.history import Violation
from proofs.model.mutants import MUTANTS
from proofs.model.setting import APPEND_FAULTS, Parts, Setting
from proofs.model.world import World

STEPS = 60
BOUNDS = replace(SMALL["one writer, any two faults"], births=2, kinds=APPEND_FAULTS)


def writers(world: World) -> list[Writer]:
    return [handler.writer for handler in world.handlers.values()]


def walked(seed: int, setting: Setting) -> list[World]:
    """The worlds of one way, each made from the one before."""
    random = Random(seed)
    worlds = [World(setting)]
    with setting.parts.in_force():
        while len(worlds) < STEPS and (choices := worlds[-1].choices()):
            try:
                worlds.append(worlds[-1].after(random.choice(choices)))
            except Violation:
                break
    return worlds


@pytest.mark.parametrize("name", ["", "forgets_rejections", "keeps_its_overlay"])
def test_what_comes_after_a_world_leaves_it_as_it_was(name: str) -> None:
    setting = Setting(BOUNDS, MUTANTS[name].parts() if name else Parts())
    changed = 0
    for seed in range(10):
        for world in walked(seed, setting):
            before = [fingerprint(deepcopy(writer)) for writer in writers(world)]
            for choice in world.choices():
                try:
                    after = world.after(choice)
                except Violation:
                    continue
                assert [fingerprint(writer) for writer in writers(world)] == before
                changed += [fingerprint(writer) for writer in writers(after)] != before
    assert changed > 0


def test_a_clone_goes_on_like_a_deep_copy() -> None:
    setting = Setting(BOUNDS)
    overlays = 0
    for seed in range(10):
        for world in walked(seed, setting):
            for writer in writers(world):
                one, other = clone_writer(writer), deepcopy(writer)
                assert fingerprint(one) == fingerprint(other) == fingerprint(writer)
                assert one.wants(world.setting.commands) == other.wants(world.setting.commands)
                assert one.on_clock(1_000) == other.on_clock(1_000)
                assert fingerprint(one) == fingerprint(other)
                overlays += len(writer.overlay) > 0
    assert overlays > 0


def test_worlds_of_one_print_have_the_same_choices() -> None:
    setting = Setting(BOUNDS)
    kinds = set()
    for seed in range(300):
        for world in walked(seed, setting):
            # names tell appends apart that are alike in everything else: so kinds, not numbers
            kinds.add((world.print(), frozenset(choice[0] for choice in world.choices())))
    assert len({number for number, _ in kinds}) == len(kinds) > 1_000
