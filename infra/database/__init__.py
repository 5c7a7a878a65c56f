"""PostgreSQL: connections, the tables that are not views, migrations."""
