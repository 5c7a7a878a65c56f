"""`spark-submit spark_jobs/rebuild.py balances`: `samefold rebuild` with all its options, where and how spark-submit says."""

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["rebuild", "--engine", "spark"]
    main()
