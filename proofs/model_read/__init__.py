"""The read side under a model checker: the product's own agent, switch, builds and readers on a real PostgreSQL.

The actors are greenlets of which one at a time runs (`play`). Each statement is a step, and waits for its turn; PostgreSQL itself
reports where it waits for a lock (`sessions`, `database`). `explore` tries schedules, `scenarios` has what runs, `oracle` what must
hold, `mutants` what is switched off. Only Kafka (`log`), the clock and chance are stand-ins.
"""
