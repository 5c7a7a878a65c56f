"""What a user would pick instead, each in its best honest configuration, as a process of its own (docs/benchmarks.md).

Each is a module that is run with one argument, a file with its `Job`, and prints its `Done` as its last line.
"""
