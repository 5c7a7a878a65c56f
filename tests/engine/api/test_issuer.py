"""make test: keys and tokens need one process and no store.

Tokens: which are taken, which are refused and why, and what happens to them while keys change or the issuer is down.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest

from api import issuer as issuers
from api.door import KeysNotKnown, TokenRefused
from api.issuer import Issuer
from infra.access import Caller
from infra.settings import Settings
from tests.engine.api.tokens import AUDIENCE, IssuerServer, Keys, issuer_server, key_file, locked

ISSUER = "https://issuer.example"
ALGORITHMS = ("RS256", "PS256", "ES256", "EdDSA")


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys(ISSUER, **{f"key-{one}": one for one in ALGORITHMS})


@pytest.fixture
def issuer(keys: Keys, tmp_path: Path) -> Issuer:
    return Issuer(locked(Settings(), keys, key_file(tmp_path, keys)), "api")


def caller(issuer: Issuer, token: str) -> Caller:
    return asyncio.run(issuer.caller_of(token)).caller


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_good_token_names_its_caller(issuer: Issuer, keys: Keys, algorithm: str) -> None:
    token = keys.token(f"key-{algorithm}", roles=["teller", "auditor"], scope="metrics read", tenant="north")
    found = caller(issuer, token)
    assert found == Caller("ada", frozenset({"teller", "auditor"}), frozenset({"metrics", "read"}))
    assert found.claims["tenant"] == "north"
    assert "north" not in repr(found)
    odd = """O'Hara "ada"; drop table live--"""
    assert caller(issuer, keys.token(sub=odd)).subject == odd


@pytest.mark.parametrize(
    ("typ", "claims"),
    [
        ("at+jwt", {}),
        ("application/AT+JWT", {"nonce": "n"}),
        ("JWT", {"scp": "access_as_user", "ver": "2.0"}),  # Entra
        ("JWT", {"typ": "Bearer", "nonce": "n"}),  # Keycloak, before its release 24 with a nonce
        (None, {"token_use": "access"}),
        (None, {}),
    ],
)
def test_an_access_token_may_say_so_as_issuers_do(
    issuer: Issuer, keys: Keys, typ: str | None, claims: dict[str, Any]
) -> None:
    assert caller(issuer, keys.token(headers={"typ": typ}, **claims)).subject == "ada"


@pytest.mark.parametrize(
    ("path", "claims", "roles"),
    [
        ("realm_access.roles", {"realm_access": {"roles": ["teller"]}}, {"teller"}),
        ("https://bank.example/roles", {"https://bank.example/roles": ["teller"]}, {"teller"}),
        ("roles", {"roles": "teller auditor"}, {"teller", "auditor"}),
        ("roles", {"roles": None}, set()),
        ("roles", {"roles": {"teller": True}}, set()),
        ("roles.of", {"roles": ["teller"]}, set()),
        ("roles", {"roles": [1, None, "teller", ["auditor"]]}, {"teller"}),
    ],
)
def test_roles_are_where_the_setting_says(
    keys: Keys, tmp_path: Path, path: str, claims: dict[str, Any], roles: set[str]
) -> None:
    issuer = Issuer(locked(Settings(), keys, key_file(tmp_path, keys), jwt_roles_claim=path), "api")
    assert caller(issuer, keys.token(**claims)).roles == roles


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def part(value: object) -> str:
    return encoded(json.dumps(value).encode())


def good_claims() -> dict[str, Any]:
    return {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": int(time.time()) + 60}


def unsigned(keys: Keys) -> str:
    return f"{part({'alg': 'none', 'kid': 'key-RS256'})}.{part(good_claims())}."


def signed_with_the_public_key(keys: Keys) -> str:
    """The attack on libraries that take the algorithm from the token, and a public key for the secret of an HMAC."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = keys.private["key-RS256"][1].public_key()
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    text = f"{part({'alg': 'HS256', 'kid': 'key-RS256'})}.{part(good_claims())}"
    return f"{text}.{encoded(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def other_payload(keys: Keys) -> str:
    head, _, signature = keys.token(roles=[]).split(".")
    return f"{head}.{keys.token(roles=['teller'], sub='eve').split('.')[1]}.{signature}"


def of_a_stranger(_: Keys) -> str:
    return Keys(ISSUER, **{"key-RS256": "RS256"}).token("key-RS256")


NOT_OF_ACCESS: dict[str, Any] = {
    "typ": "ID",  # Keycloak
    "token_use": "id",  # Cognito
    "nonce": "n-0S6_WzA2Mj",
    "at_hash": "MTIzNDU2Nzg5MDEyMzQ1Ng",
    "c_hash": "LDktKdoQak3Pk0cnXxCltA",
    "events": {"http://schemas.openid.net/event/backchannel-logout": {}},
}
BAD: dict[str, tuple[Callable[[Keys], str], str]] = {
    "empty": (lambda _: "", "not a JWT"),
    "a word": (lambda _: "letmein", "not a JWT"),
    "garbage": (lambda _: "a.b.c", "not a JWT"),
    "dots": (lambda _: "." * 8_000, "not a JWT"),
    "a deep header": (lambda _: f"{base64.urlsafe_b64encode(b'[' * 6_000).decode()}.e30.e30", "not a JWT"),
    "a long one, though good": (lambda keys: keys.token(text="x" * 8_192), "8192 bytes"),
    "no algorithm": (unsigned, "algorithm"),
    "HMAC with the public key": (signed_with_the_public_key, "algorithm"),
    "another key's algorithm": (lambda keys: keys.token("key-RS256", headers={"kid": "key-ES256"}), "not one of"),
    "another RSA padding": (lambda keys: keys.token("key-RS256", headers={"kid": "key-PS256"}), "algorithm"),
    "a stranger's key under a known id": (of_a_stranger, "signature"),
    "another payload": (other_payload, "signature"),
    "an unknown key": (lambda keys: keys.token(headers={"kid": "unheard"}), "not one of the issuer's"),
    "no key id, with several keys": (lambda keys: keys.token(headers={"kid": None}), "not"),
    "a critical header that nobody knows": (lambda keys: keys.token(headers={"crit": ["b"], "b": 1}), "not"),
    "another issuer": (lambda keys: keys.token(iss="https://evil.example"), "another issuer's"),
    "the issuer with a slash": (lambda keys: keys.token(iss=f"{ISSUER}/"), "another issuer's"),
    "another audience": (lambda keys: keys.token(aud="shop"), "another audience"),
    "other audiences": (lambda keys: keys.token(aud=["shop", "banking"]), "another audience"),
    "expired": (lambda keys: keys.token(exp=int(time.time()) - issuers.LEEWAY_S - 1), "expired"),
    "not yet valid": (lambda keys: keys.token(nbf=int(time.time()) + issuers.LEEWAY_S + 120), "not valid yet"),
    "issued in the future": (lambda keys: keys.token(iat=int(time.time()) + 3_600), "not valid yet"),
    "an expiry that is no number": (lambda keys: keys.token(exp="tomorrow"), "not valid"),
    "an endless expiry": (lambda keys: keys.token(exp=float("inf")), "not valid"),
    **{
        f"without {name}": (partial(Keys.token, **{name: None}), "lacks")  # type: ignore[arg-type]
        for name in ("exp", "iss", "aud", "sub")
    },
    **{
        f"the type {typ}": (partial(Keys.token, headers={"typ": typ}), "not an access token")
        for typ in ("id_token+jwt", "logout+jwt", "dpop+jwt", "secevent+jwt", "application/at+jwtx", 7)
    },
    **{
        f"the claim {name}, as of another kind": (partial(Keys.token, **{name: value}), "not an access token")
        for name, value in NOT_OF_ACCESS.items()
    },
    "a subject that is a number": (lambda keys: _signed(keys, sub=7), "not valid"),
    **{
        f"the subject {subject!r}": (partial(Keys.token, sub=subject), "subject")
        for subject in (
            "",
            'ada"\n2026 INFO',
            "ada\x1b[2J",
            "ada\0",
            "ada\ud800",
            "ä" * 101,
            "policy:transfers",
            "operator:eve",
        )
    },
}


def _signed(keys: Keys, **claims: Any) -> str:
    """Signed without the library's checks of claims."""
    payload = good_claims() | claims
    algorithm, key = keys.private["key-RS256"]
    return jwt.PyJWS().encode(json.dumps(payload).encode(), key, algorithm, {"kid": "key-RS256"})


@pytest.mark.parametrize("name", BAD)
def test_a_bad_token_is_refused_with_the_reason(issuer: Issuer, keys: Keys, name: str) -> None:
    make, why = BAD[name]
    with pytest.raises(TokenRefused, match=why):
        caller(issuer, make(keys))


def test_clocks_may_be_half_a_minute_apart(issuer: Issuer, keys: Keys) -> None:
    now, nearly = int(time.time()), issuers.LEEWAY_S - 15  # a busy machine may take some of it
    assert caller(issuer, keys.token(nbf=now + nearly, iat=now + nearly, exp=now + 90)).subject == "ada"
    assert caller(issuer, keys.token(exp=now - nearly)).subject == "ada"


def test_a_remembered_token_ends_too(issuer: Issuer, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    token, now = keys.token(), time.time()
    assert caller(issuer, token).subject == "ada"
    monkeypatch.setattr(time, "time", lambda: now + 60 + issuers.LEEWAY_S + 1)
    with pytest.raises(TokenRefused, match="expired"):
        caller(issuer, token)


def test_a_key_is_found_by_its_id_and_kind_and_may_leave_the_algorithm_open(tmp_path: Path) -> None:
    rsa, ec, closed = Keys(ISSUER, one="RS256"), Keys(ISSUER, one="ES256"), Keys(ISSUER, one="EdDSA")
    file = tmp_path / "keys.json"
    listed = [{name: value for name, value in rsa.jwk("one").items() if name != "alg"}, ec.jwk("one")]
    listed.append(closed.jwk("one") | {"key_ops": ["encrypt"]})
    file.write_text(json.dumps({"keys": listed}))
    issuer = Issuer(locked(Settings(), rsa, file), "api")

    def of_algorithm(algorithm: str, keys: Keys) -> str:
        return jwt.encode(good_claims(), keys.private["one"][1], algorithm, {"kid": "one"})

    for algorithm in ("RS256", "RS512", "PS256"):
        assert caller(issuer, of_algorithm(algorithm, rsa)).subject == "ada"
    assert caller(issuer, of_algorithm("ES256", ec)).subject == "ada"
    with pytest.raises(TokenRefused, match="not one of"):
        caller(issuer, of_algorithm("EdDSA", closed))


# ── an issuer's server ──

UNHEARD = {"kid": "unheard"}
METADATA = "/.well-known/openid-configuration"


class Served:
    """A server with an issuer's only key, `one`, and who reads it: at this path, or where the metadata lead."""

    def __init__(self, server: IssuerServer, path: str | None = None) -> None:
        self.server, self.keys = server, Keys(server.url, one="ES256")
        server.serve(self.keys)
        self.issuer = Issuer(locked(Settings(), self.keys, path and f"{server.url}{path}"), "api")

    def caller(self, ident: str | None = None, **token: Any) -> str:
        """Whom the door takes the bearer of such a token for."""
        return caller(self.issuer, self.keys.token(ident, **token)).subject


@pytest.fixture
def by_metadata() -> Iterator[Served]:
    with issuer_server() as server:
        yield Served(server)


@pytest.fixture
def served() -> Iterator[Served]:
    with issuer_server() as server:
        yield Served(server, "/jwks")


Later = Callable[[float], None]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Moves the monotonic clock of the issuer's module on."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    return move


def test_the_issuers_metadata_lead_to_its_keys_and_a_single_one_needs_no_id(by_metadata: Served) -> None:
    assert by_metadata.caller() == by_metadata.caller(headers={"kid": None}) == "ada"
    assert by_metadata.server.asked == [METADATA, "/jwks"]


def test_a_new_key_is_read_when_a_token_names_it(served: Served, later: Later) -> None:
    served.caller()
    served.keys.add("two", "ES256")
    served.server.serve(served.keys)
    later(issuers.AGAIN_S)
    assert served.caller("two") == "ada"
    assert served.server.asked == ["/jwks"] * 2


def test_unknown_keys_make_the_issuer_be_asked_now_and_then_only(served: Served, later: Later) -> None:
    strangers = [served.keys.token(headers={"kid": f"unheard-{number}"}) for number in range(50)]

    async def ask() -> None:
        found = await asyncio.gather(*map(served.issuer.caller_of, strangers), return_exceptions=True)
        assert {type(one) for one in found} == {TokenRefused}

    asyncio.run(ask())
    assert served.server.asked == ["/jwks"]


def test_a_key_that_was_withdrawn_is_worth_nothing_even_for_remembered_tokens(served: Served, later: Later) -> None:
    token = served.keys.token()
    caller(served.issuer, token)
    del served.keys.private["one"]
    served.keys.add("two", "ES256")
    served.server.serve(served.keys)
    later(issuers.FRESH_S)
    with pytest.raises(TokenRefused, match="not one of"):
        served.caller(headers=UNHEARD)  # makes the keys be read again
    with pytest.raises(TokenRefused, match="not one of"):
        caller(served.issuer, token)


def test_while_the_issuer_is_down_known_keys_stay_good_and_unknown_ones_are_not_known(
    served: Served, later: Later
) -> None:
    served.caller()
    served.server.answers.clear()
    later(issuers.FRESH_S)
    with pytest.raises(KeysNotKnown):
        served.caller(headers=UNHEARD)
    assert served.caller(sub="bob") == "bob"
    assert served.issuer.unready() is None


def odd_answers(url: str) -> dict[str, dict[str, Any]]:
    """What an issuer's server may answer, by path."""
    uris = {"no host name": "https://xn--é/", "a control character": f"{url}/\x07", "long": f"{url}/{'x' * 70_000}"}
    return {
        **{f"a URI with {name}": {METADATA: {"issuer": url, "jwks_uri": uri}} for name, uri in uris.items()},
        "deep keys": {"/jwks": b'{"keys":' + b"[" * 100_000},
        "a list for metadata": {METADATA: []},
    }


@pytest.mark.parametrize("name", odd_answers(""))
def test_whatever_an_issuer_answers_its_known_keys_stay_good(by_metadata: Served, later: Later, name: str) -> None:
    by_metadata.caller()
    by_metadata.server.answers |= odd_answers(by_metadata.server.url)[name]
    later(issuers.FRESH_S)
    errors = []
    for _ in range(2):
        with pytest.raises(KeysNotKnown) as refused:
            by_metadata.caller(headers=UNHEARD)
        errors.append(refused.value)
    assert errors[0] is not errors[1], "an error holds the frames of all requests that it was raised in"
    assert by_metadata.caller(sub="bob") == "bob"


def key_sets(keys: Keys) -> dict[str, Any]:
    """Key sets without a usable key."""
    return {
        "nothing": b"",
        "no JSON": b"<html>maintenance</html>",
        "a list": [],
        "no keys": {"keys": []},
        "keys that are no list": {"keys": "none"},
        "odd keys": {
            "keys": [1, None, {}, {"kty": "RSA"}, {"kty": "x"}, {"kty": "EC", "crv": "P-256", "x": "!", "y": "!"}]
        },
        "a secret": {"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "one"}]},
        "keys for encryption": {"keys": [one | {"use": "enc"} for one in keys.public["keys"]]},
        "keys with odd ids": {"keys": [one | {"kid": ["x"]} for one in keys.public["keys"]]},
        "too much": b'{"keys": [' + b" " * 2_000_000 + b"]}",
    }


@pytest.mark.parametrize("name", key_sets(Keys(ISSUER)))
def test_keys_that_are_none_leave_the_door_locked(served: Served, name: str) -> None:
    served.server.answers["/jwks"] = key_sets(served.keys)[name]
    with pytest.raises(KeysNotKnown):
        served.caller()
    assert isinstance(served.issuer.unready(), KeysNotKnown)


@pytest.mark.parametrize(
    "changed", [{"issuer": "https://evil.example"}, {"jwks_uri": "http://keys.example/jwks"}], ids=str
)
def test_metadata_of_another_or_keys_over_a_line_that_anybody_can_change_are_not_believed(
    by_metadata: Served, changed: dict[str, str]
) -> None:
    by_metadata.server.answers[METADATA] |= changed
    with pytest.raises(KeysNotKnown):
        by_metadata.caller()
