"""make test: pure. Columns of events: each holds what the fold decodes, or the class or value that Spark can't hold is named."""

from __future__ import annotations

from dataclasses import make_dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from domain.engine.storable import decoder, encode, require_exact
from infra.log.records import Commit
from infra.log.rule import Counted
from spark_jobs.engine.columns import BadColumn, fields_of
from spark_jobs.engine.source import EVENTS, EventRow, UnfitValue, columns_of, part_of, to_arrow
from tests.engine.spark.shapes import EVERY, Wide, in_column, shapes
from tools.testing.fixtures import SEED


def test_each_column_holds_what_the_fold_decodes() -> None:
    for event, bodies in [*EVERY, *shapes(250, SEED)]:
        require_exact(event)
        decoded = [decoder(event)(body) for body in bodies]
        hints = get_type_hints(event, include_extras=True)
        columns = fields_of(event)
        assert [column.name for column in columns] == list(hints)
        for column, named in zip(columns, columns_of([event])[len(EVENTS) :], strict=True):
            held = [in_column(hints[column.name], getattr(one, column.name)) for one in decoded]
            assert column.array(decoded).to_pylist() == held, hints[column.name]
            part = decoder(part_of(event, {named.name}))
            assert column.array([part(body) for body in bodies]).to_pylist() == held
            of_spark = to_arrow_schema(StructType([StructField(column.name, column.type.spark)]), timezone="UTC")
            assert of_spark.equals(pa.schema([(column.name, column.type.arrow)])), "PySpark takes no other"


def test_a_set_has_one_order() -> None:
    event = make_dataclass("Event", [("names", frozenset[str])], frozen=True)
    [column] = fields_of(event)
    names = [f"n{n}" for n in range(50)]
    one, other = (column.array([decoder(event)(encode({"names": some}))]) for some in (names, names[::-1]))
    assert one.to_pylist() == other.to_pylist() == [sorted(names)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("whole", 2**63),
        ("wholes", (1, -(2**63) - 1)),
        ("amount", Decimal(10**20)),
        ("amount", Decimal("1E-19")),
        ("took", timedelta.max),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place(field: str, value: Any) -> None:
    commit = msgspec.convert(COMMIT, Commit)
    fit, unfit = (
        EventRow(Counted(offset, 0, commit), 3, Wide, 1, "Wide", decoder(Wide)(encode({field: held})))
        for offset, held in ((7, getattr(Wide(), field)), (8, value))
    )
    [column] = [column for column in columns_of([Wide]) if column.name == field]
    with pytest.raises(UnfitValue, match=rf"^'{field}' of shapes/1 \(partition 3, offset 8\) does not fit"):
        to_arrow(column, [fit, unfit, fit])


COMMIT = {
    "samefold": "commit/1",
    "stream": "shapes/1",
    "version": 1,
    "events": [],
    "command_id": "c",
    "command_offset": 1,
    "fingerprint": "",
    "outcome": "accepted",
    "reason": None,
    "epoch": 0,
    "seq": 1,
}


def event(**fields: Any) -> type:
    return make_dataclass("Event", fields.items(), frozen=True)


@pytest.mark.parametrize(
    ("classes", "why"),
    [
        ([event(cents=int), event(cents=str)], "'cents', of bigint, and .* 'cents', of string"),
        ([event(on=int), event(On=int)], "'on', of bigint, and .* 'On', of bigint"),
        (
            [event(type=int), event(event_type=int)],
            "'type', .* 'event_type', .*: one column 'event_type' can't hold both",
        ),
    ],
)
def test_classes_that_make_no_table_are_refused_by_name(classes: list[type], why: str) -> None:
    with pytest.raises(BadColumn, match=why):
        columns_of(classes)


def test_a_field_with_the_name_of_a_common_column_gets_another() -> None:
    names = [column.name for column in columns_of([Wide])]
    assert names[-2:] == ["body", "event_offset"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["id", "event_id"], ["event_event_id", "event_id"]),
        (["event_id", "ID", "event_event_id"], ["event_id", "event_event_event_ID", "event_event_id"]),
        (["on", "On", "ON"], ["on", "event_On", "event_event_ON"]),
    ],
)
def test_fields_that_are_one_name_in_spark_are_told_apart(names: list[str], columns: list[str]) -> None:
    both = event(**dict.fromkeys(names, int))
    values = {name: number for number, name in enumerate(names)}
    for asked, name in zip(columns_of([both])[-len(names) :], names, strict=True):
        only = decoder(part_of(both, {asked.name}))(encode(values))
        row = EventRow(Counted(0, 0, msgspec.convert(COMMIT, Commit)), 0, both, 1, "Both", only)
        assert to_arrow(asked, [row]).to_pylist() == [values[name]]
    assert [column.name for column in columns_of([both])[-len(names) :]] == columns
    [nested] = fields_of(event(part=both))
    assert len({name.lower() for name in nested.type.spark.names}) == len(names)
    value = make_dataclass("Event", [("part", both)])(both(**values))
    assert [list(part.values()) for part in nested.array([value]).to_pylist()] == [list(values.values())]
