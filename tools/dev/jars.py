"""Jars, resolved by the Ivy that PySpark ships, so that set-up needs nothing but Java and pip.

Kafka's for the development stack, and those that Spark lacks to read from Kafka. `python -m tools.dev.jars [kafka] [spark]`
fetches both sets, or one, and checks them against kafka-jars.sha256 and spark-jars.sha256; `--lock` rewrites these files
after a version was raised. They live inside the virtual environment: one folder to delete, no HOME needed.
"""

import hashlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from infra.errors import SamefoldError
from infra.processes.java import find_java

KAFKA = "4.3.1"
SLF4J_BINDING = "2.25.4"  # of log4j, at the version that Kafka brings: without it the broker logs nothing
FOLDER = Path(sys.prefix, "kafka")
LOCK = Path(__file__).with_name("kafka-jars.sha256")

CONNECTOR = "4.2.0"  # PySpark's own version
TOKENS = "4.0.0"  # the connector also needs it; its own version was never published
POOL = "2.13.1"
CONNECTOR_FOLDER = Path(sys.prefix, "spark-kafka")
CONNECTOR_LOCK = Path(__file__).with_name("spark-jars.sha256")

_MODULE = """\
<ivy-module version="2.0">
  <info organisation="samefold" module="{name}"/>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""
_DEPENDENCY = '    <dependency org="{0}" name="{1}" rev="{2}" conf="default" transitive="{3}"/>'
_KAFKA = (
    ("org.apache.kafka", "kafka_2.13", KAFKA, "true"),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", SLF4J_BINDING, "true"),
)
_CONNECTOR = (  # not what they depend on: PySpark has the rest, and the broker's jars the Kafka client
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", CONNECTOR, "false"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", TOKENS, "false"),
    ("org.apache.commons", "commons-pool2", POOL, "false"),
)


class JarsMissing(SamefoldError):
    """Jars are not all there, could not be fetched, or are not the ones that the lock names."""


def classpath() -> str:
    """What `java -cp` needs to run Kafka. Raises JarsMissing."""
    _require("Kafka", FOLDER, locked())
    return str(FOLDER / "*")


def connector() -> list[Path]:
    """The jars that Spark lacks to read from Kafka. Raises JarsMissing."""
    names = locked(CONNECTOR_LOCK)
    _require("Spark's connector to Kafka", CONNECTOR_FOLDER, names)
    client = f"kafka-clients-{KAFKA}.jar"
    _require("Kafka", FOLDER, {client: locked()[client]})
    return [*(CONNECTOR_FOLDER / name for name in names), FOLDER / client]


def locked(lock: Path | None = None) -> dict[str, str]:
    """File name to SHA-256, as committed; Kafka's, unless another lock is named."""
    lines = (lock or LOCK).read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def fetch(name: str, folder: Path, dependencies: tuple[tuple[str, str, str, str], ...]) -> dict[str, str]:
    """Resolve and download what is not there yet; file name to SHA-256 of what is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(sys.prefix, ".ivy")  # not in the folder: -sync empties that of all that is not a jar
    home.mkdir(exist_ok=True)
    module = home / f"{name}.xml"
    listed = "\n".join(_DEPENDENCY.format(*dependency) for dependency in dependencies)
    module.write_text(_MODULE.format(name=name, dependencies=listed))
    spark = find_spec("pyspark")
    if spark is None or spark.origin is None:
        raise JarsMissing("PySpark, which brings Ivy, is not installed.", "Run `make setup`.")
    [ivy] = Path(spark.origin).parent.glob("jars/ivy-*.jar")
    command: list[str | Path] = [
        find_java().path,
        f"-Divy.default.ivy.user.dir={home}",
        "-jar",
        ivy,
        "-error",
        "-ivy",
        module,
    ]
    command += ["-types", "jar", "bundle", "-sync", "-retrieve", f"{folder}/[artifact]-[revision](-[classifier]).[ext]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise JarsMissing(
            f"Ivy could not fetch the jars for {name}:\n{said}", "Check the network, and run `make setup` again."
        )
    shutil.rmtree(home)
    return {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in sorted(folder.glob("*.jar"))}


def _require(whose: str, folder: Path, names: dict[str, str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        which = f"{len(missing)} of {whose}'s {len(names)} jars are not in {folder}."
        raise JarsMissing(which, "Run `make setup`.")


def main() -> None:
    sets = {"kafka": (FOLDER, LOCK, _KAFKA), "spark": (CONNECTOR_FOLDER, CONNECTOR_LOCK, _CONNECTOR)}
    wanted = [name for name in sets if name in sys.argv[1:]] or [*sets]
    for name in wanted:
        folder, lock, dependencies = sets[name]
        found = fetch(name, folder, dependencies)
        if "--lock" in sys.argv[1:]:
            lock.write_text("".join(f"{digest}  {jar}\n" for jar, digest in found.items()))
        wrong = sorted({jar for jar, _ in found.items() ^ locked(lock).items()})
        if wrong:
            hint = "Remove that folder and run `make setup` again; if it persists, do not run these jars."
            raise JarsMissing(f"{folder} does not match {lock.name}: {', '.join(wrong)}.", hint)


if __name__ == "__main__":
    try:
        main()
    except SamefoldError as error:
        sys.exit(f"{error.message}\n{error.hint}")
