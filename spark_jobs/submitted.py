"""What the scripts for `spark-submit` share: they are the commands of the same name, on the Spark that spark-submit started."""

from __future__ import annotations

import sys

from infra.cli import main


def run(command: str) -> None:
    """`samefold <command> --engine spark` with this process's own arguments. Ends the process with its exit code."""
    sys.argv[1:1] = [command, "--engine", "spark"]
    main()
