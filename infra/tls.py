"""Finds out why a server's certificate is not accepted: client libraries say only that it is not."""

from __future__ import annotations

import socket
import ssl

TIMEOUT_S = 3.0


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
