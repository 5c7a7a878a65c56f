"""Kafka's jars for the development stack, resolved by the Ivy that PySpark ships: set-up needs nothing but Java and pip.

`python -m tools.dev.jars` fetches them and checks them against kafka-jars.sha256; `--lock` rewrites that file after a version was
raised. They live inside the virtual environment: one folder to delete, no HOME needed.
"""

import hashlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from infra.errors import SamefoldError
from infra.processes.java import find_java

KAFKA = "4.2.1"  # 4.3.0 and 4.3.1 lose ends of transactions: docs/public-events.md
SLF4J_BINDING = "2.25.4"  # of log4j, at the version that Kafka brings: without it the broker logs nothing
FOLDER = Path(sys.prefix, "kafka")
LOCK = Path(__file__).with_name("kafka-jars.sha256")

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


class JarsMissing(SamefoldError):
    """Jars are not all there, could not be fetched, or are not the ones that the lock names."""


def classpath() -> str:
    """What `java -cp` needs to run Kafka. Raises JarsMissing."""
    _require("Kafka", FOLDER, locked())
    return str(FOLDER / "*")


def locked(lock: Path = LOCK) -> dict[str, str]:
    """File name to SHA-256, as committed."""
    lines = lock.read_text().splitlines()
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
    found = fetch("kafka", FOLDER, _KAFKA)
    if "--lock" in sys.argv[1:]:
        LOCK.write_text("".join(f"{digest}  {jar}\n" for jar, digest in found.items()))
    wrong = sorted({jar for jar, _ in found.items() ^ locked().items()})
    if wrong:
        hint = "Remove that folder and run `make setup` again; if it persists, do not run these jars."
        raise JarsMissing(f"{FOLDER} does not match {LOCK.name}: {', '.join(wrong)}.", hint)


if __name__ == "__main__":
    try:
        main()
    except SamefoldError as error:
        sys.exit(f"{error.message}\n{error.hint}")
