"""The read side under a model checker: the product's own agent, switch, builds and readers on a real PostgreSQL; and policies.

The actors are greenlets of which one at a time runs (`play`). Each statement is a step, and waits for its turn; PostgreSQL itself
reports where it waits for a lock (`sessions`, `database`). `explore` tries schedules, `scenarios` has what runs, `oracle` what must
hold, `mutants` what is switched off. Only Kafka (`log`), the clock and chance are stand-ins.

Of policies, that is their worker, the outbox's join, activations and the relay's sender (`policies`), over a log that grows with
what they wish (`bank`, `policy_oracle`).
"""
