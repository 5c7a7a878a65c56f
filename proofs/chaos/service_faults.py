"""PostgreSQL shut down at once, and sessions ended by an administrator. Each returns whether it took effect."""

from __future__ import annotations

import signal

from infra.database.connect import connect
from proofs.chaos.field import Field

GONE_S = 15


def shut_down_at_once(field: Field) -> bool:
    """The postmaster lets all go without a checkpoint; started again at once."""
    postgres = field.ground.stack.postgres
    server = postgres.process()
    assert server is not None
    with field.effects.recovery("database"):
        server.send_signal(signal.SIGQUIT)
        server.wait(GONE_S)
        field.effects.took_effect("database: immediate shutdown")
        postgres.start()
        with field.effects.recovery("database, once it answers"):
            field.until_visible()
    return True


def terminate_sessions(field: Field) -> bool:
    """`pg_terminate_backend` of one or more sessions of handlers, agents and builders, whichever they are."""
    with connect(field.world, "chaos terminate") as connection:
        found = connection.execute(
            "select pid from pg_stat_activity where datname = current_database() and application_name like 'samefold %'"
        )
        pids = [pid for (pid,) in found]
        if not pids:
            return False
        chosen = field.random.sample(pids, field.random.randint(1, len(pids)))
        with field.effects.recovery("ended sessions"):
            ended = connection.execute(
                "select pid, pg_terminate_backend(pid) from unnest(%s) pid", (chosen,)
            ).fetchall()
            took = [pid for pid, done in ended if done]
            for _ in took:
                field.effects.took_effect("session terminated")
            field.until_visible()
    return bool(took)
