"""Run as a script: `detach.py LOG PROGRAM ARGUMENT…` starts a program that outlives the caller, and returns.

The second fork makes the program an orphan: no process has to wait for it, a Ctrl-C in the terminal does not reach it, and it
leaves no zombie behind in a long test session. Standard library only: it is run with `python -I -S`.
File descriptors that it was given stay open in the program: one of them holds the lock that shows that it is alive.
"""

import os
import sys


def main(log: str, command: list[str]) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
