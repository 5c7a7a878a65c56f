"""What failed in a run of tests, once more, alone: `python -m tools.testing.again`, which `.ci/run` calls after `make test-all`.

A test that fails first and passes alone is listed under `UNSTABLE:`. It is a defect of the test or of the product, but no reason
to refuse the change that happened to meet it. Five such tests are the most: more of them say that something is broken.
"""

import json
import os
import subprocess
import sys

import pytest

from tools.testing.rings import FAILURES, FOLDER

MOST = 5
UNSTABLE = FOLDER / "unstable.txt"


def main() -> int:
    """The exit code: 0 where at most five tests had failed, and each passes now; otherwise 1."""
    if not FAILURES.exists():
        print("No run of tests has ended in this folder: nothing is run again.")
        return 1
    first = json.loads(FAILURES.read_text())
    failed: dict[str, str] = first["failed"]
    if first["exit"] != pytest.ExitCode.TESTS_FAILED or not failed:
        print(f"The run of tests ended with exit code {first['exit']}, for another reason than failed tests.")
        return 1
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed. Only up to {MOST} are run again.")
        return 1
    still = [test for test in failed if not _passes(test, first["seed"])]
    unstable = {test: output for test, output in failed.items() if test not in still}
    UNSTABLE.write_text("".join(f"== {test}\n{output}\n" for test, output in unstable.items()))
    print(UNSTABLE.read_text())
    for test in still:
        print(f"FAILED twice: {test}")
    if unstable:
        print(f"UNSTABLE: passed the second time, alone (the first failure's output is above and in {UNSTABLE})")
        for test in unstable:
            print(f"  {test}")
    return 1 if still else 0


def _passes(test: str, seed: str) -> bool:
    environment = {name: value for name, value in os.environ.items() if name != "TEST_RUN"} | {"TEST_SEED": seed}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
