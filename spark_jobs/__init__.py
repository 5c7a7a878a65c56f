"""The log as tables of Spark: `from spark_jobs import events`; and the lake's datasets, one file each, found by being here.

The datasets are yours; `engine/`, which reads the log with Spark and keeps the lake, is Samefold's, and so is this file.
"""

from spark_jobs.engine.tables import Log as Log  # the public face
from spark_jobs.engine.tables import commits as commits
from spark_jobs.engine.tables import events as events
from spark_jobs.engine.tables import records as records
from spark_jobs.engine.tables import register as register
