"""Tokens: sealed personal values, as ASCII texts that JSON, Kafka and PostgreSQL hold unchanged.

    ~Personal~1~<key id, 16 hex digits>~<base64url(nonce | ciphertext | tag)>~<base64url(fallback), empty: FALLBACK>~

Its last character ends a token, so that a text may have others before and after it, next to each other too. A value that is
sealed again for the same command gives the same token, so a repeated command has the same body; in another command it gives another
one. Everything here is pure: who has the keys passes them in.
"""

from __future__ import annotations

import hmac
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "~Personal~1~"
"""A capital, so that a token whose case was changed is none, and is refused: it could never be opened."""
FALLBACK = "(forgotten)"
"""What is shown for a forgotten value whose field declares nothing else."""

HIDDEN = "(hidden)"
"""What is shown to somebody who may not see the value."""

NONCE = 12
_TOKEN = re.compile(PREFIX + r"([0-9a-f]{16})~([A-Za-z0-9_-]+)~([A-Za-z0-9_-]*)~")
_PREFIX_BYTES, _TOKEN_BYTES = PREFIX.encode(), re.compile(_TOKEN.pattern.encode())


def sealed(plain: str, key_id: str, key: bytes, *, command_id: str, number: int, fallback: str = FALLBACK) -> str:
    """The token of the command's value with this number. Raises ValueError for an empty fallback, or lone surrogates."""
    if not fallback:
        raise ValueError("an empty fallback can't be told from none")
    head, tail = f"{PREFIX}{key_id}~", "" if fallback == FALLBACK else _text(fallback.encode())
    secret, bound = plain.encode(), _bound(head, tail)
    # over everything that is encrypted or authenticated: one nonce for two different messages would break AES-GCM
    place = json.dumps([command_id, number, bound.decode(), plain]).encode()
    nonce = hmac.digest(_derived(key, "nonce"), place, "sha256")[:NONCE]
    return f"{head}{_text(nonce + cipher(_derived(key, 'encryption')).encrypt(nonce, secret, bound))}~{tail}~"


def may_hold(text: bytes | str) -> bool:
    """Whether a text may have tokens. It costs next to nothing where it has none."""
    # one character is looked for a hundred times as fast as several
    return b"~" in text and _PREFIX_BYTES in text if isinstance(text, bytes) else "~" in text and PREFIX in text


def key_ids(text: bytes | str) -> set[str]:
    """The ids of the keys of all tokens in a text."""
    if not may_hold(text):
        return set()
    if isinstance(text, bytes):
        return {found[1].decode() for found in _TOKEN_BYTES.finditer(text)}
    return {found[1] for found in _TOKEN.finditer(text)}


def opened(text: bytes, keys: Mapping[str, bytes | None]) -> bytes:
    """JSON with each token replaced by its value, or by its fallback where the key is not there or is not the right one."""
    if not may_hold(text):
        return text
    return _TOKEN_BYTES.sub(lambda found: _escaped(_opened(found[0].decode(), keys)).encode(), text)


def opened_text(text: str, keys: Mapping[str, bytes | None]) -> str:
    """The same for a text that is not JSON."""
    return _TOKEN.sub(lambda found: _opened(found[0], keys), text) if may_hold(text) else text


def opened_value(value: Any, keys: Mapping[str, bytes | None]) -> Any:
    """The same for all texts in what JSON was decoded to."""
    return _each_text(value, lambda text: opened_text(text, keys))


def hidden_value(value: Any) -> Any:
    """What JSON was decoded to, for somebody who may not see the values of its tokens."""
    return _each_text(value, lambda text: _TOKEN.sub(HIDDEN, text) if may_hold(text) else text)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            return {change(name): _each_text(one, change) for name, one in value.items()}
        case list():
            return [_each_text(one, change) for one in value]
        case _:
            return value


def _opened(token: str, keys: Mapping[str, bytes | None]) -> str:
    from cryptography.exceptions import InvalidTag

    key_id, data, tail = token.removeprefix(PREFIX).removesuffix("~").split("~")
    fallback = FALLBACK
    try:
        fallback = _bytes(tail).decode() or FALLBACK
        if key := keys.get(key_id):
            sealed_bytes = _bytes(data)
            nonce, secret, bound = sealed_bytes[:NONCE], sealed_bytes[NONCE:], _bound(f"{PREFIX}{key_id}~", tail)
            return cipher(_derived(key, "encryption")).decrypt(nonce, secret, bound).decode()
    except (ValueError, InvalidTag):  # an altered token, or a wrong key
        pass
    return fallback


def _bound(head: str, tail: str) -> bytes:
    return f"{head}~{tail}~".encode()


def cipher(key: bytes) -> AESGCM:
    """AES-GCM with this very key."""
    # not above: a process that meets no token does without this import, which takes as long as all others of this module
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"samefold personal 1 {purpose}".encode(), "sha256")


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Raises ValueError for anything but what `_text` writes: of the last character not all bits count."""
    data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _text(data) != text:
        raise ValueError("not the canonical base64")
    return data


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
