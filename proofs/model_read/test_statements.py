"""The model knows each statement that the code it runs may send, whether a schedule of today reaches it or not."""

from __future__ import annotations

import pytest

from proofs.model_read.statements import IN_PARTS, NOT_MODELLED, is_known, modules_run, statements_in, unknown

MODULES = modules_run()


@pytest.mark.parametrize("module", MODULES)
def test_every_statement_in_the_source_is_known(module: str) -> None:
    assert unknown(module) == [], "teach proofs/model_read these, or say in statements.py why no scenario sends them"


def test_no_exception_outlives_its_reason() -> None:
    places = {one.place for name in MODULES for one in statements_in(name) if not is_known(one.text)}
    assert places == IN_PARTS
    for name in NOT_MODELLED:
        assert [one for one in statements_in(name) if not is_known(one.text)], f"{name} is modelled: take it out"


def test_a_statement_that_a_rare_branch_sends_is_found() -> None:
    rare = """
def wait(connection):
    if frozen():
        connection.execute("select pg_cancel_backend(pid) from pg_stat_activity where pid = %s", (1,))
"""
    assert [one.place for one in unknown("projections.engine.rebuild.stalled_loaders", rare)] == [
        "projections.engine.rebuild.stalled_loaders.wait"
    ]
