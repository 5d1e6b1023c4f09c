"""The images of a row: named by content items, or taken in order from a column."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from vlmdata.preprocess.conversation import ImagePart
from vlmdata.preprocess.recipes.chat.column import ColumnKind, FileColumn
from vlmdata.preprocess.recipes.chat.tools import json_or_text
from vlmdata.preprocess.recipes.keys import KeyLog
from vlmdata.preprocess.recipes.media import MediaLoader, place_with_file
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason

IMAGE_COLUMN = ColumnKind(
    noun="image",
    mark="<image>",
    columns=("images", "image"),
    mismatch=Reason.IMAGE_COUNT_MISMATCH,
    # Qwen's and OpenAI's keys, then those of transformers' chat templates.
    sources=("image", "image_url", "url", "path", "base64"),
    foreign=("source", "file", "data", "bytes", "image_path"),  # ``source`` is Anthropic's
)
#: Keys with the requested size of an image: those of qwen_vl_utils.
BOUND_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
ITEM_KEYS = frozenset({"type", "index", *IMAGE_COLUMN.sources, *BOUND_KEYS})
_FILE_KEYS = frozenset({"url", "bytes", "path", *BOUND_KEYS})
_FILE_HARMLESS = frozenset({"detail"})  # a resolution hint for OpenAI's service


class RowImages:
    """Loads the images of one row, and checks that each has its place.

    Attributes:
        column: The column with images, by default ``images`` or ``image``.
    """

    def __init__(self, values: Mapping[str, Any], media: MediaLoader, keys: KeyLog, kind: ColumnKind = IMAGE_COLUMN):
        self._files = FileColumn(values, kind)
        self.column = self._files.name
        self._media = media
        self._keys = keys
        self._bounds: dict[str, Any] = _bounds(values, "row")

    @property
    def count(self) -> int:
        """Number of images in the column."""
        return len(self._files.files)

    def from_item(self, item: Mapping[str, Any], where: str) -> ImagePart:
        """Returns the image of a content item: the one that it names, or the next of the column.

        Raises:
            RowRejected: For an image that does not load, or an item that contradicts itself.
        """
        key = self._files.named_by(item, where)
        if key is None:
            part = self.take(where, item.get("index"))
        else:
            part = self._part(self._source(key, item[key]), where, item[key])
        bounds: dict[str, Any] = _bounds(item, where)
        return dataclasses.replace(part, **bounds) if bounds else part

    def take(self, where: str, index: Any = None, remedy: str = "") -> ImagePart:
        """Returns the next image of the column; see :meth:`FileColumn.take`.

        Raises:
            RowRejected: IMAGE_COUNT_MISMATCH if there is none.
        """
        field, image = self._files.take(where, index, remedy)
        if isinstance(image, Mapping):
            self._keys.note(image, _FILE_KEYS, _FILE_HARMLESS, f"{self.column}[].")
        return self._part(image, field, image)

    def take_unmarked(self) -> Iterator[ImagePart]:
        """Yields all images of the column, if the row has no place for any."""
        if self._files.is_unmarked:
            yield from (self.take(self.column) for _ in self._files.files)

    def require_all_used(self, or_else: str = "") -> None:
        """Checks that every image of the column has its place. ``or_else`` is a remedy if none has.

        Raises:
            RowRejected: IMAGE_COUNT_MISMATCH.
        """
        self._files.require_all_used(or_else)

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


def _bounds(item: Mapping[str, Any], where: str) -> dict[str, int]:
    """Returns the requested size of an item, in whole numbers. Resizing checks whether it is possible."""
    bounds = {}
    for key in BOUND_KEYS:
        value = json_or_text(item.get(key))
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
