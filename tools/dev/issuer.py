"""The development stack's own issuer of tokens: a key pair in the data folder. For this machine only."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

ISSUER = "samefold-dev"
AUDIENCE = "samefold"


class DevIssuer:
    """Its private key and its key set are files of the folder; they are made where they are missing."""

    def __init__(self, folder: Path) -> None:
        self._private = folder / "private.json"
        self.keys = folder / "keys.json"
        """What SAMEFOLD_JWT_KEYS names."""

    def make(self) -> None:
        """The files, unless they are there. Called by one process at a time."""
        if self.keys.exists():
            return
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
        from jwt.algorithms import ECAlgorithm

        private = ECAlgorithm.to_jwk(generate_private_key(SECP256R1()), as_dict=True)
        private |= {"kid": "dev", "alg": "ES256", "use": "sig"}
        self._private.parent.mkdir(exist_ok=True)
        self._private.touch(0o600)
        self._private.write_bytes(msgspec.json.encode(private))
        public = {name: value for name, value in private.items() if name != "d"}
        self.keys.write_bytes(msgspec.json.encode({"keys": [public]}))

    def token(self, subject: str, roles: Sequence[str], scopes: Sequence[str], minutes: float) -> str:
        """A token of this subject, valid from now on. The files must be there."""
        import jwt

        now = int(time.time())
        claims: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject}
        claims |= {"iat": now, "exp": now + int(60 * minutes)}
        claims |= {"roles": list(roles)} if roles else {}
        claims |= {"scope": " ".join(scopes)} if scopes else {}
        key = jwt.PyJWK(msgspec.json.decode(self._private.read_bytes()))
        return jwt.encode(claims, key, headers={"kid": "dev", "typ": "at+jwt"})
