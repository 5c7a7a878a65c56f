"""Finding a Java that is new enough."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from infra.errors import SamefoldError

MIN_JAVA = 17
INSTALL_JAVA = (
    "Install it: `apt-get install openjdk-17-jre-headless` (Debian, Ubuntu) or `brew install openjdk@17` (macOS)."
)


class JavaMissing(SamefoldError):
    """There is no Java, or it is too old for Kafka and Spark."""


class Java(NamedTuple):
    """An executable and the first number of its version, `17` for `17.0.15`."""

    path: Path
    major: int


def find_java() -> Java:
    """The Java of JAVA_HOME if that is set, else of PATH. Raises JavaMissing."""
    home = os.environ.get("JAVA_HOME")
    path = Path(home, "bin", "java") if home else shutil.which("java")
    if path is None or not Path(path).is_file():
        raise JavaMissing(f"No Java was found ({'JAVA_HOME' if home else 'PATH'}).", INSTALL_JAVA)
    # macOS ships a /usr/bin/java that prints that there is no Java, so check the version
    said = subprocess.run([path, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None:
        raise JavaMissing(f"{path} prints no version: {said.strip()[:200]!r}.", INSTALL_JAVA)
    if int(version[1]) < MIN_JAVA:
        raise JavaMissing(f"Java {version[1]} is too old: Kafka and Spark need {MIN_JAVA} or newer.", INSTALL_JAVA)
    return Java(Path(path), int(version[1]))


def utf8(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a JVM reads names of files as Python does: by `LC_ALL=C` it takes an umlaut for a question mark."""
    locale = environment.get("LC_ALL") or environment.get("LC_CTYPE") or environment.get("LANG") or "C"
    return {**environment, **({"LC_ALL": "C.UTF-8"} if locale in ("C", "POSIX") else {})}
