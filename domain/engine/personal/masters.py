"""Master keys: the file that the keys of subjects are wrapped with. It is in no log, error or repr.

Each line is `<name> <base64 of 32 bytes>`; `#` begins a comment. The first key wraps, all unwrap.
"""

import logging
import re
import secrets
from base64 import b64decode, b64encode
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from domain.engine.personal.tokens import NONCE, cipher
from infra.errors import SamefoldError
from infra.settings import Settings

log = logging.getLogger(__name__)

SIZE = 32
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})\s+(\S+)")
_HINT = (
    "SAMEFOLD_MASTER_KEY_FILE names the file. `samefold dev up` makes one for development; else `samefold keys new` prints the "
    "line of a new one. If there are keys already, restore the file that they were wrapped with: without it no personal value "
    "can be read."
)


class MasterKeyUnusable(SamefoldError):
    """The master key is missing, malformed, or not the one that keys were wrapped with."""

    exit_code = 2


class Masters:
    """The master keys of one file."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self.first = next(iter(keys))
        """The name of the key that wraps."""
        self._keys = keys

    def wrap(self, key: bytes, subject: str, key_id: str) -> bytes:
        """A subject's key, encrypted with the first."""
        nonce = secrets.token_bytes(NONCE)
        return nonce + cipher(self._keys[self.first]).encrypt(nonce, key, _bound(self.first, subject, key_id))

    def unwrap(self, wrapped: bytes, master: str, subject: str, key_id: str) -> bytes:
        """The subject's key. Raises MasterKeyUnusable."""
        from cryptography.exceptions import InvalidTag

        if master not in self._keys:
            raise MasterKeyUnusable(
                f"Keys are wrapped with a master key '{master}', which the file does not have.", _HINT
            )
        try:
            return cipher(self._keys[master]).decrypt(wrapped[:NONCE], wrapped[NONCE:], _bound(master, subject, key_id))
        except InvalidTag:
            message = f"The file's master key '{master}' is not the one that keys were wrapped with under this name."
            raise MasterKeyUnusable(message, _HINT) from None


def masters(settings: Settings) -> Masters:
    """Those of the file as it is now. Raises MasterKeyUnusable."""
    if settings.master_key_file is None:
        raise MasterKeyUnusable("Personal values need a master key, and SAMEFOLD_MASTER_KEY_FILE names no file.", _HINT)
    try:
        found = settings.master_key_file.stat()
        return _read(settings.master_key_file, found.st_mtime_ns, found.st_size, found.st_mode)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise MasterKeyUnusable(f"The master key in {settings.master_key_file} can't be read: {why}.", _HINT) from None


def new_line(name: str) -> str:
    """A line with a new key."""
    return f"{name} {b64encode(secrets.token_bytes(SIZE)).decode()}"


@lru_cache(maxsize=1)
def _read(file: Path, _changed_ns: int, _size: int, mode: int) -> Masters:
    if mode & 0o077:
        log.warning("the file of the master key can be read by others than its owner")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if text := line.partition("#")[0].strip():
            parts, key = _LINE.fullmatch(text), b""
            with suppress(ValueError):
                key = b64decode(parts[2], validate=True) if parts else b""
            if parts is None or len(key) != SIZE or parts[1] in keys:
                raise MasterKeyUnusable(
                    f"Line {number} of {file}, the file with the master key, is not `<name> <base64 of {SIZE} bytes>`, with a "
                    "name of its own.",
                    _HINT,
                )
            keys[parts[1]] = key
    if not keys:
        raise MasterKeyUnusable(f"{file}, the file of the master key, has no key.", _HINT)
    return Masters(keys)


def _bound(master: str, subject: str, key_id: str) -> bytes:
    return "\0".join(("samefold key 1", master, subject, key_id)).encode()
