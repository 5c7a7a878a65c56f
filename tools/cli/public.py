"""`samefold public`: which events other teams may read, with their schemas."""

from typing import Annotated, Any

import typer

from infra.settings import Settings
from policies.engine.public_schema import asyncapi, publication
from tools.terminal import Output, show, table


def public(
    as_json: Annotated[bool, typer.Option("--json", help="Print the AsyncAPI document, with JSON Schemas.")] = False,
) -> None:
    """Show the types of public events: topic, version of the publication, type and data."""
    show(asyncapi(Settings(), publication()), _text, as_json=as_json)


def _text(document: dict[str, Any]) -> Output:
    topic, version = document["channels"]["public"]["address"], document["info"]["version"]
    yield f"Topic '{topic}', version {version} of policies/public.py:"
    messages = document["components"]["messages"]
    data = {name: one["payload"]["properties"]["data"] for name, one in messages.items()}
    fields = {name: ", ".join(one.get("properties", {})) for name, one in data.items()}
    yield table(("type", "data", "what"), ((name, fields[name], one["summary"]) for name, one in messages.items()))
