"""Real processes under fire: what kills, freezes and cuts them, and the judge that watches.

points      infra/processes/faultpoints.py, armed in the children, and from outside, by armed.py
the wire    proxy.py with wires.py: holds or cuts at one chosen request or answer
the work    load.py and front.py send, crew.py runs handlers, agents and builders
the judge   ledger.py folds the log without a line of the product; tail.py, judge.py, policy_judge.py compare with the database
the faults  process_faults.py, wire_faults.py and stumbles.py, each with how it is seen to have taken effect, and with what ends it
the run     field.py puts all on one stack; `python -m proofs.chaos` mixes at random (mix.py), test_under_fire.py has a few
"""
