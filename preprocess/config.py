"""All options that can change a byte of the output, resolved and validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from vlmdata.families import DEFAULT_FAMILY, Family
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families.processor import PROCESSOR
from vlmdata.media.codecs import MOST_FILE_PIXELS, RAW, ZSTD, ItemCodec, describe_codecs, libraries_of
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.options import OptionHelp
from vlmdata.preprocess.media_config import (
    DamagedVideos,
    ImageConfig,
    MediaConfig,
    VideoConfig,
    VideoLayout,
    VideoPositions,
    VideoSampler,
    data_option,
    image_option,
    video_codec_beside,
)
from vlmdata.preprocess.registries import RECIPES

if TYPE_CHECKING:
    from vlmdata.preprocess.processor import Processor

__all__ = [
    "EMBEDDED",
    "SHORTENING",
    "DamagedVideos",
    "ImageConfig",
    "MediaConfig",
    "Overlong",
    "PreprocessConfig",
    "SpecialText",
    "TrainThink",
    "TrainTurns",
    "VariantKind",
    "VideoConfig",
    "VideoLayout",
    "VideoPositions",
    "VideoSampler",
    "data_option",
    "run_option",
    "text_option",
    "video_codec_beside",
]

#: Options under the headings of the help page.
text_option = partial(OptionHelp, panel="Text and targets")
run_option = partial(OptionHelp, panel="Run")

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
    """Whether a think block is a target. ``auto``: if it has reasoning, or no prompt of inference ends it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Overlong(StrEnum):
    """Handling of samples longer than ``max_length``.

    ``truncate`` cuts the end of the last answer or document. ``split`` splits a document into several samples
    and rejects a conversation. ``drop-turns`` drops the earliest exchanges of a conversation, ``shrink-images`` lowers
    the pixel budget of a sample's images (:mod:`vlmdata.preprocess.encode.shorten`).
    """

    REJECT = "reject"
    TRUNCATE = "truncate"
    SPLIT = "split"
    DROP_TURNS = "drop-turns"
    SHRINK_IMAGES = "shrink-images"


#: Those that shorten a sample before it is encoded.
SHORTENING = frozenset({Overlong.DROP_TURNS, Overlong.SHRINK_IMAGES})


class SpecialText(StrEnum):
    """Handling of data with the text of a special token."""

    REJECT = "reject"
    PLAIN = "plain"


class VariantKind(StrEnum):
    """How the variants of a conversation differ. ``flip`` exchanges left and right, which texts may name."""

    SCALE = "scale"
    CROP = "crop"
    FLIP = "flip"


@dataclass(frozen=True)
class PreprocessConfig:
    """The configuration of a run: all options that can change a byte of a dataset, except those of the source.

    ``recipe_options`` may be text or typed values; omitted ones have the recipe's defaults. The command can choose the
    recipe by the source's columns and the family by the tokenizer's files, and requires a tokenizer except for the
    demo. Recipe, family and codec (``pixels``) are names, ``module:attribute`` or ``file.py:attribute``.
    """

    recipe: Annotated[
        str,
        data_option(
            f"{', '.join(f'`{name}`' for name in RECIPES)}, or your own as `module:attribute` or `file.py:attribute`. "
            "Default: by the columns.",
            shown_default=False,
        ),
    ] = "cord_v2"
    tokenizer: Annotated[
        str,
        text_option(
            "Your model's tokenizer: hub id or folder, e.g. Qwen/Qwen3.5-9B. Required except for the demo. "
            "`embedded` is a small one for trials.",
            shown_default=False,
        ),
    ] = EMBEDDED
    tokenizer_revision: Annotated[str | None, text_option("Branch, tag or commit of a hub tokenizer.")] = None
    processor: Annotated[
        str | None,
        text_option(
            "Your model's processor, also of a model that is no family of vlmdata: hub id or folder with its "
            "tokenizer and config.json; instead of --tokenizer. A known model takes its family, unless `--family "
            "processor` is given.",
            shown_default=False,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, text_option("Run code that the folder or repository of --processor has. It is recorded.")
    ] = False
    family: Annotated[
        str,
        text_option(
            f"Model family: {', '.join(FAMILIES)}, or your own as `module:attribute` or `file.py:attribute`. "
            f"Default: from the tokenizer's files, else {DEFAULT_FAMILY}.",
            shown_default=False,
        ),
    ] = DEFAULT_FAMILY
    image: ImageConfig = field(default_factory=ImageConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    pixels: Annotated[
        str,
        image_option(
            f"How shards store images. {describe_codecs()}; or your own as `module:attribute` or `file.py:attribute`."
        ),
    ] = RAW
    recipe_options: Annotated[
        Mapping[str, Any],
        data_option(
            "Option of the recipe; repeat for several. `-O help` describes them, also for your own --recipe.",
            name="recipe_option",
            flags=("--recipe-option", "-O"),
            metavar="NAME=VALUE",
            shown_default=False,
        ),
    ] = field(default_factory=dict)
    media: MediaConfig = field(default_factory=MediaConfig)
    train_turns: Annotated[
        TrainTurns,
        text_option(
            "Learn all assistant turns in one sample, only the last, or each in a sample of its own, with the context "
            "that inference has; images are stored once."
        ),
    ] = TrainTurns.ALL
    train_think: Annotated[
        TrainThink, text_option("Learn think blocks: if inference leaves them to the model, always, or never.")
    ] = TrainThink.AUTO
    variants: Annotated[
        int,
        image_option(
            "Samples of each conversation with images: as it is, and with its images in other sizes and crops, drawn "
            "by the row's content. Boxes and points follow."
        ),
    ] = 1
    variant_kinds: Annotated[
        tuple[VariantKind, ...],
        image_option(
            "How variants differ: other sizes within the budget (`scale`), crops that keep all boxes and points "
            "(`crop`), and left and right exchanged (`flip`), which your texts must allow.",
            metavar="KIND,KIND",
            shown_default="scale,crop",
        ),
    ] = (VariantKind.SCALE, VariantKind.CROP)
    max_length: Annotated[int, text_option("Largest number of tokens in a sample.")] = 8192
    overlong: Annotated[
        Overlong,
        text_option(
            "Longer samples: reject, truncate the last answer or document, split a document into samples, drop the "
            "earliest exchanges of a conversation, or shrink its images, until they fit."
        ),
    ] = Overlong.REJECT
    overlong_min_pixels: Annotated[
        int | None,
        text_option(
            "The smallest pixel budget to which `--overlong shrink-images` lowers that of images.",
            shown_default="--min-pixels",
        ),
    ] = None
    special_text: Annotated[
        SpecialText, text_option("Text of special tokens in data: reject, or encode as plain text.")
    ] = SpecialText.REJECT
    system_prompt: Annotated[
        str | None, text_option("Begin conversations that have no system turn with a system turn of this text.")
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any],
        text_option(
            'Arguments of the chat template as JSON, such as `{"enable_thinking": false}`. A row\'s '
            "`chat_template_kwargs` go before them.",
            metavar="JSON",
            typed="",
            shown_default=False,
        ),
    ] = field(default_factory=dict)
    strict: Annotated[
        bool,
        data_option("Reject rows with keys that the recipe does not know, or with reasoning that the template drops."),
    ] = False
    pad_multiple: Annotated[int, text_option("Pad stored lengths to multiples of this (a loader can re-pad).")] = 16
    #: None goes by the number of rows, so that small sets have shards for all workers.
    rows_per_shard: Annotated[
        int | None,
        run_option(
            "Source rows per shard.", shown_default="by the number of rows: 256, in sets of less than 16,384 fewer"
        ),
    ] = 256
    keep_columns: Annotated[
        tuple[str, ...],
        data_option(
            "Columns of the source to carry into the index, for `vlmdata select --where \"source.lang == 'de'\"`: "
            "`lang,meta.quality`, with dots for nested ones.",
            metavar="NAME,NAME",
            shown_default=False,
        ),
    ] = ()
    id_column: Annotated[
        str | None,
        data_option(
            "Column that names a row, such as `meta.id`: messages name the row by it, an edited row counts as an edit, "
            "and `vlmdata diff --match id` pairs rows by it.",
            metavar="COLUMN",
            flags=("--id",),
            shown_default="id, uid, uuid, guid, _id or key, if there is one",
        ),
    ] = None
    keep_conversations: Annotated[
        bool,
        data_option(
            "Store each conversation or document with its sample, so that `vlmdata retokenize` needs no source later."
        ),
    ] = False

    def __post_init__(self) -> None:
        FAMILIES.find(self.family)  # refuses an unknown name
        self._take_processor()
        store = self.codec
        libraries_of(store)  # refuses a codec whose package is not installed
        if store.needs_file and self.image.max_source_pixels > MOST_FILE_PIXELS:
            raise ValueError(
                f"max_source_pixels is {self.image.max_source_pixels}; pixels={self.pixels} stores image files, and "
                f"readers decode none of more than {MOST_FILE_PIXELS} pixels"
            )
        videos = self.video_codec
        libraries_of(videos)
        if videos.needs_file:
            raise ValueError(f"video_pixels is {videos.name}, which stores files of images; choose another codec")
        if len(set(self.keep_columns)) < len(self.keep_columns) or not all(self.keep_columns):
            raise ValueError(f"keep_columns is {','.join(self.keep_columns)}; name each column once")
        self._require_variants()
        self._require_overlong()
        for name in ("max_length", "pad_multiple", "rows_per_shard", "variants"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def _take_processor(self) -> None:
        """Takes the tokenizer of the processor, and refuses what the general family does not have."""
        if self.processor is not None and self.tokenizer == EMBEDDED:
            object.__setattr__(self, "tokenizer", self.processor)
        if self.processor is not None and self.tokenizer != self.processor:
            raise ValueError(
                f"processor is {self.processor}, and tokenizer is {self.tokenizer}: the processor has its own, omit it"
            )
        if self.trust_remote_code and self.processor is None:
            raise ValueError("trust_remote_code has no effect without a processor")
        if self.family != PROCESSOR:
            return
        if self.processor is None:
            raise ValueError(f"family is {PROCESSOR}: give the processor, --processor FOLDER")
        for name in (self.pixels, self.video.pixels):
            if name not in (None, RAW, ZSTD):
                raise ValueError(
                    f"pixels is {name}, which stores pictures; with the family {PROCESSOR} shards store the "
                    f"processor's tensors: choose {RAW} or {ZSTD}"
                )
        if self.overlong is Overlong.SHRINK_IMAGES:
            raise ValueError(
                f"overlong is {self.overlong}, and the processor sets the sizes of images: choose another, or set a "
                "smaller size in its preprocessor_config.json"
            )

    def _require_variants(self) -> None:
        kinds, family = self.variant_kinds, self.model_family
        if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= set(VariantKind):
            raise ValueError(f"variant_kinds is {','.join(kinds)}; name some of {', '.join(VariantKind)}, each once")
        if self.variants == 1:
            if set(kinds) != {VariantKind.SCALE, VariantKind.CROP}:
                raise ValueError(f"variant_kinds is {','.join(kinds)}; it has no effect without variants")
            return
        if family.grounding is None or family.most_views > 1:
            raise ValueError(
                f"variants is {self.variants}, and the sizes of images of the family {family.name} are not free: omit "
                "it"
            )
        if self.codec.needs_file and set(kinds) != {VariantKind.SCALE}:
            raise ValueError(
                f"variant_kinds is {','.join(kinds)}, and pixels={self.pixels} stores whole files: name only scale, or "
                "choose other pixels"
            )

    def _require_overlong(self) -> None:
        if self.overlong in SHORTENING and self.train_turns is TrainTurns.EACH:
            raise ValueError(
                f"overlong is {self.overlong}, and train_turns is each: its samples share the images and the earlier "
                "turns of a conversation. Choose other turns, or overlong=reject"
            )
        if self.overlong_min_pixels is None:
            return
        if self.overlong is not Overlong.SHRINK_IMAGES:
            raise ValueError(
                f"overlong_min_pixels is {self.overlong_min_pixels}; it has no effect with overlong={self.overlong}. "
                f"Omit it, or choose overlong={Overlong.SHRINK_IMAGES}"
            )
        least, most = self.image.bounds(self.model_family)
        if not least <= self.overlong_min_pixels <= most:
            raise ValueError(
                f"overlong_min_pixels is {self.overlong_min_pixels}; it must be from min_pixels ({least}) to "
                f"max_pixels ({most})"
            )

    @property
    def model_family(self) -> Family:
        """Family of the samples."""
        if self.family == PROCESSOR:
            return self.learned.family
        return FAMILIES.find(self.family)

    @property
    def learned(self) -> Processor:
        """The processor of the family ``processor``, and what was learned of it.

        Raises:
            SourceError: If it cannot be loaded or learned.
        """
        from vlmdata.preprocess.processor import load_processor  # slow to import: the help of the command needs this

        assert self.processor is not None
        return load_processor(self.processor, self.tokenizer_revision, self.trust_remote_code)

    @property
    def codec(self) -> ItemCodec:
        """Stores the images."""
        return CODECS.find(self.pixels)

    @property
    def video_codec(self) -> ItemCodec:
        """Stores the videos."""
        return self.video.codec(self.codec)

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as nested JSON, with the defaults of the family filled in."""
        least, most = self.image.bounds(self.model_family)
        image = dataclasses.replace(self.image, min_pixels=least, max_pixels=most)
        options = dataclasses.asdict(dataclasses.replace(self, image=image))
        options["video"] = self.video.to_json(self.model_family, self.codec)
        options |= {"family": self.model_family.name, "pixels": self.codec.name}  # they may be given as files
        hosts = options["media"].pop("private_hosts")
        if hosts:  # earlier versions had no such option
            options["media"]["private_hosts"] = list(hosts)
        options["keep_columns"] = list(self.keep_columns)
        options["variant_kinds"] = [kind.value for kind in VariantKind if kind in self.variant_kinds]
        return {name: value for name, value in options.items() if name not in _LATER or value != _LATER[name]}

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> PreprocessConfig:
        """Returns the configuration of a dataset, from the options in its manifest.

        Raises:
            ValueError, TypeError: If an option is unknown or has a wrong value, as those of other versions may.
        """
        if options.get("family") == PROCESSOR:  # a dataset may be a stranger's, and may name code to run
            raise ValueError(
                f"the family {PROCESSOR} has samples of a processor, which no dataset may name to be loaded"
            )
        given, words = dict(options), {"train_turns": TrainTurns, "train_think": TrainThink}
        words |= {"overlong": Overlong, "special_text": SpecialText}
        given |= {name: kind(given[name]) for name, kind in words.items() if name in given}
        image, media, video = (dict(given.pop(name, None) or {}) for name in ("image", "media", "video"))
        kinds = {"damaged": DamagedVideos, "sampler": VideoSampler, "layout": VideoLayout, "positions": VideoPositions}
        video |= {name: kind(video[name]) for name, kind in kinds.items() if name in video}
        given["keep_columns"] = tuple(given.get("keep_columns", ()))
        if "variant_kinds" in given:
            given["variant_kinds"] = tuple(map(VariantKind, given["variant_kinds"]))
        media["private_hosts"] = tuple(media.get("private_hosts", ()))
        named = ((RECIPES, given), (FAMILIES, given), (CODECS, given), (CODECS, video))
        for registry, values in named:  # the dataset names them, not the user
            if (name := values.get(_FIELDS[registry.kind])) is not None:
                registry.named(str(name))
        if video and (rules := FAMILIES.find(given.get("family", DEFAULT_FAMILY)).video) and rules.tokens_per_second:
            video.setdefault("positions", VideoPositions.WHOLE_SECONDS)  # not recorded
        return cls(image=ImageConfig(**image), media=MediaConfig(**media), video=VideoConfig(**video), **given)


#: Options that name extensions, by the kind of these.
_FIELDS = {"recipe": "recipe", "family": "family", "codec": "pixels"}
#: Options that earlier versions did not have, with their defaults, which are not recorded.
_LATER: Mapping[str, Any] = {
    "processor": None,
    "trust_remote_code": False,
    "system_prompt": None,
    "overlong_min_pixels": None,
    "keep_columns": [],
    "chat_template_kwargs": {},
    "id_column": None,
    "keep_conversations": False,
    "variants": 1,
    "variant_kinds": ["scale", "crop"],
}
