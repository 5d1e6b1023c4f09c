"""Queries and errors travel whole; whatever else arrives is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.context_parallel import Slice
from vlmdata.errors import (
    ChangedDataError,
    ConfigMismatchError,
    DatasetFormatError,
    ResourceError,
    UsageError,
    VlmdataError,
)
from vlmdata.loader.config import PARTS
from vlmdata.loader.state import Position
from vlmdata.packing.config import Blend, Change, PlanConfig, Stage
from vlmdata.service.client.filler import _require_short
from vlmdata.service.protocol import (
    BatchQuery,
    Description,
    FileQuery,
    Header,
    ServedDataset,
    decode_error,
    decode_query,
    decode_trailer,
    encode_error,
    encode_trailer,
)
from vlmdata.service.shared_memory import IN_ANSWER, SharedPack

NUMBERS = st.integers(0, 1 << 39)


@st.composite
def queries(draw: st.DrawFn) -> BatchQuery:
    size, dp_size = draw(st.integers(1, 64)), draw(st.integers(1, 4096))
    count = draw(st.integers(1, 3))
    blend = draw(st.none() | st.just(Blend("tokens", (0.1, *range(1, count)))))
    return BatchQuery(
        datasets=tuple(f"{n:064x}" for n in draw(st.sets(st.integers(0, 1 << 200), min_size=count, max_size=count))),
        plan=PlanConfig(draw(st.integers(64, 1 << 20)), dp_size, seed=draw(st.integers(-5, 1 << 70)), blend=blend),
        position=Position(draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)),
        dp_rank=draw(st.integers(0, dp_size - 1)),
        dp_size=dp_size,
        context_parallel=draw(st.none() | st.builds(Slice, st.integers(0, size - 1), st.just(size))),
        parts=frozenset(draw(st.sets(st.sampled_from(PARTS)))),
        pixels=draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        on_damage=draw(st.sampled_from(["raise", "mask"])),
        place=draw(st.sampled_from(["", "f" * 64])),
    )


@given(queries())
def test_a_query_arrives_as_it_was_sent(query: BatchQuery) -> None:
    assert decode_query(query.encode()) == query


def test_a_file_query_arrives_as_it_was_sent() -> None:
    query = FileQuery("a" * 64, "index.parquet")
    assert decode_query(query.encode()) == query


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_anything_else_is_refused(ticket: bytes) -> None:
    with pytest.raises((UsageError, ConfigMismatchError)):
        decode_query(ticket)


GOOD: dict[str, Any] = json.loads(
    BatchQuery(("a" * 64,), PlanConfig(1024, 4), Position(), 0, 1, None, frozenset(), "uint8", "raise").encode()
)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("datasets", [], "datasets: none, or one of them twice"),
        ("datasets", ["a" * 64, "a" * 64], "datasets: none, or one of them twice"),
        ("datasets", ["../../etc/passwd"], "datasets: not a fingerprint"),
        ("position", [0, 0], "position: not 3 numbers"),
        ("position", [0, -1, 0], "position: not 3 numbers"),
        ("position", [True, 0, 0], "position: not 3 numbers"),
        ("dp", [1, 1], "dp: rank 1 of 1"),
        ("dp", [0, 1 << 30], "dp: rank 0 of"),
        ("slice", [2, 2], "slice: rank 2 of 2"),
        ("parts", ["audio"], "parts: 'audio'"),
        ("pixels", "float64", "pixels: 'float64'"),
        ("on_damage", "ignore", "on_damage: 'ignore'"),
        ("place", 7, "place: not a text"),
        ("plan", None, "plan: not an object"),
        ("plan", {}, r"plan\.balance: not true or false"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, message: str) -> None:
    query = json.loads(json.dumps(GOOD))
    query["batch"][field] = value
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        decode_query(json.dumps(query).encode())


@pytest.mark.parametrize("field", list(GOOD["batch"]["plan"]))
@pytest.mark.parametrize("value", [[1], {}, [[]]])
def test_a_plan_of_lists_and_objects_is_refused(field: str, value: Any) -> None:
    """A server remembers queries by their hash."""
    query = json.loads(json.dumps(GOOD))
    query["batch"]["plan"][field] = value
    with pytest.raises((UsageError, ConfigMismatchError)):
        decode_query(json.dumps(query).encode())


def test_a_run_may_have_changed_often() -> None:
    """Local runs may, too. What no server would take is refused at the start of a run."""
    config = PlanConfig(8192, 64, blend=Blend("tokens", tuple(n / 7 for n in range(1, 9))))
    datasets = tuple(f"{n:064x}" for n in range(8))
    stages = tuple(Stage(config, tuple(range(8)), n, 1) for n in range(500))
    query = BatchQuery(
        datasets, replace(config, earlier=stages), Position(501), 0, 1, None, frozenset(), "uint8", "raise"
    )
    assert decode_query(query.encode()) == query
    changing = replace(config, schedule=tuple(Change(n + 1, config.blend, n) for n in range(500)))
    _require_short(replace(query, plan=changing), changing)
    changing = replace(config, schedule=tuple(Change(n + 1, config.blend, n) for n in range(1025)))
    with pytest.raises(UsageError, match="the mixture changes 1025 times"):
        _require_short(replace(query, plan=changing), changing)


def test_nested_values_are_refused() -> None:
    query = json.loads(json.dumps(GOOD))
    query["batch"]["plan"]["balance"] = "HERE"
    with pytest.raises(UsageError, match=r"plan\.balance: not true or false"):
        decode_query(json.dumps(query).replace('"HERE"', "[" * 900 + "]" * 900).encode())


def test_other_versions_are_named() -> None:
    query = json.loads(json.dumps(GOOD))
    query["batch"]["plan"]["algorithm"] = 999
    with pytest.raises(ConfigMismatchError, match=r"client and server make different plans .*algorithm: 999 -> \d+"):
        decode_query(json.dumps(query).encode())
    with pytest.raises(ConfigMismatchError, match="the client speaks protocol 7, the server 3"):
        decode_query(json.dumps({**GOOD, "protocol": 7}).encode())


def test_a_long_query_is_refused() -> None:
    with pytest.raises(UsageError, match="the query has 1048577 bytes, more than 1048576"):
        decode_query(b" " * (1 << 20) + b" ")


@pytest.mark.parametrize("kind", [UsageError, ConfigMismatchError, DatasetFormatError, ChangedDataError, ResourceError])
def test_an_error_keeps_its_kind_and_names_the_server(kind: type[VlmdataError]) -> None:
    error = decode_error(encode_error(kind("shard 3: row 7")), "a:8815")
    assert type(error) is kind
    assert str(error) == "server a:8815: shard 3: row 7"


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[" * 100_000, b'{"type": "SystemExit", "message": "x"}', b'{"type": "annotations", "message": ""}'],
)
def test_an_unknown_error_is_still_one_of_ours(data: bytes) -> None:
    assert type(decode_error(data, "a")) is ResourceError


def test_metadata_arrives_as_it_was_sent() -> None:
    header = Header(12, {3: "row 3 é"})
    assert Header.decode(header.encode()) == header
    header = Header(12, {}, SharedPack(7, 3, 99, 4096, 1 << 61, ((0, 8), (IN_ANSWER, 4))))
    assert Header.decode(header.encode()) == header
    assert decode_trailer(encode_trailer((1 << 64) - 1)) == (1 << 64) - 1
    description = Description(1, "0.1", (ServedDataset("cord", "ab"),))
    assert Description.decode(description.encode()) == description
    for other in (b"[]", b'{"protocol": Infinity, "vlmdata": "", "datasets": []}', b"[" * 100_000):
        with pytest.raises(UsageError, match="not a vlmdata service"):
            Description.decode(other)
