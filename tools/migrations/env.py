"""Runs migrations on the connection that `tools.migrations.migrate` opened, or, for `alembic` itself, on one of its own."""

from alembic import context

from infra.settings import Settings
from tools.migrations.migrate import connected, declared, include_object, only_new


def run(**where: object) -> None:
    context.configure(
        target_metadata=declared(),
        include_object=include_object,
        process_revision_directives=only_new,
        **where,  # type: ignore[arg-type]
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run(dialect_name="postgresql", literal_binds=True)
elif given := context.config.attributes.get("connection"):
    run(connection=given)
else:
    with connected(Settings()) as connection:
        run(connection=connection)
