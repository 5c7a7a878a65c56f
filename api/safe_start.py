"""Refuses settings with which the API would accept callers that it must not."""

from __future__ import annotations

from urllib.parse import urlsplit

from infra.access import access
from infra.errors import BadSettings, SamefoldError
from infra.settings import Settings
from infra.tls import is_loopback


class ListensToAll(SamefoldError):
    """The API would answer every program that reaches its address."""

    exit_code = 2


def require_safe(settings: Settings, host: str) -> None:
    """Raises ListensToAll, BadAccess, BadSettings where the API, listening on that host, would accept callers that it must not."""
    if settings.auth == "off" and not is_loopback(host):
        raise ListensToAll(
            f"The API would listen on {host}, beyond this machine, and answer every caller: SAMEFOLD_AUTH is off.",
            "Set SAMEFOLD_AUTH=jwt (docs/access.md), or SAMEFOLD_AUTH=in-front if a gateway decides who may pass.",
        )
    if settings.auth != "jwt":
        return
    access()
    if not (settings.jwt_issuer and settings.jwt_audience):
        raise BadSettings(
            "Wrong settings: auth=jwt needs jwt_issuer and jwt_audience.",
            "See docs/access.md. `samefold dev up` starts a development stack with an issuer.",
        )
    name, where = ("JWT_KEYS", settings.jwt_keys) if settings.jwt_keys else ("JWT_ISSUER", settings.jwt_issuer or "")
    if name == "JWT_KEYS" and "://" not in where:
        return
    try:
        require_https(where)
    except ValueError as error:
        raise BadSettings(
            f"Wrong settings: SAMEFOLD_{name}: {error}.", "Or name a file in SAMEFOLD_JWT_KEYS."
        ) from None


def require_https(url: str) -> None:
    """Raises ValueError for a URL under which others than its owner could answer."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        raise ValueError(f"{url[:200]!r} must begin with https://")
