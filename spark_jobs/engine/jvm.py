"""Run Spark's JVM as our own child process, which ends with us whenever Ctrl-C comes.

When PySpark itself starts the JVM and is interrupted before the JVM answers, the JVM lives for ever and keeps the caller's pipes
open. So we start it here, in a process group that a terminal's Ctrl-C does not reach, and give PySpark its port, as
spark-submit does. It ends with the `with`, or with this process, however that ends: its standard input is closed then.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from infra.errors import SamefoldError
from infra.processes.java import find_java, utf8

POLL_S = 0.05
END_S = 10.0
"""How long the JVM may take to remove its files."""


class SparkUnavailable(SamefoldError):
    """Spark does not start, or its master is unreachable."""


@contextmanager
def jvm(conf: Mapping[str, str]) -> Iterator[Output]:
    """A JVM for PySpark's next session. Raises SparkUnavailable, JavaMissing."""
    from pyspark import SparkContext
    from pyspark.find_spark_home import _find_spark_home

    find_java()
    command = [str(Path(_find_spark_home(), "bin", "spark-submit"))]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    # removed only when the JVM has written its port, or has ended: a JVM that cannot write the port lives for ever
    folder = mkdtemp(prefix="samefold-spark-")
    port_file = Path(folder) / "port"
    try:
        process = subprocess.Popen(
            command,
            env={**utf8(os.environ), "SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(port_file)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except OSError as error:
        Path(folder).rmdir()
        raise SparkUnavailable(f"Spark can't be started: {error}.", "Unset SPARK_HOME, or correct it.") from error
    output, gateway = Output(process), None
    try:
        gateway = _gateway(process, port_file, output)
        shutil.rmtree(folder)
        # not reset: a start that Ctrl-C interrupted must find a dead JVM, not start its own
        SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
        yield output
    finally:
        output.ended = True
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)
        output.close()
        if gateway is not None:
            with suppress(Exception):  # its JVM has ended
                gateway.shutdown_callback_server()
                gateway.close()


class Output:
    """The JVM's output: kept until `started`, then written to our standard error until `ended`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.kept: list[str] = []
        self.started = self.ended = False
        self._stream = process.stdout
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def cause(self) -> str:
        """Why the JVM did not start."""
        self._thread.join(END_S)
        causes = [line for line in self.kept if line.startswith(("Error", "Exception", "Caused by", "spark: ERROR"))]
        return (causes or self.kept or ["no reason given"])[-1]

    def close(self) -> None:
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            if not self.started:
                self.kept.append(line.decode(errors="replace").strip())
            elif not self.ended:
                with suppress(OSError):
                    os.write(2, line)


def _gateway(process: subprocess.Popen[bytes], port_file: Path, output: Output) -> Any:
    """PySpark's connection to this JVM. Raises SparkUnavailable."""
    from pyspark.java_gateway import launch_gateway
    from pyspark.serializers import UTF8Deserializer, read_int

    while not port_file.is_file():
        if process.poll() is not None:
            raise SparkUnavailable(
                f"Spark's JVM ended with exit code {process.returncode}: {output.cause()}",
                "JAVA_HOME, SPARK_HOME, SPARK_CONF_DIR and PYSPARK_SUBMIT_ARGS decide how it starts; "
                "it needs a free port and room for its files. See docs/operating.md.",
            )
        time.sleep(POLL_S)
    with port_file.open("rb") as file:
        where = {"PYSPARK_GATEWAY_PORT": str(read_int(file)), "PYSPARK_GATEWAY_SECRET": UTF8Deserializer().loads(file)}
    os.environ.update(where)
    try:
        return launch_gateway()
    finally:
        for name in where:
            del os.environ[name]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group: by SIGTERM, at which the JVM leaves its cluster and removes its files, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            break
    assert process.stdin is not None
    process.stdin.close()
