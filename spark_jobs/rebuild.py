"""`spark-submit spark_jobs/rebuild.py balances`: `samefold rebuild` with all its options, where and how spark-submit says."""

from spark_jobs.submitted import run

if __name__ == "__main__":
    run("rebuild")
