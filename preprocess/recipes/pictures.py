"""The images and videos of rows by content, so that those of one are held out together (``--holdout-by image``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Document, MediaPart
from vlmdata.preprocess.recipes.base import candidates_of
from vlmdata.preprocess.recipes.choice import recipe_for
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source


@dataclass(frozen=True)
class ByImage:
    """Divides rows by the bytes of the images and videos that the recipe finds in them, wherever their files are."""

    config: PreprocessConfig
    name: str = "image"

    def prepare(self, source: Source) -> Callable[[Row], Sequence[int]]:
        """Returns what gives the hashes of the files of a row; of a row that the recipe rejects, none."""
        recipe = recipe_for(source, self.config)

        def hashes(row: Row) -> Sequence[int]:
            try:
                made = [each.made for each in candidates_of(recipe, row)]
            except MemoryError:
                raise
            except Exception:  # the run rejects the row, and tells why
                return ()
            usable = [each for each in made if not isinstance(each, RowRejected)]
            return sorted({_hash(part) for each in usable for part in _media(each)})

        return hashes


def _media(made: Conversation | Document) -> Sequence[MediaPart]:
    return made.media if isinstance(made, Conversation) else made.images


def _hash(part: MediaPart) -> int:
    digest = xxhash.xxh3_64()
    for data in [part.data] if isinstance(part.data, bytes) else part.data:
        digest.update(data)
    return digest.intdigest()
