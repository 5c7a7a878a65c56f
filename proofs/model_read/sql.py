"""All statements that the model knows: importing this teaches them."""

from proofs.model_read import sql_builds, sql_people, sql_positions, sql_rows, sql_transactions
from proofs.model_read.catalogue import UnknownStatement, call_of

__all__ = ["UnknownStatement", "call_of", "sql_builds", "sql_people", "sql_positions", "sql_rows", "sql_transactions"]
