"""The rows that verify keeps while it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings
from projections.engine.verify import row_files as spool
from projections.engine.verify.row_files import SpoolFull
from projections.engine.verify.verify import verify
from projections.engine.views.core_views import all_views
from tests.engine.bookkeeper import folded_lives


def test_a_full_disk_is_named(world: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folded_lives(world, ["1", "2"], 3)
    monkeypatch.setattr(spool, "_file", lambda *_: Path("/dev/full"))
    with pytest.raises(SpoolFull, match="No space left on device") as refused:
        verify(world, all_views())
    assert "TMPDIR" in refused.value.cure
