"""`spark-submit spark_jobs/engine/rebuild.py VIEW`: `samefold rebuild` with all its options, as spark-submit says."""

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["rebuild", "--engine", "spark"]
    main()
