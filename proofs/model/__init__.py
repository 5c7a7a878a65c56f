"""The write side under a model checker: the product's own Writer in a hostile world of one partition (docs/protocol.md).

    python -m proofs.model --minutes 10 --seed 1     large worlds, exhaustively and at random, with a live line
    python -m proofs.model --table                   promise → check → mutants killed (`--json FILE` for machines)
    python -m proofs.model --traces                  find the shortest trace of each mutant again

A world is a value and each thing that may happen next is a choice with a name, so one and the same world is searched exhaustively
(`explore`), walked at random and shrunk (`walk`), replayed from a file (`traces`) and checked for unfair cycles (`liveness`).
"""
