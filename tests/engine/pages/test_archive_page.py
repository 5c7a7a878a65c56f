"""make test-all: commands on a real archive.

`docs/archive.md` is executed: its commands print what it shows (`…` stands for anything), its code reads the files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from infra.archive import write
from infra.settings import PREFIX, Settings
from tests.engine.bookkeeper import Bookkeeper, fold_all
from tests.engine.infra.archives import ACCOUNTS
from tests.engine.pages.pages import blocks, matches, typed
from tests.engine.spine import records_of, set_up
from tools.testing.fixtures import ROOT, Samefold

FIRST = b'{"samefold":"opening/1"'
PAGE = (ROOT / "docs" / "archive.md").read_text()


@pytest.mark.slow
def test_the_page(world: Settings, samefold: Samefold, tmp_path: Path) -> None:
    world = world.model_copy(update={"archive_url": str(tmp_path / "archive")})
    set_up(world)
    keeper = Bookkeeper(world)
    keeper.life(ACCOUNTS, 20)
    fold_all(world)
    lines = [line for language, block in blocks(PAGE) if language == "console" for line in typed(block)]
    for line, output in lines:
        if line.startswith("$ export "):
            name, _, value = line.removeprefix(f"$ export {PREFIX}").partition("=")
            world = Settings(**{**world.model_dump(exclude_none=True), name.lower(): value})
            continue
        done = samefold(*line.split()[2:], settings=world)
        assert done.returncode == 0, (line, done.stderr)
        assert matches(done.stdout, f"…{output}"), (line, done.stdout)
    assert len(lines) == 8
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for language, block in blocks(PAGE):
            if language == "python":
                exec(block, {"archive": world.archive})
    count = len(records_of(world, world.events_topic))
    assert printed.getvalue() == f"{count} records; {FIRST!r}\n"


@pytest.mark.slow
def test_the_page_tells_the_sizes_of_a_file() -> None:
    assert f"multiple of {write.MOST_RECORDS:,} offsets" in PAGE
    assert f"after {write.MOST_BYTES // 1_000_000} MB" in PAGE
    assert f"({Settings.model_fields['archive_restore_days'].default})" in PAGE
