"""Says which connections are not protected, when certificates expire, and why one is not accepted: client libraries don't."""

import ipaddress
import socket
import ssl
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from infra.settings import Settings

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

TIMEOUT_S = 3.0
POSTGRESQL = struct.pack("!ii", 8, 80877103)
"""The greeting by which a client of PostgreSQL asks for TLS."""


def unprotected(settings: Settings) -> Iterator[str]:
    """The connections that leave this machine without verified TLS, and what to set."""
    from psycopg.conninfo import conninfo_to_dict

    brokers = [place.strip() for place in (settings.kafka_bootstrap or "").split(",") if place.strip()]
    if not settings.kafka_security_protocol.endswith("SSL") and not all(map(_is_near, brokers)):
        yield f"Kafka at {settings.kafka} is reached without TLS: set SAMEFOLD_KAFKA_SECURITY_PROTOCOL=SASL_SSL"
    known = conninfo_to_dict(settings.database) if settings.database_url else {}
    mode, host = known.get("sslmode") or "prefer", str(known.get("host") or "")
    if mode != "verify-full" and not all(map(_is_near, host.split(","))):
        yield f"PostgreSQL at {host} is reached with sslmode={mode}: add sslmode=verify-full to SAMEFOLD_DATABASE_URL"


def _is_near(place: str) -> bool:
    """Whether a host, with or without a port, is this machine; so is the folder of a socket."""
    host = place.rpartition(":")[0] if place.count(":") == 1 or place.startswith("[") else place
    host = host.strip("[]")
    return is_loopback(host) or host == "" or host.startswith(("/", "@"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host: a loopback address, or the name that always is one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def expiries(settings: Settings, brokers: Iterable[tuple[str, int]]) -> dict[str, float]:
    """When the first certificate expires of those that the brokers and PostgreSQL show, and the last of each file of authorities.

    In seconds since the epoch. What is not there, or can't be reached or read, is left out.
    """
    from cryptography import x509
    from psycopg.conninfo import conninfo_to_dict

    known = conninfo_to_dict(settings.database)
    hosts, ports = (str(known.get(key) or default).split(",") for key, default in (("host", "/"), ("port", "5432")))
    servers = [
        (host, int(port or 5432)) for host, port in zip(hosts, cycle(ports), strict=False) if host[:1] not in "/@"
    ]
    authorities = {"kafka": settings.kafka_ssl_ca_location, "postgresql": known.get("sslrootcert")}
    shown = {
        "kafka": [_shown(*one) for one in brokers] if settings.kafka_security_protocol.endswith("SSL") else [],
        "postgresql": [_shown(*one, POSTGRESQL) for one in servers],
    }
    found = {of: [one for one in ones if one] for of, ones in shown.items()}
    for of, file in authorities.items():
        with suppress(OSError, ValueError):  # "system" is no file
            found[f"{of}-authorities"] = x509.load_pem_x509_certificates(Path(str(file)).read_bytes())
    # of a bundle of authorities some have always expired: it is of no use once all have
    first = {of: max if of.endswith("-authorities") else min for of in found}
    return {of: first[of](one.not_valid_after_utc.timestamp() for one in ones) for of, ones in found.items() if ones}


def _shown(host: str, port: int, greeting: bytes = b"") -> "Certificate | None":
    """The certificate that a server shows, whether it is accepted or not; None if there is none that can be read."""
    from cryptography import x509

    with suppress(OSError, ValueError), _connected(host, port, _any_certificate(), greeting) as connection:
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
    return None


def fault(host: str, port: int, authorities: str | None, greeting: bytes = b"") -> str | None:
    """What is wrong with the certificate that the server shows, as OpenSSL says it; None if nothing, or if it can't be reached.

    `authorities` is a file, None for the system's. A server that expects a `greeting` in plain text answers `S` to it.
    """
    try:
        _connected(host, port, ssl.create_default_context(cafile=authorities), greeting).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message.rstrip(".")
    except OSError:
        return None
    return None


def speaks(host: str, port: int) -> bool:
    """Whether a server expects TLS from the first byte on, whatever its certificate."""
    try:
        _connected(host, port, _any_certificate()).close()
    except OSError:
        return False
    return True


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _connected(host: str, port: int, context: ssl.SSLContext, greeting: bytes = b"") -> ssl.SSLSocket:
    """A connection with TLS. Raises OSError, also where the server does not answer `S` to the greeting."""
    with socket.create_connection((host, port), TIMEOUT_S) as plain:
        if greeting:
            plain.sendall(greeting)
            if plain.recv(1) != b"S":
                raise OSError("no TLS")
        return context.wrap_socket(plain, server_hostname=host)  # which takes the connection over
