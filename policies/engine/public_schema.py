"""The publication, read from `policies/public.py`: which events become public ones, as CloudEvents, with their schemas.

    VERSION = 1
    TYPES = {"room-booked.v1": Booked}           # types of public events, with the class of their data

    def publish(event: RoomBooked, at: At) -> Iterable[Public]:
        yield Public("room-booked.v1", Booked(room=at.id))

The classes of data are facts (`domain.language.fact`), as events are: their schemas are public.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass

from domain.engine import storable
from domain.engine.contexts import contexts
from domain.engine.personal.tokens import may_hold
from domain.language import REMOVED
from infra.errors import SamefoldError, in_words
from infra.log.records import Commit
from infra.log.rule import Counted
from infra.processes.time_limit import FAULTS, watched
from infra.settings import Settings
from policies.engine.policy import PUBLIC, BadPolicy, Public, declared, has_public
from projections.engine.fold.errors import EngineStop
from projections.engine.fold.fold import Item, decode
from projections.engine.fold.plan import Plan
from projections.engine.views.column_types import Scalar
from projections.engine.views.columns import AsInRows, Column, Role
from projections.engine.views.event_context import At
from projections.engine.views.token import Token
from projections.engine.views.view import Kind, View

CONTENT_TYPE = "application/cloudevents+json; charset=UTF-8"
MOST = 1_000
"""Public events that one event may become."""
FULL = 8 * 1024 * 1024
"""Bytes of public events with which a transaction is full, at the end of a commit: it must end before its time-out."""
OVERHEAD = 512
"""More bytes than Kafka and the headers add to a record."""
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class NothingPublic(SamefoldError):
    """There is nothing to publish."""


class PublicationFailed(EngineStop):
    """`publish` raised, or yielded what can't be published."""


class PublicEventTooLarge(EngineStop):
    """The public topic does not take a record of this size."""


_Text = Annotated[str, Meta(min_length=1)]
_Number = Annotated[int, Meta(ge=1)]


class CloudEvent(msgspec.Struct, frozen=True, gc=False):
    """A public event: CloudEvents 1.0, structured JSON. The last attributes before `data` are extensions."""

    id: Annotated[_Text, Meta(description="Stream and version, and a number for further events of one version")]
    source: _Text
    type: str
    subject: Annotated[_Text, Meta(description="The stream")]
    time: Annotated[
        str, Meta(description="Of the commit, by the broker's clock", extra_json_schema={"format": "date-time"})
    ]
    samefoldposition: Annotated[_Text, Meta(description="Position token: the API's `after` waits for it")]
    streamversion: _Number
    publicationversion: _Number
    correlationid: Annotated[_Text, Meta(description="Shared by all commands of one request or conversation")]
    samefolddepth: Annotated[int, Meta(ge=0, description="Commands of policies in a row that led to this event")]
    data: Any
    traceparent: (
        Annotated[str, Meta(description="The trace of the event's command (W3C), if it had one")] | UnsetType
    ) = UNSET
    specversion: Literal["1.0"] = "1.0"
    datacontenttype: Literal["application/json"] = "application/json"


class Outgoing(NamedTuple):
    """A public event, and the commit that it came out of."""

    key: bytes
    value: bytes
    source: Counted


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """One version of what is public. `purpose` is the module's docstring."""

    version: int
    publish: Callable[[Any, At], Iterable[Public]]
    subscription: frozenset[type]
    types: Mapping[str, type]
    purpose: str = ""


def publication() -> Publication:
    """What `policies/public.py` declares. Raises NothingPublic, BadPolicy, BadContext."""
    if not has_public():
        raise NothingPublic("There is no policies/public.py.", "Write one, as docs/public-events.md shows.")
    return publication_of(importlib.import_module(f"policies.{PUBLIC}"))


def publication_of(module: ModuleType) -> Publication:
    """Raises BadPolicy."""
    version, publish, subscription = declared(module, "publish", "Iterable[Public]")
    types = getattr(module, "TYPES", None)
    if not isinstance(types, Mapping) or not types:
        raise BadPolicy(
            "policies/public.py has no TYPES, which would be the schemas of public events.",
            'Write `TYPES = {"room-booked.v1": Booked}`: the types that `publish` yields, with the classes of their data.',
        )
    for name, kind in types.items():
        if not (isinstance(name, str) and _TYPE.fullmatch(name) and is_pydantic_dataclass(kind)):
            raise BadPolicy(
                f"TYPES of policies/public.py has {name!r}: {kind!r:.200}.",
                "Name it with letters, digits, dots, dashes and underscores, and write `@fact` above its class.",
            )
        try:
            storable.require_exact(kind)
        except storable.NotExact as error:
            raise BadPolicy(f"policies/public.py: {error}", error.hint) from error
    return Publication(version, publish, subscription, types, (module.__doc__ or "").strip())


class Writer:
    """Makes CloudEvents of commits. `most_bytes` is the public topic's limit."""

    def __init__(self, settings: Settings, publication: Publication, topic_id: str, most_bytes: int) -> None:
        self._publication = publication
        self._topic_id = topic_id
        self._most_bytes = most_bytes - OVERHEAD
        self._source = f"/{settings.group_prefix}/"
        # a view for its subscription: it is never folded
        key = Column("key", Scalar.STR, role=Role.KEY)
        of = (publication.version, Kind.POLICY, Outgoing, (key,), publication.publish, publication.subscription)
        self._plan = Plan({PUBLIC: View(PUBLIC, *of, tuple(contexts()), "")})

    def outgoing(
        self, partition: int, counted: Sequence[Counted], traces: Mapping[int, str | None] = MappingProxyType({})
    ) -> tuple[list[Outgoing], int, EngineStop | None]:
        """Public events in order, until they are FULL, the number of commits that they came out of, and the error that ended them.

        Nothing of the commit with the error is among them. `traces` has the `traceparent` of commits, by offset.
        """
        found: list[Outgoing] = []
        size = 0
        for taken, one in enumerate(counted):
            if size >= FULL:
                return found, taken, None
            try:
                items = decode(self._plan, partition, [one]).items
                trace = traces.get(one.offset) or UNSET
                values = [(item.at, value) for item in items for value in self._published(item, one.commit, trace)]
            except EngineStop as stop:
                return found, taken, stop
            found += [Outgoing(at.stream.encode(), value, one) for at, value in values]
            size += sum(len(value) for _, value in values)
        return found, len(counted), None

    @watched(lambda local: f"publishing event {local['at'].version} of {local['at'].stream}")
    def _published(self, item: Item, commit: Commit, trace: str | UnsetType) -> list[bytes]:
        """What `publish` yields, as CloudEvents. Raises PublicationFailed, PublicEventTooLarge."""
        at = item.at
        where = {"partition": at.partition, "offset": at.offset}
        what = f"Event {at.version} of {at.stream} can't be published (partition {at.partition}, offset {at.offset})"
        try:
            yielded = list(islice(self._publication.publish(item.event, at), MOST + 1))
            if len(yielded) > MOST:
                raise ValueError(f"it yields more than {MOST} public events")
            values = [self._encoded(at, commit, trace, index, public) for index, public in enumerate(yielded)]
        except FAULTS as error:
            hint = "Correct `publish` in policies/public.py, and start again."
            raise PublicationFailed(f"{what}: {in_words(error)}.", hint, **where) from error
        if (most := max(map(len, values), default=0) + len(at.stream)) > self._most_bytes:
            raise PublicEventTooLarge(
                f"{what}: it would have {most} bytes, and the public topic takes {self._most_bytes}.",
                "Publish less of it in policies/public.py, or raise the topic's max.message.bytes, and start again.",
                **where,
            )
        return values

    def _encoded(self, at: At, commit: Commit, trace: str | UnsetType, index: int, public: Any) -> bytes:
        """Raises TypeError, ValueError."""
        if not isinstance(public, Public):
            raise TypeError(f"it yields a {type(public).__name__}, not a Public")
        if (kind := self._publication.types.get(public.type)) is None:
            raise ValueError(f"it yields the type {public.type!r:.200}, which is not in TYPES")
        if type(public.data) is not kind:
            raise ValueError(f"the data of {public.type} is a {type(public.data).__name__}, not a {kind.__name__}")
        storable.through_json(kind, public.data)
        event = CloudEvent(
            id=f"{at.stream}@{at.version}" + (f".{index}" if index else ""),
            source=self._source + at.context,
            type=public.type,
            subject=at.stream,
            time=at.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            samefoldposition=str(Token.of(self._topic_id, {at.partition: at.offset + 1})),
            streamversion=at.version,
            publicationversion=self._publication.version,
            correlationid=commit.conversation,
            samefolddepth=commit.depth or 0,
            traceparent=trace,
            data=public.data,
        )
        encoded = msgspec.json.encode(event)
        if may_hold(encoded):
            _require_declared(public.type, public.data)
        return encoded


def _require_declared(name: str, data: Any) -> None:
    """Raises ValueError for a personal value in a field that the data's class does not declare as personal."""
    rest = TypeAdapter(type(data)).validate_json(msgspec.json.encode(data), context=REMOVED)
    if may_hold(msgspec.json.encode(rest)):
        raise ValueError(
            f"the data of {name} has a personal value in a field that is not declared `Personal[…]`: leave it out, or declare "
            "it so, and other teams get the ciphertext"
        )


def _as_published(schema: Any) -> Any:
    """A schema without the bounds of personal texts, which consumers see as ciphertext. Later versions may have more fields."""
    match schema:
        case {"x-personal": True}:
            return {name: one for name, one in schema.items() if name in ("type", "title", "description", "x-personal")}
        case dict():
            found = schema.items()
            return {name: _as_published(one) for name, one in found if (name, one) != ("additionalProperties", False)}
        case list():
            return [_as_published(one) for one in schema]
        case _:
            return schema


def asyncapi(settings: Settings, declared: Publication) -> dict[str, Any]:
    """The AsyncAPI 3 document of the public topic, with the JSON Schema of each type of event."""
    schemas: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for name, kind in sorted(declared.types.items()):
        references = f"#/components/schemas/{name}.{{model}}"
        data = _as_published(TypeAdapter(kind).json_schema(ref_template=references, schema_generator=AsInRows))
        models = data.pop("$defs", {})
        schemas |= {f"{name}.{model}": one for model, one in models.items()}
        envelope = msgspec.json.schema_components([CloudEvent])[1]["CloudEvent"]
        properties = envelope["properties"] | {"type": {"const": name}, "data": data}
        required = sorted(properties.keys() - {"correlationid", "samefolddepth", "traceparent"})
        messages[name] = {
            "name": name,
            "summary": (kind.__doc__ or name).strip().partition("\n")[0],
            "contentType": "application/cloudevents+json",
            "payload": {"type": "object", "properties": properties, "required": required},
            "bindings": {"kafka": {"key": {"type": "string", "description": "The stream"}, "bindingVersion": "0.5.0"}},
        }
    topic = settings.public_topic
    channel = {
        "address": topic,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        "bindings": {"kafka": {"topic": topic, "bindingVersion": "0.5.0"}},
    }
    about = {"title": f"Public events of {settings.group_prefix}", "version": str(declared.version)}
    return {
        "asyncapi": "3.0.0",
        "info": about | ({"description": declared.purpose} if declared.purpose else {}),
        "defaultContentType": "application/cloudevents+json",
        "channels": {"public": channel},
        "operations": {"publish": {"action": "send", "channel": {"$ref": "#/channels/public"}}},
        "components": {"messages": messages, "schemas": schemas},
    }
