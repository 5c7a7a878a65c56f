"""Says which connections are not protected, and why a certificate is not accepted: client libraries say only that it is not."""

import ipaddress
import socket
import ssl
from collections.abc import Iterator

from infra.settings import Settings

TIMEOUT_S = 3.0


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


def fault(host: str, port: int, authorities: str | None, greeting: bytes = b"") -> str | None:
    """What is wrong with the certificate that the server shows, as OpenSSL says it; None if nothing, or if it can't be reached.

    `authorities` is a file, None for the system's. A server that expects a `greeting` in plain text answers `S` to it.
    """
    try:
        context = ssl.create_default_context(cafile=authorities)
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            if greeting:
                connection.sendall(greeting)
                if connection.recv(1) != b"S":
                    return None
            context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message.rstrip(".")
    except OSError:
        return None
    return None


def speaks(host: str, port: int) -> bool:
    """Whether a server expects TLS from the first byte on, whatever its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            context.wrap_socket(connection).close()
    except OSError:
        return False
    return True
