"""`make audit`: asks for known vulnerabilities of pinned packages. Arguments are pip-audit's.

Exit codes: 0 none is known, 1 there are some, 2 not all were checked. pip-audit itself says "No known vulnerabilities found", and
ends with 0, where its service knows none of the packages.
"""

import json
import subprocess
import sys

from tools.dev.sbom import TOOLS

_HINT = "The service is OSV; `--osv-url URL` names a mirror of it."


def main(arguments: list[str]) -> int:
    """The exit code."""
    command = [str(TOOLS / "pip-audit"), "--vulnerability-service=osv", "--require-hashes", "--disable-pip"]
    command += ["--format=json", "--progress-spinner=off", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        why = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        print(f"not checked: the advisory service can't be reached, or gave an invalid answer: {why}\n{_HINT}")
        return 2
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    found = [(package, vulnerability) for package in packages for vulnerability in package.get("vulns", ())]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}")
    if skipped or not packages:
        print(f"not checked: {len(skipped)} of {len(packages)} packages: {', '.join(skipped)}\n{_HINT}")
    if found:
        return 1
    if skipped or not packages:
        return 2
    print(f"{len(packages)} packages: no vulnerability is known")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
