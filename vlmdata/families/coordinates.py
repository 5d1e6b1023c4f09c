"""Reads boxes and points from text, by the convention of a family (:class:`~vlmdata.families.grounding.Grounding`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmdata.families.grounding import Grounding

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
#: How far before a box its object may begin, in characters, so that long texts are not searched again for each box.
_REACH = 2000


@dataclass(frozen=True)
class Coordinates:
    """A box or a point in a text."""

    start: int  # characters [start, stop) of the text
    stop: int
    numbers: tuple[float, ...]  # x1, y1, x2, y2 or x, y, as they are written
    label: str | None


def coordinates_in(text: str, rules: Grounding) -> Iterator[Coordinates]:
    """Yields the boxes and points in a text, by the keys and tokens of a family.

    Lists of numbers without a key or a token are not read: they may be anything.

    Args:
        text: The text.
        rules: The family's convention.
    """
    keys = {key: count for key, count in ((rules.box_key, 4), (rules.point_key, 2)) if key}
    if keys:
        yield from _in_json(text, keys, rules)
    if rules.box_marks is not None:
        yield from _marked(text, rules.box_marks, rules.label_marks, rules.lists)


def _in_json(text: str, keys: Mapping[str, int], rules: Grounding) -> Iterator[Coordinates]:
    """Finds lists of so many numbers after keys in JSON."""
    pattern = rf'"({"|".join(map(re.escape, keys))})"\s*:\s*\[\s*({_NUMBER}(?:\s*,\s*{_NUMBER})*)\s*\]'
    before = 0
    for match in re.finditer(pattern, text):
        numbers = _numbers(match[2])
        if len(numbers) == keys[match[1]]:
            start, stop, label = _object_around(text, match, before, rules)
            yield Coordinates(start, stop, numbers, label)
            before = match.end()


def _object_around(text: str, match: re.Match[str], before: int, rules: Grounding) -> tuple[int, int, str | None]:
    """Returns where the JSON object of a box begins and ends, and its label; the box alone if the object is cut."""
    least = max(before, match.start() - _REACH)
    start = text.rfind("{", least, match.start())
    while start >= 0:
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            stop = -1
        if stop >= match.end() and isinstance(value, dict):
            label = value.get(rules.label_key)
            return start, stop, label if isinstance(label, str) else None
        start = text.rfind("{", least, start)
    return match.start(), match.end(), None


def _marked(
    text: str, marks: tuple[str, str], label_marks: tuple[str, str] | None, lists: bool
) -> Iterator[Coordinates]:
    """Finds boxes between special tokens, several between two if they are lists. A label may stand before several."""
    pair = rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)"
    one = rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER}){{3}}\s*\]" if lists else rf"{pair}(?:\s*,?\s*{pair})?"
    body = rf"\[\s*({one}(?:\s*,\s*{one})*)\s*\]" if lists else rf"({one})"
    box = rf"{re.escape(marks[0])}\s*{body}\s*{re.escape(marks[1])}"
    label = "(?!)()" if label_marks is None else rf"{re.escape(label_marks[0])}(.*?){re.escape(label_marks[1])}"
    name: str | None = None
    name_start = stop = 0
    for match in re.finditer(rf"{label}|{box}", text, re.DOTALL):
        if match[2] is None:
            name, name_start, stop = match[1], match.start(), match.end()
            continue
        if text[stop : match.start()].strip(" ,\n") or name is None:
            name = None
        first = name_start if name is not None and stop > name_start else match.start()
        found = [(match.start(2) + each.start(), match.start(2) + each.end()) for each in re.finditer(one, match[2])]
        starts, stops = [first, *(start for start, _ in found[1:])], [*(end for _, end in found[:-1]), match.end()]
        for start, end, (at, to) in zip(starts, stops, found, strict=True):
            yield Coordinates(start, end, _numbers(text[at:to]), name)
        name_start = stop = match.end()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in re.findall(_NUMBER, text))
