"""The identity of the running code. A worker compares it with its sender's: other code would fold other rows."""

import hashlib
import platform
import socket
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import msgspec
import pydantic

from infra.errors import SamefoldError

NAMED = 5


class WrongCode(SamefoldError):
    """A worker has other code than the process that sent it work."""


PACKAGES = "domain", "projections", "infra.log", "infra.archive", "spark_jobs"
"""What decodes, folds and writes."""


def _hashes(path: str, folder: Traversable) -> Iterator[tuple[str, str]]:
    """Of the source files, by path; a checkout may as well be a zip file."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _hashes(f"{path}/{entry.name}", entry)
        elif entry.name.endswith(".py") and entry.name[:-3].isidentifier():  # an editor's own files are not
            text = entry.read_bytes().replace(b"\r\n", b"\n")
            yield f"{path}/{entry.name}", hashlib.sha256(text).hexdigest()[:16]


CODE: Final[Mapping[str, str]] = {
    **dict(found for package in PACKAGES for found in _hashes(package.replace(".", "/"), files(package))),
    "Python": ".".join(platform.python_version_tuple()[:2]),
    "msgspec": msgspec.__version__,
    "pydantic": pydantic.VERSION,
}
"""Each source file's hash, whatever its line endings, and the versions of what decodes with it.

Read together with the code itself, so that a checkout that changes under a running process is noticed too.
"""


CODE_DIGEST: Final = hashlib.sha256(repr(sorted(CODE.items())).encode()).hexdigest()[:16]
"""Of all of it."""


def require_code(sent: Mapping[str, str]) -> None:
    """Raises WrongCode where the sender's is not this process's."""
    if sent == CODE:
        return
    other = sorted(name for name in {*sent, *CODE} if sent.get(name) != CODE.get(name))
    more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
    raise WrongCode(
        f"A worker on {socket.gethostname()} has other code than the process that sent it work: "
        f"{', '.join(other[:NAMED])}{more}.",
        "Ship the same checkout and packages to all executors (--py-files, their image: docs/operating.md); if this machine's own "
        "was changed meanwhile, run the command again.",
    )
