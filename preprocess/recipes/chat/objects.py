"""Boxes and names of a row's column ``objects`` at the marks ``<bbox>`` and ``<ref-object>`` (ms-swift's grounding)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vlmdata.preprocess.conversation import ContentPart, Message, TextPart
from vlmdata.preprocess.grounding import BoxPart, Form, LabelPart, PointPart, Unit, coordinates_fault
from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.keys import KeyLog, is_empty
from vlmdata.preprocess.recipes.polygons import Polygons, box_around
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

COLUMN = "objects"
_BOX_MARK, _NAME_MARK = "<bbox>", "<ref-object>"
#: Where a row has ``objects``; with a backslash before it, a mark is text.
_MARK = re.compile(rf"(\\?)({_BOX_MARK}|{_NAME_MARK})")
_KEYS = frozenset({"ref", "bbox", "bbox_type", "image_id"})
_HARMLESS = frozenset({"width", "height"})  # of the images, whose files tell them
_UNITS: Mapping[str, Unit] = {"real": Unit.PIXELS, "norm1": Unit.ONE, "norm1000": Unit.THOUSAND}


class BoxForm(StrEnum):
    """Form of the boxes and names that replace marks."""

    LIST = "list"
    TOKENS = "tokens"


@dataclass(frozen=True)
class RowObjects:
    """What the column of a row holds.

    Attributes:
        boxes: Boxes and points, in the order of their marks.
        names: Names, in the order of their marks.
    """

    boxes: Sequence[BoxPart | PointPart]
    names: Sequence[TextPart | LabelPart]


def with_objects(
    values: Mapping[str, Any], messages: tuple[Message, ...], form: BoxForm, polygons: Polygons, keys: KeyLog
) -> tuple[Message, ...]:
    """Puts the boxes and names of the column ``objects`` in place of their marks, in order.

    A row without the column keeps its marks as text. A column without marks is reported as unknown.

    Args:
        values: The row.
        messages: Its turns.
        form: The form of boxes and names.
        polygons: Handling of polygons among the boxes.
        keys: Records keys that are not used.

    Raises:
        RowRejected: BOX_COUNT_MISMATCH if marks and entries differ in number; BOX_BOUNDS for an entry that is not a
            box or point; MALFORMED_MESSAGES for a column in another form; UNSUPPORTED_CONTENT for marks outside of the
            content of a turn, and for polygons that are not asked for.
    """
    if COLUMN not in values:
        return messages
    found = [mark for message in messages for mark in _marks(message)]
    if not found:
        keys.note({COLUMN: values[COLUMN]}, frozenset(), frozenset(), "")
        return messages
    _refuse_elsewhere(messages)
    objects = _read(values[COLUMN], form, polygons, keys)
    for mark, entries, key in ((_BOX_MARK, objects.boxes, "bbox"), (_NAME_MARK, objects.names, "ref")):
        if (count := found.count(mark)) != len(entries):
            raise RowRejected(
                Reason.BOX_COUNT_MISMATCH,
                f"the text has {counted(count, f'mark {mark}', f'marks {mark}')} for {len(entries)} in "
                f"{COLUMN}.{key}; write one mark where each belongs, or \\{mark} for a mark that is text",
            )
    following = {_BOX_MARK: iter(objects.boxes), _NAME_MARK: iter(objects.names)}
    return tuple(_filled(message, following) for message in messages)


def _marks(message: Message) -> Iterator[str]:
    for part in message.parts:
        if isinstance(part, TextPart):
            yield from (mark for escaped, mark in _MARK.findall(part.text) if not escaped)


def _filled(message: Message, following: Mapping[str, Iterator[ContentPart]]) -> Message:
    parts: list[ContentPart] = []
    for part in message.parts:
        if isinstance(part, TextPart) and _MARK.search(part.text):
            parts += _joined(_pieces(part.text, following))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts))


def _pieces(text: str, following: Mapping[str, Iterator[ContentPart]]) -> Iterator[ContentPart]:
    end = 0
    for found in _MARK.finditer(text):
        escaped, mark = found.groups()
        yield TextPart(text[end : found.start()])
        yield TextPart(mark) if escaped else next(following[mark])
        end = found.end()
    yield TextPart(text[end:])


def _joined(pieces: Iterable[ContentPart]) -> list[ContentPart]:
    """Joins adjacent texts, and leaves out empty ones."""
    made: list[ContentPart] = []
    for piece in pieces:
        if isinstance(piece, TextPart) and made and isinstance(before := made[-1], TextPart):
            made[-1] = TextPart(before.text + piece.text)
        elif not isinstance(piece, TextPart) or piece.text:
            made.append(piece)
    return made


def _refuse_elsewhere(messages: Iterable[Message]) -> None:
    for number, message in enumerate(messages, start=1):
        for place, value in (("reasoning", message.reasoning), ("tool_calls", message.tool_calls)):
            if value and (mark := _MARK.search(value if isinstance(value, str) else repr(value))):
                raise RowRejected(
                    Reason.UNSUPPORTED_CONTENT,
                    f"turn {number}: its {place} hold the mark {mark[2]}, which is filled in only in the content of a "
                    "turn; write the box there",
                )


def _read(column: Any, form: BoxForm, polygons: Polygons, keys: KeyLog) -> RowObjects:
    if isinstance(column, str):
        column = parse_json(column, COLUMN)
    if not isinstance(column, Mapping):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{COLUMN} is not an object with ref and bbox: {excerpt(column)}")
    keys.note(column, _KEYS, _HARMLESS, f"{COLUMN}.")
    boxes, names, images = (_list(column, key) for key in ("bbox", "ref", "image_id"))
    kind = column.get("bbox_type") or "real"
    if not isinstance(kind, str) or kind not in _UNITS:
        known = ", ".join(_UNITS)
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{COLUMN}.bbox_type is {excerpt(kind)}; known: {known}")
    if images and len(images) != len(boxes):
        raise RowRejected(
            Reason.BOX_COUNT_MISMATCH,
            f"{COLUMN}.image_id has {counted(len(images), 'number')} for {counted(len(boxes), 'entry', 'entries')} in "
            f"{COLUMN}.bbox; write one per box, or none if all are of image 0",
        )
    written = Form.LIST if form is BoxForm.LIST else Form.TOKENS
    of_images = images or [0] * len(boxes)
    made = [
        _box(box, image, f"{COLUMN}.bbox[{i}]", _UNITS[kind], written, polygons)
        for i, (box, image) in enumerate(zip(boxes, of_images, strict=True))
    ]
    return RowObjects(made, [_name(name, f"{COLUMN}.ref[{i}]", form) for i, name in enumerate(names)])


def _list(column: Mapping[str, Any], key: str) -> list[Any]:
    value = column.get(key)
    if is_empty(value):
        return []
    if not isinstance(value, list):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{COLUMN}.{key} is not a list: {excerpt(value)}")
    return value


def _box(values: Any, image: Any, field: str, unit: Unit, form: Form, polygons: Polygons) -> BoxPart | PointPart:
    if fault := coordinates_fault(values):
        raise RowRejected(Reason.BOX_BOUNDS, f"{field}{fault}")
    if type(image) is not int or image < 0:
        of = field.replace("bbox", "image_id")
        raise RowRejected(Reason.BOX_BOUNDS, f"{of} is {excerpt(image)}; it must be the number of an image, from 0")
    if len(values) == 4:
        x1, y1, x2, y2 = values
        return BoxPart((x1, y1, x2, y2), unit, image, form=form, field=field)
    if len(values) == 2:
        x, y = values
        return PointPart((x, y), unit, image, form=form, field=field)
    if len(values) >= 6 and len(values) % 2 == 0:
        return BoxPart(box_around(values, polygons, field), unit, image, form=form, field=field)
    raise RowRejected(
        Reason.BOX_BOUNDS,
        f"{field} has {counted(len(values), 'number')}: {excerpt(values)}; a box has four ([x1, y1, x2, y2]) and a "
        "point two ([x, y])",
    )


def _name(name: Any, field: str, form: BoxForm) -> TextPart | LabelPart:
    if not isinstance(name, str):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field} is not text: {excerpt(name)}")
    return TextPart(name) if form is BoxForm.LIST else LabelPart(name, field)
