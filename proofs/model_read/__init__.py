"""The read side under a model checker: the product's own agent, switch, builds and readers against a model of PostgreSQL.

`postgres` is the model: READ COMMITTED at the grain of statements, row locks with waits and re-checks. `client` stands in for
psycopg, `log` for Kafka; everything above them is the product's code, run in threads of which one at a time has the word
(`play`). `explore` tries schedules, `scenarios` says what runs, `oracle` what must hold, `mutants` what is switched off.
"""
