"""The images of a row: named by content items, or taken in order from a column."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from preprocess.conversation import ImagePart
from preprocess.recipes.chat.tools import json_or_text, parse_json
from preprocess.recipes.keys import KeyLog, filled
from preprocess.recipes.media import MediaLoader, place_with_file
from preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: Keys with the file of an image item: Qwen's and OpenAI's, then those of transformers' chat templates.
SOURCE_KEYS = ("image", "image_url", "url", "path", "base64")
#: Keys with the requested size of an image: those of qwen_vl_utils.
BOUND_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
ITEM_KEYS = frozenset({"type", "index", *SOURCE_KEYS, *BOUND_KEYS})
#: Keys with the image in other forms (``source`` is Anthropic's): such an item must not take another image.
_FOREIGN_SOURCES = ("source", "file", "data", "bytes", "image_path")
_FILE_KEYS = frozenset({"url", "bytes", "path", *BOUND_KEYS})
_FILE_HARMLESS = frozenset({"detail"})  # a resolution hint for OpenAI's service


class RowImages:
    """Loads the images of one row, and checks that each has its place.

    Attributes:
        column: The column with images, ``images`` or ``image``.
    """

    def __init__(self, values: Mapping[str, Any], media: MediaLoader, keys: KeyLog):
        self.column = _column(values)
        self._images = _as_list(values.get(self.column), self.column)
        self._media = media
        self._keys = keys
        self._bounds: dict[str, Any] = _bounds({key: json_or_text(values.get(key)) for key in BOUND_KEYS}, "row")
        self._taken = self._named = 0

    @property
    def count(self) -> int:
        """Number of images in the column."""
        return len(self._images)

    def from_item(self, item: Mapping[str, Any], where: str) -> ImagePart:
        """Returns the image of a content item: the one that it names, or the next of the column.

        Raises:
            RowRejected: For an image that does not load, or an item that contradicts itself.
        """
        sources = filled(item, SOURCE_KEYS) or [key for key in SOURCE_KEYS if key in item]
        if not sources:
            if foreign := filled(item, _FOREIGN_SOURCES):
                raise RowRejected(
                    Reason.UNSUPPORTED_CONTENT,
                    f"{where} holds {foreign[0]}: {excerpt(item[foreign[0]])}; an image item names its file in one of "
                    f"{', '.join(SOURCE_KEYS)}",
                )
            part = self.take(where, item.get("index"))
        else:
            if any(item[key] != item[sources[0]] for key in sources[1:]):
                raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"{where} names several images: {', '.join(sources)}")
            self._named += 1
            source = item[sources[0]]
            part = self._part(self._source(sources[0], source), where, source)
        bounds: dict[str, Any] = _bounds(item, where)
        return dataclasses.replace(part, **bounds) if bounds else part

    def take(self, where: str, index: Any = None, remedy: str = "") -> ImagePart:
        """Returns the next image of the column.

        Args:
            where: The placeholder, for messages.
            index: The image number in the data, which must match.
            remedy: Remedy if there is none.

        Raises:
            RowRejected: IMAGE_COUNT_MISMATCH if there is none.
        """
        number = self._taken
        if number >= len(self._images):
            there = f"{where} is placeholder {number + 1}, but the row has {counted(len(self._images), 'image')}"
            raise RowRejected(Reason.IMAGE_COUNT_MISMATCH, f"{there}. {remedy}" if remedy else there)
        if index not in (None, number):
            raise RowRejected(
                Reason.IMAGE_COUNT_MISMATCH,
                f"{where}.index is {excerpt(index)}, but placeholders take the images of {self.column} in order and "
                f"this one takes {number}",
            )
        self._taken += 1
        field, image = f"{self.column}[{number}]", self._images[number]
        if isinstance(image, Mapping):
            self._keys.note(image, _FILE_KEYS, _FILE_HARMLESS, f"{self.column}[].")
        return self._part(image, field, image)

    def require_all_used(self) -> None:
        """Checks that every image of the column has its place.

        Raises:
            RowRejected: IMAGE_COUNT_MISMATCH.
        """
        count = len(self._images)
        if self._taken == count or (self._taken == 0 and self._named == count):
            return  # a column that repeats the items' images (Qwen style) is not a mismatch
        if self._named:
            found = f"{counted(self._named, 'image')} named by content items and {counted(self._taken, 'placeholder')}"
        else:
            found = f"{counted(self._taken, 'image placeholder')} in the text"
        raise RowRejected(
            Reason.IMAGE_COUNT_MISMATCH,
            f"{found} for {counted(count, 'image')} in {self.column}; write <image> where each belongs",
        )

    def _part(self, source: Any, field: str, file: Any) -> ImagePart:
        """Loads an image, with the size requested by the row or its file entry (``{"path": …, "max_pixels": …}``)."""
        data = self._media.load(source, field)
        own = _bounds(file, field) if isinstance(file, Mapping) else {}
        return ImagePart(data, place_with_file(source, field), **{**self._bounds, **own})

    def _source(self, key: str, source: Any) -> Any:
        if isinstance(source, Mapping):
            self._keys.note(source, _FILE_KEYS, _FILE_HARMLESS, f"messages[].content[].{key}.")
            if "url" in source:
                return source["url"]
        if key == "base64" and isinstance(source, str) and not source.startswith("data:"):
            return f"data:image;base64,{source}"
        return source


def _column(values: Mapping[str, Any]) -> str:
    """Returns the column with images. Both columns may have images if they are equal."""
    given = filled(values, ("images", "image"))
    if len(given) == 2 and _as_list(values["images"], "images") != _as_list(values["image"], "image"):
        raise RowRejected(
            Reason.IMAGE_COUNT_MISMATCH, "the columns images and image have different images; keep one of the columns"
        )
    return next((name for name in (*given, "images", "image") if name in values), "images")


def _as_list(value: Any, column: str) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):
        value = parse_json(value, column)
    if isinstance(value, list):
        return value
    return [value] if filled({column: value}, [column]) else []


def _bounds(item: Mapping[str, Any], where: str) -> dict[str, int]:
    """Returns the requested size of an item, in whole numbers. Resizing checks whether it is possible."""
    bounds = {}
    for key in BOUND_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise RowRejected(
                Reason.IMAGE_BOUNDS, f"{where}.{key} is {excerpt(item[key])}; it must be a positive number of pixels"
            )
        bounds[key] = value
    if ("resized_height" in bounds) != ("resized_width" in bounds):
        raise RowRejected(Reason.IMAGE_BOUNDS, f"{where} has only one of resized_height and resized_width")
    return bounds
