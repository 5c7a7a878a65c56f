"""Real processes under fire: what kills, freezes and cuts them, and the judge that watches.

points      infra/processes/faultpoints.py, armed in the children by armed.py, from outside by control.py
the wire    proxy.py with kafka_wire.py and postgres_wire.py: holds or cuts at one chosen request or answer
the work    load.py sends, crew.py runs handlers, agents and builders
the judge   ledger.py folds the log without a line of the product; tail.py, progress.py, judge.py compare with the database
the faults  process_faults.py, wire_faults.py and stumbles.py, each with how it is seen to have taken effect, and with what ends it
the run     field.py puts all on one stack; `python -m proofs.chaos` mixes at random, test_under_fire.py has each once
"""
