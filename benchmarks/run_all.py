"""`samefold run all` with these arguments, as a module: `python -m benchmarks.run_all --port 8000`."""

import sys

from tools.cli.run import app

if __name__ == "__main__":
    app(["all", *sys.argv[1:]])
