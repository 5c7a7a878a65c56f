"""A builder in one process, where points are armed: `python -m proofs.chaos.armed proofs.chaos.rebuilding --name NAME VIEW…`."""

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.argv = ["samefold", "rebuild", *sys.argv[3:], "--engine", "local", "--processes", "1", "--json"]
    main()
