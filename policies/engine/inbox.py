"""The inbox: the topic of what other services send to webhooks of this one (`api/hooks.py`). Here is which webhooks there are.

A record's key is the message's id, its value the body as it came; its headers are `HOOK`, `ID`, and of the request's own
`TIMESTAMP`, content-type, the one with the message's type, and CloudEvents' (`ce_…`).
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.errors import BadSettings
from infra.settings import Settings, signing_key
from policies.engine.policy import BadPolicy, discover
from policies.engine.source import Verify

HOOK, ID, TIMESTAMP, SIGNATURE = "samefold-hook", "webhook-id", "webhook-timestamp", "webhook-signature"


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook of the settings that policies receive from."""

    name: str
    tolerance_s: float
    keys: Sequence[bytes] = field(repr=False)
    verify: Verify | None
    """The author's; None: signatures are those of Standard Webhooks."""
    secrets: Sequence[str] = field(repr=False)
    types: frozenset[str]
    """The headers that have a message's type."""

    def is_signed(self, ident: str, sent: str, signatures: str, body: bytes) -> bool:
        """Whether one of the signatures is that of Standard Webhooks with one of the secrets.

        Their library signs text alone, and its tolerance is fixed.
        """
        signed = b".".join((ident.encode("latin-1"), sent.encode("latin-1"), body))
        wanted = [b"v1," + b64encode(hmac.digest(key, signed, "sha256")) for key in self.keys]
        given = [one.encode("latin-1") for one in signatures.split(" ")]
        return any(hmac.compare_digest(one, other) for one in wanted for other in given)


def hooks_of(settings: Settings) -> list[Hook]:
    """The webhooks that these settings name and some policy receives from. Raises BadPolicy, BadContext, BadSettings."""
    return [hook for name in settings.sources if (hook := _hook(settings, name)) is not None]


def _hook(settings: Settings, name: str) -> Hook | None:
    source = settings.sources[name]
    policies = discover().values() if source.secrets else ()
    receivers = [one.source for one in policies if one.source and one.source.name == name]
    if not receivers:
        return None
    verify, *others = {one.verify for one in receivers}
    if others:
        raise BadPolicy(
            f"The policies that receive from the webhook '{name}' do not have the same `verify`.",
            f"Write it once, like in policies/_{name}.py, and import it into each.",
        )
    try:
        keys = [signing_key(secret) for secret in source.secrets] if verify is None else []
    except ValueError as error:
        raise BadSettings(
            f"Wrong settings: SAMEFOLD_SOURCES, {name}, secrets: {error}.",
            "If its sender signs in a way of its own, let the policy have a function `verify` (docs/sources.md).",
        ) from None
    types = frozenset(one.type_header for one in receivers if one.type_header)
    secrets = [one.get_secret_value() for one in source.secrets]
    return Hook(name, source.tolerance_s, keys, verify, secrets, types)
