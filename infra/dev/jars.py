"""Kafka's jars, resolved by the Ivy that PySpark ships, so that set-up needs nothing but Java and pip.

`python -m infra.dev.jars` fetches and checks them against kafka-jars.sha256; `--lock` writes that file anew, after
KAFKA was raised. They live inside the virtual environment: one folder to delete, no HOME needed.
"""

import hashlib
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from infra.dev.java import find_java
from infra.errors import SamefoldError

KAFKA = "4.3.1"
SLF4J_BINDING = "2.25.4"  # of log4j, at the version that Kafka brings: without it the broker logs nothing
FOLDER = Path(sys.prefix, "kafka")
LOCK = Path(__file__).with_name("kafka-jars.sha256")

_MODULE = f"""\
<ivy-module version="2.0">
  <info organisation="samefold" module="kafka"/>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA}" conf="default"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{SLF4J_BINDING}" conf="default"/>
  </dependencies>
</ivy-module>
"""


class JarsMissing(SamefoldError):
    """Kafka's jars are not all there, could not be fetched, or are not the ones that the lock names."""


def classpath() -> str:
    """What `java -cp` needs to run Kafka. Raises JarsMissing."""
    missing = [name for name in locked() if not (FOLDER / name).is_file()]
    if missing:
        raise JarsMissing(f"{len(missing)} of Kafka's {len(locked())} jars are not in {FOLDER}.", "Run `make setup`.")
    return str(FOLDER / "*")


def locked() -> dict[str, str]:
    """File name to SHA-256, as committed."""
    return {name: digest for digest, name in (line.split() for line in LOCK.read_text().splitlines())}


def fetch() -> dict[str, str]:
    """Resolve and download what is not there yet; file name to SHA-256 of what is there now."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    home = Path(sys.prefix, ".ivy")  # not in FOLDER: -sync empties that of all that is not a jar
    home.mkdir(exist_ok=True)
    module = home / "kafka.xml"
    module.write_text(_MODULE)
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
    command += ["-types", "jar", "bundle", "-sync", "-retrieve", f"{FOLDER}/[artifact]-[revision](-[classifier]).[ext]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise JarsMissing(f"Ivy could not fetch Kafka's jars:\n{said}", "Is the network there? Run `make setup` again.")
    shutil.rmtree(home)
    return {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in sorted(FOLDER.glob("*.jar"))}


def main() -> None:
    found = fetch()
    if "--lock" in sys.argv[1:]:
        LOCK.write_text("".join(f"{digest}  {name}\n" for name, digest in found.items()))
    wrong = sorted(name for name, _ in found.items() ^ locked().items())
    if wrong:
        cure = "Remove that folder and run `make setup` again; if it persists, do not run these jars."
        raise JarsMissing(f"In {FOLDER}, not as {LOCK.name} says: {', '.join(sorted(set(wrong)))}.", cure)


if __name__ == "__main__":
    try:
        main()
    except SamefoldError as error:
        sys.exit(f"{error.message}\n{error.cure}")
