"""`spark-submit spark_jobs/verify.py balances`: `samefold verify` with all its options, where and how spark-submit says."""

from spark_jobs.submitted import run

if __name__ == "__main__":
    run("verify")
