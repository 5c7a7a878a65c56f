"""The write side under a model checker: the product's own Writer in a hostile world of one partition (docs/protocol.md).

A world is a value and each thing that may happen next is a choice with a name, so one and the same world is searched exhaustively,
walked at random and retraced (`proofs/explore.py`), and checked for unfair cycles (`liveness`). The command line:
`proofs/checker.py`.
"""
