"""All options that can change a byte of the output, resolved and validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vlmdata.errors import UsageError
from vlmdata.families import DEFAULT_FAMILY, Family, family
from vlmdata.media.codecs import MOST_FILE_PIXELS, RAW, codec

#: Name of the tokenizer included in vlmdata: 6,144 ids, which fit no published model.
EMBEDDED = "embedded"


class TrainTurns(StrEnum):
    """Which assistant turns are targets, and of which samples.

    ``all`` and ``last`` make one sample of a conversation. ``each`` makes one of every assistant turn: the conversation
    up to it, so that it follows what inference gives the model.
    """

    ALL = "all"
    LAST = "last"
    EACH = "each"


class TrainThink(StrEnum):
    """Whether a think block is a target. ``auto``: only if it contains reasoning."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Overlong(StrEnum):
    """Handling of samples longer than ``max_length``.

    ``truncate`` cuts the end of the last answer or document. ``split`` splits a document into several samples
    and rejects a conversation.
    """

    REJECT = "reject"
    TRUNCATE = "truncate"
    SPLIT = "split"


class SpecialText(StrEnum):
    """Handling of data with the text of a special token."""

    REJECT = "reject"
    PLAIN = "plain"


@dataclass(frozen=True)
class ImageConfig:
    """Image geometry and limits.

    Attributes:
        min_pixels: Smaller images are enlarged to about this many pixels. None: the family's default.
        max_pixels: Larger images are reduced to at most this many pixels. None: the family's default.
        max_source_pixels: An image file with more pixels is rejected before decoding. The default is the size
            from which Pillow warns of decompression bombs.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_source_pixels: int = 89_478_485

    def __post_init__(self) -> None:
        if self.max_source_pixels < 1:
            raise ValueError(f"max_source_pixels is {self.max_source_pixels}; it must be positive")

    def bounds(self, family: Family) -> tuple[int, int]:
        """Returns the smallest and largest area of a resized image, in pixels.

        Raises:
            UsageError: If they contradict each other or the family.
        """
        least = family.min_pixels if self.min_pixels is None else self.min_pixels
        most = family.max_pixels if self.max_pixels is None else self.max_pixels
        default = f" (the default of family {family.name})"
        if least < family.factor**2:
            raise UsageError(
                f"min_pixels is {least}{default if self.min_pixels is None else ''}; it must be at least "
                f"{family.factor**2} ({family.factor}², one token of family {family.name})"
            )
        if most < least:
            raise UsageError(
                f"max_pixels is {most}{default if self.max_pixels is None else ''}, less than min_pixels {least}"
                f"{default if self.min_pixels is None else ''}. Set both."
            )
        return least, most


@dataclass(frozen=True)
class MediaConfig:
    """Access to image files that rows name.

    Attributes:
        image_root: Folder or URL that image paths in the data are relative to and may not leave. None: the source's.
        allow_urls: Whether http(s) image URLs in the data are fetched.
        private_hosts: Hosts in private networks that such URLs may name, as ``host`` or ``host:port``.
    """

    image_root: str | None = None
    allow_urls: bool = False
    private_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.private_hosts:
            if not host or "/" in host or "@" in host:
                raise ValueError(
                    f"--allow-private-host {host!r} is no host; write it as images.example or 10.0.0.7:8000"
                )


@dataclass(frozen=True)
class PreprocessConfig:
    """The configuration of a run, except source, output folder and parallelism.

    Attributes:
        recipe: Name of a registered recipe, or ``module:attribute``. The command can choose it by the source's columns.
        tokenizer: Hub id or folder, or ``embedded``, which is for the demo and trials. The command requires a
            tokenizer for other sources.
        tokenizer_revision: Hub revision.
        family: Family of the samples.
        image: Image geometry.
        pixels: Name of the codec that stores images.
        recipe_options: The recipe's own options by name, as text or typed values. Omitted options have the
            recipe's defaults.
        media: Access to image files that rows name.
        train_turns: Which assistant turns are targets.
        train_think: Whether think blocks are targets.
        max_length: Largest true length of a sample, in tokens.
        overlong: Handling of longer samples.
        special_text: Handling of special-token text in data.
        strict: Whether to reject rows with unknown keys, or with reasoning that the chat template drops.
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
        family(self.family)  # refuses an unknown name
        store = codec(self.pixels)
        store.libraries()  # refuses a codec whose package is not installed
        if store.needs_file and self.image.max_source_pixels > MOST_FILE_PIXELS:
            raise ValueError(
                f"max_source_pixels is {self.image.max_source_pixels}; pixels={self.pixels} stores image files, and "
                f"readers decode none of more than {MOST_FILE_PIXELS} pixels"
            )
        for name in ("max_length", "pad_multiple", "rows_per_shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def model_family(self) -> Family:
        """Family of the samples."""
        return family(self.family)

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as nested JSON, with the defaults of the family filled in."""
        least, most = self.image.bounds(self.model_family)
        image = dataclasses.replace(self.image, min_pixels=least, max_pixels=most)
        options = dataclasses.asdict(dataclasses.replace(self, image=image))
        hosts = options["media"].pop("private_hosts")
        if hosts:  # earlier versions had no such option
            options["media"]["private_hosts"] = list(hosts)
        return options
