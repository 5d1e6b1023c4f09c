"""The recipe ``grounding``: boxes and points of published datasets, learned as JSON in the family's convention.

Sources: the dataset cards of allenai/pixmo-points, lmms-lab/RefCOCO, jxu124/refcoco and detection-datasets/coco, and
COCO's format of annotations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, ClassVar

from vlmdata.preprocess.conversation import ContentPart, Conversation, Message, TextPart
from vlmdata.preprocess.grounding import BoxPart, Form, PointPart, Unit, coordinates_fault
from vlmdata.preprocess.recipes.answers import Pick, picked, texts_in
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS
from vlmdata.preprocess.recipes.chat.row_keys import refuse_row
from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.chat.weights import ROW_WEIGHTS, row_weight
from vlmdata.preprocess.recipes.coco_names import COCO
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog, filled, is_empty
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recipes.polygons import POLYGONS, Polygons, box_around
from vlmdata.preprocess.recipes.row_image import IMAGE_COLUMNS, IMAGE_NAMES, images_of, only_image
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_POINTS, _BOX, _OBJECTS = "points", "bbox", "objects"
#: Names of what is in the box: jxu124's form of refCOCO, lmms-lab's, and a name alone.
_NAMES = ("sentences", "answer", "label")
#: Columns that a row with a box may have of the question for it.
_ASKED = ("question", "query", "answers", "multiple_choice_answer")
#: Names of the classes of objects.
_CLASSES = ("category", "label")
_HARMLESS_COLUMNS = HARMLESS_COLUMNS | {
    "count",
    "collection_method",
    "question",  # lmms-lab's is the one for the opposite task
    *POLYGONS,  # beside a box
    "iscrowd",
    "sent_ids",
    "captions",
    "raw_anns",
    "raw_image_info",
    "raw_sentences",
    "coco_url",
    "date_captured",
}
_HARMLESS_KEYS = frozenset({"id", "area", *POLYGONS})


class Corners(StrEnum):
    """What the four numbers of a box are."""

    XYWH = "xywh"
    XYXY = "xyxy"


class AnswerForm(StrEnum):
    """Form of an answer."""

    #: A JSON list of boxes or points, with the keys of the family.
    JSON = "json"
    #: Each name and box between the tokens of the family, on a line of its own.
    TOKENS = "tokens"


@dataclass(frozen=True)
class GroundingOptions:
    """Options of the recipe."""

    boxes: Annotated[
        Corners, "Four numbers of a box: its upper left corner, width and height (COCO), or two corners."
    ] = Corners.XYWH
    unit: Annotated[
        Unit | None, "Unit of coordinates: pixels, or shares of the sides. None: pixels of boxes, percent of points."
    ] = None
    prompt: Annotated[str, "The question; {name} in it is the name of what is asked for. Empty: one for each form."] = (
        ""
    )
    pick: Annotated[
        Pick, "Of several names of one box, learn the first, the most common one, or each in a sample of its own."
    ] = Pick.FIRST
    form: Annotated[
        AnswerForm, "The answer as JSON, or with the family's tokens for boxes (internvl has no JSON, so needs them)."
    ] = AnswerForm.JSON
    polygons: Annotated[
        Polygons, "Polygons (segmentation, polygon or quad) without bbox: reject the row, or learn the box around each."
    ] = Polygons.REJECT
    names: Annotated[
        tuple[str, ...], "Names of classes that the data has as numbers, from 0, with commas; `coco` is COCO's 80."
    ] = ()


@dataclass(frozen=True)
class Task:
    """A question on an image and its answer.

    Attributes:
        prompt: The question, with ``{name}`` for the name.
        name: Name of what is asked for; "" if all objects are.
        found: Boxes or points of the answer.
    """

    prompt: str
    name: str
    found: tuple[BoxPart | PointPart, ...]


class GroundingRows:
    """Rows with an image and points with a label, a box with its names, or objects with boxes and classes."""

    takes: ClassVar[tuple[Columns, ...]] = (
        Columns((IMAGE_NAMES, (_POINTS,), ("label",))),
        Columns((IMAGE_NAMES, (_OBJECTS,))),
        Columns((IMAGE_NAMES, (_BOX,), _NAMES), also=_ASKED),
    )
    needs: ClassVar[str] = "image, and points and label, bbox and sentences or answer, or objects with bbox"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    Options = GroundingOptions

    def __init__(self, options: GroundingOptions, media: MediaLoader):
        self._options, self._media = options, media
        self._classes = COCO if options.names == ("coco",) else options.names

    def __call__(self, row: Row) -> Conversation | list[Conversation]:
        """Returns image and question, and the boxes or points as a JSON list."""
        values = row.present
        refuse_row(values)
        texts = {name: text for name in (_POINTS, _BOX, _OBJECTS) if isinstance(text := values.get(name), str)}  # CSV
        values = values.with_values({name: parse_json(text, name) for name, text in texts.items()})
        made = [self._made(values, column, task) for column, task in self._tasks(values)]
        return made if self._options.pick is Pick.EACH else made[0]

    def _tasks(self, values: Mapping[str, Any]) -> Iterator[tuple[frozenset[str], Task]]:
        """Yields the tasks of a row, each with the columns that it is made of.

        Raises:
            RowRejected: If the row has none, or boxes and points that cannot be read.
        """
        forms = [name for name in (_POINTS, _BOX, _OBJECTS) if name in values] or filled(values, POLYGONS)[:1]
        if len(forms) != 1:
            columns = ", ".join(values) or "none"
            raise RowRejected(
                Reason.MALFORMED_MESSAGES if forms else Reason.MISSING_COLUMN,
                f"{' and '.join(forms) or 'none of points, bbox and objects'} in the row; it needs one of points, bbox "
                f"and objects; columns with values: {columns}",
            )
        tail = ", as JSON" if self._options.form is AnswerForm.JSON else ""
        if forms == [_OBJECTS]:
            yield frozenset(forms), Task(f"Locate every object in the image{tail}.", "", self._objects(values))
            return
        column = next(iter(filled(values, _NAMES)), _NAMES[-1])
        names = picked(texts_in(values.get(column, []), column), self._options.pick, column)
        for name in names:
            if forms == [_POINTS]:
                asked = "Point to every instance of: {name}." + (" Answer as JSON." if tail else "")
                task = Task(asked, name, self._points(values, name))
            else:
                task = Task(f"Locate this{tail}: {{name}}", name, (self._box(values, "", name),))
            yield frozenset({*forms, column}), task

    def _made(self, values: Mapping[str, Any], columns: frozenset[str], task: Task) -> Conversation:
        keys = KeyLog()
        keys.note(values, columns | IMAGE_COLUMNS | {*BOUND_KEYS, *ROW_WEIGHTS}, _HARMLESS_COLUMNS)
        if _OBJECTS in columns:
            objects = values[_OBJECTS]
            for entry in objects if isinstance(objects, list) else [objects]:
                used = {"iscrowd", *_CLASSES, _place(entry) if isinstance(entry, Mapping) else _BOX}
                keys.note(entry, frozenset(used), _HARMLESS_KEYS, f"{_OBJECTS}.")
        image = only_image(values, images_of(values, self._media, keys), "a box or point")
        prompt = (self._options.prompt or task.prompt).replace("{name}", task.name)
        if self._options.form is AnswerForm.TOKENS:
            answer = _lines(task.found)
        else:
            answer = _json_list(task.found)
        turns = Message("user", (image, TextPart(prompt))), Message("assistant", tuple(answer))
        return Conversation(turns, (), row_weight(values), keys.harmless, keys.unknown)

    def _points(self, values: Mapping[str, Any], name: str) -> tuple[PointPart, ...]:
        found = []
        for i, point in enumerate(_list(values[_POINTS], _POINTS)):
            field = f"{_POINTS}[{i}]"
            xy = [point.get("x"), point.get("y")] if isinstance(point, Mapping) else point
            x, y = _numbers(xy, 2, field)
            found.append(PointPart((x, y), self._options.unit or Unit.HUNDRED, label=name, field=field))
        return tuple(found)

    def _objects(self, values: Mapping[str, Any]) -> tuple[BoxPart, ...]:
        """Reads objects as a list, or as the lists of their boxes, classes and flags. Crowds are left out."""
        objects = values[_OBJECTS]
        if isinstance(objects, Mapping):
            lists = {key: _list(each, f"{_OBJECTS}.{key}") for key, each in objects.items() if not is_empty(each)}
            place = _place(lists)
            count = len(lists.get(place, []))
            if wrong := next(
                (key for key in (*_CLASSES, "iscrowd") if len(lists.get(key, [])) not in (0, count)), None
            ):
                raise RowRejected(
                    Reason.BOX_COUNT_MISMATCH,
                    f"{_OBJECTS}.{place} has {counted(count, 'entry', 'entries')} and {_OBJECTS}.{wrong} has "
                    f"{len(lists[wrong])}; they must have equal length",
                )
            entries = [{key: each[i] for key, each in lists.items() if len(each) == count} for i in range(count)]
        else:
            entries = _list(objects, _OBJECTS)
        return tuple(chain.from_iterable(self._object(entry, f"{_OBJECTS}[{i}]") for i, entry in enumerate(entries)))

    def _object(self, entry: Any, field: str) -> Iterable[BoxPart]:
        if not isinstance(entry, Mapping):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field} is not an object: {excerpt(entry)}")
        if entry.get("iscrowd"):
            return ()
        key = next((key for key in _CLASSES if entry.get(key) is not None), _CLASSES[0])
        return (self._box(entry, f"{field}.", self._class(entry.get(key), f"{field}.{key}")),)

    def _class(self, value: Any, field: str) -> str:
        if isinstance(value, str) and value.strip():
            return value.strip()
        if type(value) is int and 0 <= value < len(self._classes):
            return self._classes[value]
        have = f"which is not one of the {len(self._classes)} names" if self._classes else "and no names are given"
        raise RowRejected(
            Reason.MALFORMED_MESSAGES,
            f"{field} is {excerpt(value)}, {have}; give the names of the classes in order: -O names=person,bicycle,…",
        )

    def _box(self, values: Mapping[str, Any], parent: str, name: str) -> BoxPart:
        """Reads the box of a row or object, or that around its polygon."""
        unit, place = self._options.unit or Unit.PIXELS, _place(values)
        field = f"{parent}{place}"
        if place != _BOX:
            polygon = parse_json(text, field) if isinstance(text := values[place], str) else text  # CSV
            return BoxPart(box_around(polygon, self._options.polygons, field), unit, label=name, field=field)
        a, b, c, d = _numbers(values.get(_BOX), 4, field)
        if self._options.boxes is Corners.XYXY:
            return BoxPart((a, b, c, d), unit, label=name, field=field)
        return BoxPart.from_xywh((a, b, c, d), unit=unit, label=name, field=field)


def _place(values: Mapping[str, Any]) -> str:
    """Returns the key of the box, or of the polygon of what has no box."""
    return next((key for key in (_BOX, *POLYGONS) if not is_empty(values.get(key))), _BOX)


def _json_list(found: Sequence[BoxPart | PointPart]) -> Iterator[ContentPart]:
    yield TextPart("[")
    for number, part in enumerate(found):
        if number:
            yield TextPart(", ")
        yield part
    yield TextPart("]")


def _lines(found: Sequence[BoxPart | PointPart]) -> Iterator[ContentPart]:
    for number, part in enumerate(found):
        if number:
            yield TextPart("\n")
        yield replace(part, form=Form.TOKENS)


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field} is not a list: {excerpt(value)}")
    return value


def _numbers(value: Any, count: int, field: str) -> list[float]:
    """Returns the numbers of a box or point.

    Raises:
        RowRejected: BOX_BOUNDS if they are not so many numbers.
    """
    if fault := coordinates_fault(value):
        raise RowRejected(Reason.BOX_BOUNDS, f"{field}{fault}")
    if len(value) != count:
        raise RowRejected(
            Reason.BOX_BOUNDS, f"{field} has {counted(len(value), 'number')}: {excerpt(value)}; it needs {count}"
        )
    return list(value)
