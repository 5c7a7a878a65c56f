"""`make sbom`: what a service is made of, as CycloneDX: the pinned packages that it runs on and the jars, with hashes and licences.

PySpark is one component: the jars that it brings are part of its archive.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.dev import jars

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix, "supply-chain", "bin")
_LICENCES = Path(__file__).with_name("jar-licences.txt")


def licences() -> dict[str, tuple[str, str]]:
    """Each jar's group and licence by its name without a version."""
    lines = (line.split(" ", 1) for line in _LICENCES.read_text().splitlines())
    return {module.partition(":")[2]: (module.partition(":")[0], licence) for module, licence in lines}


def bom() -> dict[str, Any]:
    """The document."""
    found: dict[str, Any] = _cyclonedx(
        "requirements", "--pyproject", ROOT / "pyproject.toml", ROOT / "requirements" / "spark.txt"
    )
    installed = {one["purl"]: one for one in _cyclonedx("environment", sys.executable)["components"] if "purl" in one}
    for component in found["components"]:
        del component["description"]  # the very line of the requirements, hashes and all
        component["licenses"] = installed.get(component["purl"], {}).get("licenses", [])
    found["components"] += [_jar(name, digest) for name, digest in jars.locked().items()]
    return found


def _jar(file: str, digest: str) -> dict[str, Any]:
    known = licences()
    name = max((name for name in known if file.startswith(f"{name}-")), key=len)
    group, licence = known[name]
    version = file.removeprefix(f"{name}-").removesuffix(".jar")
    purl = f"pkg:maven/{group}/{name}@{version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "group": group,
        "name": name,
        "version": version,
        "purl": purl,
        "scope": "excluded",  # the broker's are for development and tests
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{"expression": licence}],
    }


def _cyclonedx(which: str, *of: str | Path) -> Any:
    command: list[str | Path] = [TOOLS / "python", "-W", "ignore", "-m", "cyclonedx_py", which]
    command += ["--output-reproducible", "--of", "JSON", *of]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bom(), indent=1) + "\n")
