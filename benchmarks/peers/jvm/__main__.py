"""Becomes the JVM of a peer: `python -m benchmarks.peers.jvm JOB`, whose option `peer` says which."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from psycopg.conninfo import conninfo_to_dict

from benchmarks.peers.job import Job, read_job
from benchmarks.peers.jvm import jar_of
from infra.processes.java import find_java

PACKAGES = ("java.lang", "java.net", "java.nio", "java.time", "java.util")
"""Flink's serializers look into them."""


def main() -> NoReturn:
    job, folder = read_job(), Path(sys.argv[1]).parent
    peer = job.options["peer"]
    arguments = {
        "flink": [_jdbc(job), str(folder / job.group)],
        "streams": [str(job.count), str(folder / job.group), job.group],
    }[peer]
    opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in PACKAGES]
    classes = f"{jar_of(peer).parent}/*"
    command = [str(find_java().path), *opens, "-cp", classes, peer.title(), job.kafka, job.topic, *arguments]
    os.execv(command[0], command)


def _jdbc(job: Job) -> str:
    """The same Unix socket as a JDBC URL."""
    where = conninfo_to_dict(job.database_url)
    socket = f"socketFactory=org.newsclub.net.unix.AFUNIXSocketFactory$FactoryArg&socketFactoryArg={where['host']}/.s.PGSQL.5432"
    return f"jdbc:postgresql://localhost/{where['dbname']}?user={where['user']}&sslMode=disable&{socket}"


if __name__ == "__main__":
    main()
