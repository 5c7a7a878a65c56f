"""The log as tables of Spark: `from spark_jobs import events`. A dataset is a file here, and `engine/` is Samefold's."""

from spark_jobs.engine.tables import Log as Log
from spark_jobs.engine.tables import commits as commits
from spark_jobs.engine.tables import events as events
from spark_jobs.engine.tables import records as records
from spark_jobs.engine.tables import register as register
