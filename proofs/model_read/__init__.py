"""The read side under a model checker: the product's own agent, switch, builds and readers on a real PostgreSQL.

The actors are greenlets of which one at a time has the word (`play`). Each statement is a step, and waits for its turn; where it
waits for a lock is PostgreSQL's affair, and is seen by asking it (`sessions`, `database`). `explore` tries schedules, `scenarios`
says what runs, `oracle` what must hold, `mutants` what is switched off. Only Kafka (`log`), the clock and chance are stand-ins.
"""
