"""A source under a model checker: the product's own receiver, activations and ids, in all that can happen to a few messages.

Kafka and PostgreSQL are values (`world`): a topic of another service, and a database that is restored to a copy. `checks` has the
worlds, and `mutants.txt` what is switched off to see that a promise then breaks.
"""
