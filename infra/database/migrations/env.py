"""Runs migrations on the connection that `infra.database.migrate` opened."""

from alembic import context

from infra.database.migrate import declared, include_object, only_new

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=declared(),
    include_object=include_object,
    process_revision_directives=only_new,
)
context.run_migrations()
