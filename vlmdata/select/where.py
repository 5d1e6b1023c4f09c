"""Expressions over columns, such as ``length < 4096 and source.lang == 'de'``, evaluated with Arrow.

The grammar is Python's, of which few kinds of nodes are allowed; nothing is executed. Nulls behave as in SQL: a
comparison with a null is null, ``and``, ``or`` and ``not`` are those of three-valued logic, and a sample is chosen if
its value is true. ``X is None`` finds nulls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vlmdata.errors import UsageError

#: Prefix of the columns that recipes attached to samples.
SOURCE = "source"

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: lambda a, b: pc.divide(pc.cast(a, pa.float64()), pc.cast(b, pa.float64())),
}
#: Functions of a text and a literal text.
_TEXT_TESTS: dict[str, Callable[[Any, str], Any]] = {
    "startswith": lambda text, part: pc.starts_with(text, part),
    "endswith": lambda text, part: pc.ends_with(text, part),
    "matches": lambda text, pattern: pc.match_substring_regex(text, pattern),
}
FUNCTIONS = ("len", "lower", *_TEXT_TESTS)
#: Levels of an expression: of brackets, ``not`` and operators in each other. ``a or b or c`` is one.
_DEEPEST = 100
_ALLOWED = f"Use columns, numbers, 'text', == != < <= > >=, in, and, or, not, + - * /, {', '.join(FUNCTIONS)}."


@dataclass(frozen=True, eq=False)
class Where:
    """A parsed expression."""

    text: str  # as given
    tree: ast.expr  # its syntax tree
    columns: frozenset[str]  # names of its columns; those of the source begin with ``source.``

    @classmethod
    def parse(cls, text: str) -> Where:
        """Parses an expression.

        Raises:
            UsageError: If it is none, or has an element that is not allowed.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            at = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
            raise UsageError(f"--where {text!r}: not an expression{at}: {_reason(error)}. {_ALLOWED}") from None
        if _depth(tree) > _DEEPEST:
            raise UsageError(f"--where {text[:60]!r}…: it is too deep: more than {_DEEPEST} levels. {_ALLOWED}")
        columns: set[str] = set()
        _collect(tree, columns, text)
        return cls(text, tree, frozenset(columns))

    def evaluate(self, columns: Mapping[str, pa.Array], length: int) -> npt.NDArray[np.bool_]:
        """Evaluates the expression for each sample.

        Args:
            columns: The columns that it names, each of ``length`` values: numbers, truth values, text or lists.
            length: Number of samples.

        Returns:
            bool (length,): True for the samples for which it is true.

        Raises:
            UsageError: If it compares unlike values, or is no truth value.
        """
        value = _Evaluation(self.text, columns).of(self.tree)
        if _kind(value) not in ("truth", "null"):
            raise UsageError(f"--where {self.text!r}: is {_NAMES[_kind(value)]}, not true or false. Compare it.")
        if isinstance(value, pa.Scalar):
            return np.full(length, value.as_py() is True, np.bool_)
        filled = pc.fill_null(value.cast(pa.bool_()), False)
        return np.asarray(filled.to_numpy(zero_copy_only=False), np.bool_)


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        is_assignment = error.text and error.offset and error.text[error.offset - 1 : error.offset + 1].strip() == "="
        return "write == to compare" if is_assignment else str(error.msg)
    return "it is too deep" if isinstance(error, RecursionError | MemoryError) else str(error)


def column_of(node: ast.expr) -> str | None:
    """Returns the name of a column, or None: ``length``, ``source.meta.lang``, ``source['content-type']``."""
    if isinstance(node, ast.Name):
        return node.id
    match node:
        case ast.Attribute(value=inner, attr=name):
            pass
        case ast.Subscript(value=inner, slice=ast.Constant(value=str(name))):
            pass
        case _:
            return None
    outer = column_of(inner)
    return f"{outer}.{name}" if outer is not None and f"{outer}.".startswith(f"{SOURCE}.") else None


def _depth(tree: ast.expr) -> int:
    """Returns the levels of an expression, counted up to one more than are allowed. Recursion has limits of its own."""
    level: list[ast.AST] = [tree]
    for depth in range(_DEEPEST + 1):
        if not level:
            return depth
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
    return _DEEPEST + 1


def _collect(node: ast.expr, columns: set[str], text: str) -> None:
    """Adds the columns of an expression, and checks that its elements are allowed."""
    if (name := column_of(node)) is not None:
        columns.add(name)
        return
    parts: Sequence[ast.expr]
    match node:
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=inner):
            parts = [inner]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            parts = [left, right]
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
        case ast.Call(func=ast.Name(id=function), args=parts, keywords=[]) if function in FUNCTIONS:
            wanted = 2 if function in _TEXT_TESTS else 1
            if len(parts) != wanted:
                raise UsageError(f"--where {text!r}: {function} takes {wanted} values, not {len(parts)}")
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return
        case _:
            raise UsageError(f"--where {text!r}: {ast.unparse(node)!r} is not allowed here. {_ALLOWED}")
    for part in parts:
        _collect(part, columns, text)


_NAMES = {"number": "a number", "truth": "true or false", "text": "text", "list": "a list", "null": "null"}


def _kind(value: Any) -> str:
    kind = value.type
    if pa.types.is_null(kind):
        return "null"
    if pa.types.is_boolean(kind):
        return "truth"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    return "list" if pa.types.is_list(kind) else "text"


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """One evaluation: each node gives an array, or a scalar if it has no column."""

    text: str
    columns: Mapping[str, pa.Array]

    def of(self, node: ast.expr) -> Any:
        try:
            return self._value(node)
        except (pa.ArrowException, OverflowError, RecursionError) as error:
            raise self._error(node, str(error) or type(error).__name__) from None

    def _error(self, node: ast.AST, why: str) -> UsageError:
        return UsageError(f"--where {self.text!r}: {ast.unparse(node)!r}: {why}")

    def _value(self, node: ast.expr) -> Any:
        if (name := column_of(node)) is not None:
            return _wide(self.columns[name])
        match node:
            case ast.Constant(value=value):
                return _wide(pa.scalar(value))
            case ast.BoolOp(op=operator, values=parts):
                combine = pc.and_kleene if isinstance(operator, ast.And) else pc.or_kleene
                result = self._truth(parts[0])
                for part in parts[1:]:
                    result = combine(result, self._truth(part))
                return result
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return pc.invert(self._truth(inner))
            case ast.UnaryOp(operand=inner):
                return pc.negate_checked(self._alike(node, "number", inner)[0])
            case ast.BinOp(left=left, op=operator, right=right):
                return _ARITHMETIC[type(operator)](*self._alike(node, "number", left, right))
            case ast.Compare(left=left, ops=comparisons, comparators=others):
                result = None
                for comparison, right in zip(comparisons, others, strict=True):  # a < b < c is a < b and b < c
                    one = self._compare(node, left, comparison, right)
                    result, left = (one if result is None else pc.and_kleene(result, one)), right
                return result
            case ast.Call(func=ast.Name(id=function), args=arguments):
                return self._call(node, function, arguments)
        raise self._error(node, "a list stands only to the right of in")

    def _truth(self, node: ast.expr) -> Any:
        value = self.of(node)
        if _kind(value) not in ("truth", "null"):
            raise self._error(node, f"is {_NAMES[_kind(value)]}, not true or false")
        return value.cast(pa.bool_())

    def _alike(self, node: ast.expr, kind: str, *parts: ast.expr) -> list[Any]:
        values = [self.of(part) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if _kind(value) not in (kind, "null"):
                raise self._error(node, f"{ast.unparse(part)} is {_NAMES[_kind(value)]}, not {_NAMES[kind]}")
        types = {"number": pa.int64(), "text": pa.string()}
        return [value.cast(types[kind]) if _kind(value) == "null" else value for value in values]

    def _compare(self, node: ast.expr, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._error(node, "is and is not take None; use == and !=")
            null = pc.is_null(self.of(left))
            return null if isinstance(operator, ast.Is) else pc.invert(null)
        if isinstance(operator, ast.In | ast.NotIn):
            found = self._within(node, left, right)
            return found if isinstance(operator, ast.In) else pc.invert(found)
        one, two = self.of(left), self.of(right)
        kinds = {_kind(one), _kind(two)} - {"null"}
        if len(kinds) > 1 or "list" in kinds:
            what = f"{ast.unparse(left)} is {_NAMES[_kind(one)]}, {ast.unparse(right)} is {_NAMES[_kind(two)]}"
            raise self._error(node, f"{what}; only like values are compared")
        if "null" in (_kind(one), _kind(two)):
            wanted = two.type if _kind(one) == "null" else one.type
            one, two = (value.cast(wanted) if _kind(value) == "null" else value for value in (one, two))
        if not kinds:
            return pc.and_kleene(one.cast(pa.bool_()), two.cast(pa.bool_()))  # null
        return _COMPARISONS[type(operator)](one, two)

    def _within(self, node: ast.expr, left: ast.expr, right: ast.expr) -> Any:
        if isinstance(right, ast.List | ast.Tuple):
            if not right.elts:
                raise self._error(node, "the list is empty")
            if (found := self._is_one_of(left, right.elts)) is not None:
                return found
            values = [self._compare(node, left, ast.Eq(), each) for each in right.elts]
            found = values[0]
            for each in values[1:]:
                found = pc.or_kleene(found, each)
            return found
        value, whole = self.of(left), self.of(right)
        if not isinstance(value, pa.Scalar) or isinstance(whole, pa.Scalar):
            raise self._error(node, "in takes a value and a column, or a column and a list of values")
        if _kind(whole) == "null":
            return whole.cast(pa.bool_())
        if _kind(whole) == "text" and _kind(value) == "text":
            return pc.match_substring(whole, value.as_py())
        if _kind(whole) != "list":
            raise self._error(node, f"{ast.unparse(right)} is {_NAMES[_kind(whole)]}, not text or a list")
        return _contains(whole, value)

    def _is_one_of(self, left: ast.expr, values: Sequence[ast.expr]) -> Any:
        """Looks a column up among literals, which may be many, in one step. None if they are not all of its kind."""
        value = self.of(left)
        found = [each.value if isinstance(each, ast.Constant) else None for each in values]
        if isinstance(value, pa.Scalar) or _kind(value) not in ("number", "text") or None in found:
            return None
        wanted = str if _kind(value) == "text" else float if pa.types.is_floating(value.type) else int
        if not all(type(each) is wanted for each in found):
            return None
        chosen = pc.is_in(value, value_set=pa.array(found, value.type))
        return pc.if_else(pc.is_null(value), pa.scalar(None, pa.bool_()), chosen)

    def _call(self, node: ast.expr, function: str, arguments: Sequence[ast.expr]) -> Any:
        if function == "len":
            value = self.of(arguments[0])
            if _kind(value) == "list":
                return pc.list_value_length(value).cast(pa.int64())
            (text,) = self._alike(node, "text", arguments[0])
            return pc.utf8_length(text).cast(pa.int64())
        if function == "lower":
            return pc.utf8_lower(self._alike(node, "text", arguments[0])[0])
        text, part = self._alike(node, "text", *arguments)
        if not isinstance(part, pa.Scalar) or part.as_py() is None:
            raise self._error(node, f"the second value of {function} must be 'text'")
        return _TEXT_TESTS[function](text, part.as_py())


def _wide(value: Any) -> Any:
    """Numbers in 64 bits, so that sums do not overflow."""
    if pa.types.is_integer(value.type):
        return value.cast(pa.int64())
    return value.cast(pa.float64()) if pa.types.is_floating(value.type) else value


def _contains(lists: pa.ListArray, value: pa.Scalar) -> pa.Array:
    """Whether each list has the value, bool; null for a null."""
    flat = lists.flatten()
    equal = pc.fill_null(pc.equal(flat, value.cast(flat.type)), False) if len(flat) else pa.array([], pa.bool_())
    found = np.zeros(len(lists), np.bool_)
    found[pc.list_parent_indices(lists).to_numpy()[equal.to_numpy(zero_copy_only=False)]] = True
    return pa.array(found, mask=lists.is_null().to_numpy(zero_copy_only=False))
