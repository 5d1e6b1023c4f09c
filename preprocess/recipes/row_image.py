"""The image of a row, under the names that published datasets give its column."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from vlmdata.preprocess.conversation import ContentPart, ImagePart
from vlmdata.preprocess.recipes.chat.images import IMAGE_COLUMN, RowImages
from vlmdata.preprocess.recipes.keys import KeyLog, filled
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_URL, _SHA256 = "image_url", "image_sha256"
#: Columns with a path or URL, if there is no ``images`` or ``image``: PixMo's, and that of refCOCO in jxu124's form.
_NAMED = (_URL, "image_path")
#: Columns with the image.
IMAGE_NAMES = (*IMAGE_COLUMN.columns, *_NAMED)
#: All columns that tell the image.
IMAGE_COLUMNS = frozenset({*IMAGE_COLUMN.columns, *_NAMED, _SHA256})


def images_of(values: Mapping[str, Any], media: MediaLoader, keys: KeyLog) -> RowImages:
    """Returns the images of a row, from the first of its columns with one."""
    named = filled(values, _NAMED)
    if filled(values, IMAGE_COLUMN.columns) or not named:
        return RowImages(values, media, keys)
    return RowImages(values, media, keys, dataclasses.replace(IMAGE_COLUMN, columns=(named[0], named[0])))


def only_image(values: Mapping[str, Any], images: RowImages, what: str) -> ImagePart:
    """Returns the image of a row that must have one.

    Args:
        values: The row. If it has the sha256 of the file at its URL, the file must have it.
        images: The images of the row.
        what: What needs the image, for messages.

    Raises:
        RowRejected: MISSING_IMAGE without an image; IMAGE_COUNT_MISMATCH with several; IMAGE_FETCH for another file.
    """
    if images.count != 1:
        reason = Reason.IMAGE_COUNT_MISMATCH if images.count else Reason.MISSING_IMAGE
        raise RowRejected(reason, f"{images.column} holds {counted(images.count, 'image')}; {what} needs one image")
    image = images.take(images.column)
    wanted = values.get(_SHA256)
    if images.column == _URL and wanted and (found := hashlib.sha256(image.data).hexdigest()) != wanted:
        raise RowRejected(
            Reason.IMAGE_FETCH,
            f"{image.field} is a file with sha256 {found}, and {_SHA256} is {excerpt(wanted, 80)}: the file at this "
            "URL is not the one that the row describes",
        )
    return image


def with_image(
    values: Mapping[str, Any], images: RowImages, parts: Sequence[ContentPart], what: str
) -> tuple[ContentPart, ...]:
    """Returns the parts of a question with the image before them, unless marks in the text have placed the images.

    Raises:
        RowRejected: As :func:`only_image`; IMAGE_COUNT_MISMATCH if marks and images differ in number.
    """
    if any(isinstance(part, ImagePart) for part in parts):
        images.require_all_used()
        return tuple(parts)
    return (only_image(values, images, what), *parts)
