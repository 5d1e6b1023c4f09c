"""Every option that can change a byte of the output, resolved and validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vlmdata.families import DEFAULT_FAMILY, Family, family
from vlmdata.media.codecs import RAW, codec

#: Name of the tokenizer that comes with vlmdata: 6,144 ids that no published model shares.
EMBEDDED = "embedded"


class TrainTurns(StrEnum):
    """Which assistant turns are targets."""

    ALL = "all"
    LAST = "last"


class TrainThink(StrEnum):
    """Whether a think block is a target: ``auto`` only where it holds reasoning."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Overlong(StrEnum):
    """What happens to a sample over ``max_length``.

    ``truncate`` cuts the end of the last answer or of the document. ``split`` makes several samples of a document,
    and rejects a conversation.
    """

    REJECT = "reject"
    TRUNCATE = "truncate"
    SPLIT = "split"


class SpecialText(StrEnum):
    """What happens to data whose text spells a special token."""

    REJECT = "reject"
    PLAIN = "plain"


@dataclass(frozen=True)
class ImageConfig:
    """Image geometry and limits.

    Attributes:
        min_pixels: Smaller images are enlarged to about this many pixels.
        max_pixels: Larger images are reduced to at most this many pixels.
        max_source_pixels: An image file of more pixels is rejected before it is decoded. The default is the size
            at which Pillow starts to warn of decompression bombs.
    """

    min_pixels: int = 200_704
    max_pixels: int = 1_003_520
    max_source_pixels: int = 89_478_485

    def __post_init__(self) -> None:
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels is {self.max_pixels}, less than min_pixels {self.min_pixels}")
        if self.max_source_pixels < 1:
            raise ValueError(f"max_source_pixels is {self.max_source_pixels}; it must be positive")


@dataclass(frozen=True)
class MediaConfig:
    """How image files that rows name are fetched.

    Attributes:
        image_root: Folder that image paths in the data are relative to and may not leave. None: the source's folder.
        allow_urls: Whether http(s) image URLs in the data are fetched.
    """

    image_root: str | None = None
    allow_urls: bool = False


@dataclass(frozen=True)
class PreprocessConfig:
    """All of a run but its source, output folder and degree of parallelism.

    Attributes:
        recipe: Name of a registered recipe, or ``module:attribute``. The command chooses by the source's columns.
        tokenizer: Hub id or folder, or ``embedded``, which is for the demo and trials. The command makes its user
            name one.
        tokenizer_revision: Hub revision.
        family: Name of the model family the samples are made for.
        image: Image geometry.
        pixels: Name of the codec that stores images.
        recipe_options: The recipe's own options by name, as text or as values of their types. Those left out have the
            defaults that the recipe declares.
        media: How image files that rows name are fetched.
        train_turns: Which assistant turns are targets.
        train_think: Whether think blocks are targets.
        max_length: Most tokens (true length) in a sample.
        overlong: What to do with more.
        special_text: What to do with special-token text in data.
        strict: Whether rows with keys that the recipe does not know are rejected.
        pad_multiple: Stored lengths are multiples of this.
        rows_per_shard: Source rows per shard.
    """

    recipe: str = "cord_v2"
    tokenizer: str = EMBEDDED
    tokenizer_revision: str | None = None
    family: str = DEFAULT_FAMILY
    image: ImageConfig = field(default_factory=ImageConfig)
    pixels: str = RAW
    recipe_options: Mapping[str, Any] = field(default_factory=dict)
    media: MediaConfig = field(default_factory=MediaConfig)
    train_turns: TrainTurns = TrainTurns.ALL
    train_think: TrainThink = TrainThink.AUTO
    max_length: int = 8192
    overlong: Overlong = Overlong.REJECT
    special_text: SpecialText = SpecialText.REJECT
    strict: bool = False
    pad_multiple: int = 16
    rows_per_shard: int = 256

    def __post_init__(self) -> None:
        made = self.model_family
        if self.image.min_pixels < made.factor**2:
            raise ValueError(
                f"min_pixels is {self.image.min_pixels}; it must be at least {made.factor**2} ({made.factor}²)"
            )
        codec(self.pixels)  # refuses an unknown one
        for name in ("max_length", "pad_multiple", "rows_per_shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def model_family(self) -> Family:
        """The model family the samples are made for."""
        return family(self.family)

    def to_json(self) -> dict[str, Any]:
        """Nested JSON-able form."""
        return dataclasses.asdict(self)
