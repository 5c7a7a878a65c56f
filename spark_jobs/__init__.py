"""The log as tables of Spark: `from spark_jobs import events`. Datasets are files of this folder, Samefold's code is in `engine/`."""

from spark_jobs.engine.tables import Log as Log  # the public face
from spark_jobs.engine.tables import commits as commits
from spark_jobs.engine.tables import events as events
from spark_jobs.engine.tables import records as records
from spark_jobs.engine.tables import register as register
