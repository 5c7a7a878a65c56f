"""`spark-submit spark_jobs/engine/verify.py VIEW`: `samefold verify` with all its options, as spark-submit says."""

import sys

from tools.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["verify", "--engine", "spark"]
    main()
