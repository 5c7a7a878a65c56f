"""An issuer of tokens for tests: `Keys` signs, `IssuerServer` answers as an OpenID issuer does, and can fail as one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from infra.settings import Settings

AUDIENCE = "bank"
Private: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Keys:
    """Key pairs by id. `public` is their JSON Web Key Set."""

    def __init__(self, issuer: str, **algorithms: str) -> None:
        self.issuer = issuer
        self.private: dict[str, tuple[str, Private]] = {}
        for ident, algorithm in algorithms.items():
            self.add(ident, algorithm)

    def add(self, ident: str, algorithm: str) -> None:
        if algorithm.startswith(("RS", "PS")):
            key: Private = rsa.generate_private_key(65537, 2048)
        elif algorithm.startswith("ES"):
            key = ec.generate_private_key(ec.SECP256R1())
        else:
            key = ed25519.Ed25519PrivateKey.generate()
        self.private[ident] = algorithm, key

    @property
    def public(self) -> dict[str, Any]:
        return {"keys": [self.jwk(ident) for ident in self.private]}

    def jwk(self, ident: str) -> dict[str, Any]:
        algorithm, key = self.private[ident]
        public = key.public_key()
        if isinstance(public, rsa.RSAPublicKey):
            made = RSAAlgorithm.to_jwk(public, as_dict=True)
        elif isinstance(public, ec.EllipticCurvePublicKey):
            made = ECAlgorithm.to_jwk(public, as_dict=True)
        else:
            made = OKPAlgorithm.to_jwk(public, as_dict=True)
        return made | {"kid": ident, "alg": algorithm, "use": "sig"}

    def token(self, ident: str | None = None, *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """A good token of ada's for a minute, but for these claims; None leaves one out, a header too."""
        ident = ident or next(iter(self.private))
        algorithm, key = self.private[ident]
        now = int(time.time())
        good = {"iss": self.issuer, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 60, "roles": ["teller"]}
        payload = {name: value for name, value in (good | claims).items() if value is not None}
        named = {"kid": ident} | (headers or {})
        return jwt.encode(payload, key, algorithm, {name: value for name, value in named.items() if value is not None})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def locked(world: Settings, keys: Keys, where: str | Path | None = None, **others: Any) -> Settings:
    """The world with its door locked: it takes tokens of these keys."""
    of_issuer = {"jwt_issuer": keys.issuer, "jwt_audience": AUDIENCE, "jwt_keys": where and str(where)}
    return world.model_copy(update={"auth": "jwt", **of_issuer, **others})


def key_file(folder: Path, keys: Keys) -> Path:
    file = folder / "keys.json"
    file.write_text(json.dumps(keys.public))
    return file


class IssuerServer(ThreadingHTTPServer):
    """`answers` holds what each path is answered with; a path without an answer gets 500."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, keys: Keys) -> None:
        self.answers = {
            "/.well-known/openid-configuration": {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"},
            "/jwks": keys.public,
        }


class _Handler(BaseHTTPRequestHandler):
    server: IssuerServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path)
        self.send_response(200 if answer is not None else 500)
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def issuer_server() -> Iterator[IssuerServer]:
    with IssuerServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
