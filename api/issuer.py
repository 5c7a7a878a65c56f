"""Checks tokens: JWTs (RFC 7519, with the advice of RFC 8725) that an OpenID issuer has signed.

Its keys are read again every few minutes, and when a token names an unknown one. While it can't be reached, known keys stay valid.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import httpx
import jwt
import msgspec
from jwt import PyJWK

from api.door import KeysNotKnown, TokenRefused
from api.safe_start import require_https
from infra.access import Caller
from infra.errors import SamefoldError
from infra.observability.logs import StatusLog
from infra.settings import Settings

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures only: no `none`, and no HMAC, whose secret could be a public key."""
KEY_KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""The kind of key that an algorithm needs, by its first two letters."""
LEEWAY_S = 30
"""How far the issuer's clock and this one may be apart."""
FRESH_S = 300
"""After so long the keys are read again."""
AGAIN_S = 10
"""A token with an unknown key makes the keys be read again, at most so often."""
READ_S = 5
"""How long reading them may take."""
MOST_BYTES = 1_000_000
MAX_TOKEN_BYTES = 8_192
MOST_REMEMBERED = 2_000
"""Verified tokens: to check a signature takes longer than all other checks together."""
MAX_SUBJECT_BYTES = 200
"""Subjects are stored with each command."""
RESERVED = ("policy:", "operator:")
"""So begins the `by` of commands that no caller sent."""
OF_OTHERS = frozenset({"nonce", "at_hash", "c_hash", "s_hash", "events"})
"""Claims of ID tokens and security events, which no access token has (OpenID Connect Core, RFC 8417)."""


KeySet: TypeAlias = dict[tuple[str | None, str], dict[str, Any]]
"""The issuer's public keys, as JWKs (RFC 7517), by id and kind."""


class Verified(NamedTuple):
    """A good token's caller, and until when the token is one, in seconds since the epoch."""

    caller: Caller
    until: float


class Issuer:
    """The issuer that the settings name, with its keys as they were read last."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._keys: KeySet = {}
        self._read: tuple[float, SamefoldError | None] = -AGAIN_S, KeysNotKnown("The issuer's keys were not read yet.")
        """When the keys were last asked for, by the monotonic clock, and what was wrong."""
        self._reading = asyncio.Lock()
        self._remembered: dict[bytes, Verified] = {}
        self._status = StatusLog(log, name)

    def unready(self) -> SamefoldError | None:
        """Why no token can be checked, or None."""
        return None if self._keys else self._read[1]

    async def keep_reading(self) -> None:
        """Read the keys now and then, for ever."""
        while True:
            await self._refresh()
            await asyncio.sleep(FRESH_S if self._read[1] is None else AGAIN_S + 0.1)  # not a moment too early

    async def caller_of(self, token: str) -> Verified:
        """Who shows the token. Raises TokenRefused, KeysNotKnown."""
        if len(token) > MAX_TOKEN_BYTES:
            raise TokenRefused(f"The token has more than {MAX_TOKEN_BYTES} bytes.")
        digest = hashlib.sha256(token.encode()).digest()
        found = self._remembered.get(digest)
        if found is None:
            found = self._verified(token, await self._key_of(token))
            while len(self._remembered) >= MOST_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[digest] = found
        if found.until <= time.time():
            raise TokenRefused("The token has expired.")
        return found

    async def _key_of(self, token: str) -> PyJWK:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            raise TokenRefused("The token is not a JWT.") from None
        algorithm = str(header.get("alg"))
        if algorithm not in ALGORITHMS:
            raise TokenRefused("The token's algorithm is not allowed.")
        name = header.get("kid"), KEY_KINDS[algorithm[:2]]
        if name not in self._keys:
            await self._refresh()
        if (key := self._keys.get(name)) is not None:
            try:
                return PyJWK(key, key.get("alg", algorithm))
            except jwt.PyJWTError:
                raise TokenRefused("The token's algorithm is not that of the key.") from None
        if (wrong := self._read[1]) is not None:
            # a new one: an error that is raised again keeps the frames of all requests
            raise KeysNotKnown(wrong.message, wrong.hint)
        raise TokenRefused("The token is signed with a key that is not one of the issuer's.")

    def _verified(self, token: str, key: PyJWK) -> Verified:
        settings = self._settings
        try:
            decoded = jwt.decode_complete(
                token,
                key,
                algorithms=ALGORITHMS,
                issuer=settings.jwt_issuer,
                audience=settings.jwt_audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"], "enforce_minimum_key_length": True},
            )
            claims = decoded["payload"]
            until = float(claims["exp"]) + LEEWAY_S
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise TokenRefused(_WRONG.get(type(error), "The token is not valid.")) from None
        if not _is_access_token(decoded["header"], claims):
            raise TokenRefused("The token is not an access token.")
        subject = claims["sub"]
        size = len(subject.encode(errors="replace"))
        if not 0 < size <= MAX_SUBJECT_BYTES or not subject.isprintable() or subject.startswith(RESERVED):
            raise TokenRefused("The token's subject is not a name that this service can keep.")
        caller = Caller(
            subject,
            _names(_at(claims, settings.jwt_roles_claim)),
            _names(claims.get("scope")),
            MappingProxyType(claims),
        )
        return Verified(caller, until)

    async def _refresh(self) -> None:
        """Read the keys, unless another request just has."""
        async with self._reading:
            if time.monotonic() - self._read[0] < AGAIN_S:
                return
            try:
                keys = _usable(await _keys_of(self._settings))
                wrong = None if keys else KeysNotKnown("The issuer names no key that signatures can be checked with.")
            except Exception as error:  # whatever an issuer may answer with: known keys stay good
                keys, wrong = {}, KeysNotKnown("The issuer's keys can't be read.", "See the log of this process.")
                self._status.wrong(
                    "keys", f"the issuer's keys can't be read: {type(error).__name__}: {error}", "unread"
                )
            if wrong is None:
                self._status.well("keys", "the issuer's keys can be read again")
                if keys != self._keys:
                    self._remembered.clear()  # a key that the issuer has withdrawn signs nothing any more
                self._keys = keys
            self._read = time.monotonic(), wrong


_WRONG: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "The token has expired.",
    jwt.ImmatureSignatureError: "The token is not valid yet.",
    jwt.InvalidIssuerError: "The token is another issuer's.",
    jwt.InvalidAudienceError: "The token is for another audience.",
    jwt.InvalidSignatureError: "The token's signature is wrong.",
    jwt.InvalidAlgorithmError: "The token's algorithm is not allowed.",
    jwt.MissingRequiredClaimError: "The token lacks a claim: exp, iss, aud and sub must be there.",
}


async def _keys_of(settings: Settings) -> Any:
    """The issuer's JSON Web Key Set, as it is now."""
    if settings.jwt_keys and "://" not in settings.jwt_keys:
        return msgspec.json.decode(await asyncio.to_thread(Path(settings.jwt_keys).read_bytes))
    async with asyncio.timeout(READ_S), httpx.AsyncClient(timeout=READ_S) as client:
        where = settings.jwt_keys
        if not where:
            issuer = str(settings.jwt_issuer)
            metadata = await _json(client, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if metadata.get("issuer") != issuer:
                raise ValueError(f"its metadata are those of another issuer: {str(metadata.get('issuer'))[:100]!r}")
            where = str(metadata.get("jwks_uri"))
        return await _json(client, where)


async def _json(client: httpx.AsyncClient, url: str) -> Mapping[str, Any]:
    require_https(url)
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        body = bytearray()
        async for part in answer.aiter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"{url} has more than {MOST_BYTES} bytes")
    return msgspec.json.decode(body, type=dict[str, Any])


def _usable(key_set: Any) -> KeySet:
    """Those that signatures can be checked with. A kind's only key may be named by None, too."""
    found: KeySet = {}
    listed = key_set.get("keys") if isinstance(key_set, dict) else None
    for one in listed if isinstance(listed, list) else ():
        if not isinstance(one, dict) or one.get("use", "sig") != "sig" or not isinstance(one.get("kid"), str | None):
            continue
        try:
            algorithm = PyJWK(one).algorithm_name
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # of a kind that this library does not know
        if algorithm in ALGORITHMS and "verify" in one.get("key_ops", ["verify"]):
            found[one.get("kid"), KEY_KINDS[algorithm[:2]]] = one
    for kind in {kind for _, kind in found}:
        if len(keys := [key for name, key in found.items() if name[1] == kind]) == 1:
            found[None, kind] = keys[0]
    return found


def _is_access_token(header: Mapping[str, Any], claims: Mapping[str, Any]) -> bool:
    """By its type (RFC 9068); many issuers give all tokens the type `JWT` or none, and some of them name the use in a claim."""
    match str(header.get("typ", "JWT")).lower().removeprefix("application/"):
        case "at+jwt":
            return True
        case "jwt":
            use = claims.get("typ", claims.get("token_use"))  # Keycloak's, and Amazon Cognito's
            return OF_OTHERS.isdisjoint(claims) if use is None else use in ("Bearer", "access")
        case _:
            return False


def _at(claims: Mapping[str, Any], path: str) -> Any:
    """The claim at a path like `realm_access.roles`; a claim of that whole name comes first."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _names(claim: Any) -> frozenset[str]:
    """Roles or scopes: a list of texts, or one text with spaces (RFC 8693, section 4.2)."""
    parts = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else ()
    return frozenset(part for part in parts if isinstance(part, str))
