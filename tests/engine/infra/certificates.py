"""An authority that makes certificates for one test run."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """An authority; `pem` is its own certificate."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        use = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = self._builder(self._name, self._key.public_key(), -DAY, 2 * DAY)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = _pem(made.add_extension(use, critical=True).sign(self._key, hashes.SHA256()))

    def write(self, folder: Path, name: str, *, expired: bool = False) -> None:
        """Write `<name>.pem`, key and certificate of a server on 127.0.0.1, and each of them as `<name>.key` and `<name>.crt`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        ends = -DAY / 2 if expired else DAY
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(subject, key.public_key(), -DAY, ends).add_extension(names, critical=False)
        certificate = _pem(made.sign(self._key, hashes.SHA256()))
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        for suffix, text in (("pem", secret + certificate), ("crt", certificate), ("key", secret)):
            file = folder / f"{name}.{suffix}"
            file.write_text(text)
            file.chmod(0o600)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime.timedelta, ends: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
        # Python 3.13 asks for both
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        own = x509.SubjectKeyIdentifier.from_public_key(key)
        return builder.add_extension(authority, critical=False).add_extension(own, critical=False)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
