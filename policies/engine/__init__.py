"""The engine of policies: what an author of a policy imports from here, and nothing else.

A policy is one module in `policies/`: a docstring with what it is for, `VERSION`, and one function without I/O or clock, whose
parameter `event` declares the subscription:

    react(event: A | B, at: At) -> Iterable[Send | Post]

`policies/public.py`, if it is there, has `VERSION` and `publish(event: A | B, at: At) -> Iterable[Public]`.

A source is a policy that reacts to what other services say: a module with `SOURCE` and `receive(message: A | B, at: Received)`.

A wish's way: `worker` (which events) → `outbox` (its row) → `relay` and `sender` for a command, `posts` and `webhooks` for a post.
A public event's way: `publisher` → `publishing` → `public_schema`. `activations` says which version reacts, `operate` is for
operators, `process` runs all but the publisher.

Samefold's: an update replaces it.
"""

from policies.engine.policy import Post, Public, Send
from policies.engine.source import Received, message
from projections.engine.views.event_context import At

__all__ = ["At", "Post", "Public", "Received", "Send", "message"]
