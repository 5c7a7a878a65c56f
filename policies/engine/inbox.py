"""The inbox: the topic of what other services send to this one's webhooks (`api/hooks.py`). Here is which webhooks there are.

A record's key is the message's id, its value the body as it came. Its headers are `HOOK`, `ID`, and of the request's own
`TIMESTAMP`, content-type, the one with the message's type and the trace.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from dataclasses import dataclass

from infra.errors import BadSettings
from infra.settings import Settings, Source, signing_key
from policies.engine.policy import BadPolicy, discover
from policies.engine.source import Verify

HOOK, ID, TIMESTAMP, SIGNATURE = "samefold-hook", "webhook-id", "webhook-timestamp", "webhook-signature"
MOST_READ = 8_192
"""Of the signatures' header, in bytes: each is compared with each secret's, in the loop that serves all requests."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook that policies receive from. Without `verify`, its messages are signed as Standard Webhooks says."""

    name: str
    source: Source
    verify: Verify | None
    types: frozenset[str]
    """The headers that may have a message's type."""

    def is_signed(self, ident: str, sent: str, signatures: str, body: bytes) -> bool:
        """Whether one of the signatures is made with one of the secrets. The standard's library signs text alone."""
        signed = b".".join((ident.encode("latin-1"), sent.encode("latin-1"), body))
        keys = map(signing_key, self.source.secrets)
        wanted = [b"v1," + b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
        given = [one.encode("latin-1") for one in signatures[:MOST_READ].split(" ") if one.startswith("v1,")]
        return any(hmac.compare_digest(one, other) for one in wanted for other in given)


def hooks_of(settings: Settings) -> list[Hook]:
    """The webhooks that these settings name and some policy receives from. Raises BadPolicy, BadContext, BadSettings."""
    found = []
    for name, source in settings.sources.items():
        policies = discover().values() if source.secrets else ()
        if receivers := [one.source for one in policies if one.source and one.source.name == name]:
            verify, *others = {one.verify for one in receivers}
            if others:
                raise BadPolicy(
                    f"The policies that receive from the webhook '{name}' do not have the same `verify`.",
                    f"Write it once, like in policies/_{name}.py, and import it into each.",
                )
            if verify is None:
                _require_keys(name, source)
            found.append(Hook(name, source, verify, frozenset(filter(None, (one.type_header for one in receivers)))))
    return found


def _require_keys(name: str, source: Source) -> None:
    try:
        _ = [signing_key(secret) for secret in source.secrets]
    except ValueError as error:
        raise BadSettings(
            f"Wrong settings: SAMEFOLD_SOURCES, {name}, secrets: {error}.",
            "If its sender signs in a way of its own, let the policy have a function `verify` (docs/sources.md).",
        ) from None
