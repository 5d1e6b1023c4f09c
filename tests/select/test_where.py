"""Expressions: Python's values where nothing is null, SQL's where something is, and clear errors."""

from __future__ import annotations

import operator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.errors import UsageError
from vlmdata.select.where import Where

NUMBERS = st.integers(-50, 50)
COLUMNS = {
    "length": pa.array([5, 40, 7, None], pa.int32()),
    "truncated": pa.array([True, False, None, False]),
    "source.lang": pa.array(["de", "en", None, "de"]),
    "source.tags": pa.array([["a", "b"], [], None, ["b"]]),
    "source.a-b": pa.array([1.5, 2.0, 3.0, None]),
    "source.none": pa.nulls(4),
}


def chosen(text: str) -> list[int]:
    where = Where.parse(text)
    found = where.evaluate({name: COLUMNS[name] for name in where.columns}, 4)
    return [i for i, value in enumerate(found.tolist()) if value]


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("length < 10", [0, 2]),
        ("length < 10 and source.lang == 'de'", [0]),
        ("not length < 10", [1]),
        ("5 < length <= 40", [1, 2]),
        ("length in (5, 7)", [0, 2]),
        ("length not in [5]", [1, 2]),
        ("length in (5.0, 7)", [0, 2]),
        ("source.lang in ('de', 'fr')", [0, 3]),
        ("source.lang not in ('de', 'fr')", [1]),
        ("source.lang != 'de'", [1]),
        ("source.lang is None", [2]),
        ("source.lang is not None", [0, 1, 3]),
        ("truncated", [0]),
        ("not truncated", [1, 3]),
        ("truncated == False", [1, 3]),
        ("truncated or source.lang is None", [0, 2]),
        ("'b' in source.tags", [0, 3]),
        ("'b' not in source.tags", [1]),
        ("len(source.tags) > 0", [0, 3]),
        ("'e' in source.lang", [0, 1, 3]),
        ("startswith(source.lang, 'd')", [0, 3]),
        ("endswith(source.lang, 'n')", [1]),
        ("matches(source.lang, '^[de]n$')", [1]),
        ("lower(source.lang) == 'de'", [0, 3]),
        ("len(source.lang) == 2", [0, 1, 3]),
        ("source['a-b'] * 2 >= length / 20", [0, 1, 2]),
        ("-length + 1 == -4", [0]),
        ("length * 1000000000000 > 0", [0, 1, 2]),
        ("source.none == 3", []),
        ("source.none is None", [0, 1, 2, 3]),
        ("'a' in source.none or length == 5", [0]),
        ("True", [0, 1, 2, 3]),
        ("None", []),
        ("1 < 2", [0, 1, 2, 3]),
    ],
)
def test_values(text: str, samples: list[int]) -> None:
    assert chosen(text) == samples


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("length = 3", "not an expression at character 8: write == to compare"),
        ("length < < 3", "not an expression at character 10"),
        ("length", "is a number, not true or false"),
        ("length and truncated", "'length': is a number"),
        ("length == 'de'", "length is a number, 'de' is text; only like values are compared"),
        ("length in ('de', 3)", "only like values"),
        ("source.tags == 'a'", "source.tags is a list"),
        ("length in source.lang", "a value and a column"),
        ("3 in length", "length is a number, not text or a list"),
        ("__import__('os')", "is not allowed here"),
        ("length.real > 3", r"'length\.real' is not allowed here"),
        ("source.lang.upper() == 'DE'", "is not allowed here"),
        ("[x for x in length]", "is not allowed here"),
        ("length ** 2 > 3", "is not allowed here"),
        ("len(length)", "length is a number, not text"),
        ("len(source.lang, 3) == 2", "len takes 1 values, not 2"),
        ("startswith(source.lang, source.lang)", "the second value of startswith"),
        ("matches(source.lang, '(')", "Invalid regular expression"),
        ("length is 3", "use == and !="),
        ("length in ()", "the list is empty"),
        ("(1, 2) == length", "a list stands only to the right of in"),
        ("length * 10000000000000000000000 > 1", "length"),
        ("length * 1000000000000000000 > 1", "overflow"),
        ("-truncated == 1", "truncated is true or false, not a number"),
        ("", "not an expression"),
    ],
)
def test_errors_name_the_part_and_the_reason(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        chosen(text)
    assert repr(text) in str(raised.value)


_COMPARED = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt}
_Truth = bool | None


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, Any]:
    """A text, and a function of (a, b) with the same meaning: None for a null."""
    kind = draw(st.sampled_from(["compare", "in", "null"] + ["and", "or", "not"] * (depth > 0)))
    if kind == "compare":
        sign, (left, of_left), (right, of_right) = (
            draw(st.sampled_from(sorted(_COMPARED))),
            draw(terms()),
            draw(terms()),
        )
        return f"{left} {sign} {right}", lambda a, b: _lifted(_COMPARED[sign], of_left(a, b), of_right(a, b))
    if kind == "in":
        name, values = draw(st.sampled_from("ab")), draw(st.lists(NUMBERS, min_size=1, max_size=4))
        return f"{name} in {tuple(values)!r}", lambda a, b: _lifted(
            lambda one, many: one in many, {"a": a, "b": b}[name], values
        )
    if kind == "null":
        name = draw(st.sampled_from("ab"))
        return f"{name} is None", lambda a, b: {"a": a, "b": b}[name] is None
    one, of_one = draw(expressions(depth - 1))
    if kind == "not":
        return f"not ({one})", lambda a, b: _lifted(operator.not_, of_one(a, b))
    two, of_two = draw(expressions(depth - 1))
    combine = _and if kind == "and" else _or
    return f"({one}) {kind} ({two})", lambda a, b: combine(of_one(a, b), of_two(a, b))


@st.composite
def terms(draw: st.DrawFn) -> tuple[str, Any]:
    name, number = draw(st.sampled_from("ab")), draw(NUMBERS)
    sign, function = draw(st.sampled_from([("+", operator.add), ("-", operator.sub), ("*", operator.mul)]))
    if draw(st.booleans()):
        return name, lambda a, b: {"a": a, "b": b}[name]
    return f"({name} {sign} {number})", lambda a, b: _lifted(function, {"a": a, "b": b}[name], number)


def _lifted(function: Any, *values: Any) -> Any:
    return None if None in values else function(*values)


def _and(one: _Truth, two: _Truth) -> _Truth:
    return False if one is False or two is False else None if None in (one, two) else True


def _or(one: _Truth, two: _Truth) -> _Truth:
    return True if one is True or two is True else None if None in (one, two) else False


@given(expressions(), st.lists(st.tuples(st.none() | NUMBERS, st.none() | NUMBERS), max_size=8))
def test_it_is_three_valued_logic_over_the_samples(drawn: tuple[str, Any], rows: list[tuple[Any, Any]]) -> None:
    text, function = drawn
    columns = {name: pa.array([row[n] for row in rows], pa.int32()) for n, name in enumerate("ab")}
    found = Where.parse(text).evaluate(columns, len(rows))
    assert found.tolist() == [function(*row) is True for row in rows]


def test_an_expression_that_is_too_deep_is_refused_at_once() -> None:
    for text in ("not " * 600 + "x", "-" * 300 + "x < 1", "+".join(["x"] * 300) + " < 1"):
        with pytest.raises(UsageError, match="is too deep: more than 100 levels"):
            Where.parse(text)
    assert Where.parse(" or ".join(f"x == {number}" for number in range(5000))).columns == {"x"}
    assert Where.parse("not " * 50 + "x").columns == {"x"}
