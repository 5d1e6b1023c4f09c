"""``manifest.json``: the identity and origin of a dataset, and hashes that prove that it is complete.

The manifest has no time, host, output path or worker count, so equal inputs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from vlmdata.errors import DatasetFormatError
from vlmdata.families import DEFAULT_FAMILY, Family, family
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families.processor import PROCESSOR, ProcessorFamily
from vlmdata.format.earlier import is_earlier, totals_from, totals_to
from vlmdata.format.schema import (
    FORMAT_NAME,
    IMAGE_FILES,
    IMAGE_FILES_NAME,
    INDEX_NAME,
    LEDGER_NAME,
    MANIFEST_NAME,
    PROGRESS_DIR,
    READ_MAJORS,
    SCHEMA_VERSION,
    supported_features,
)
from vlmdata.format.selection import require_forms
from vlmdata.format.stored_names import file_path, sha256_text, shard_path
from vlmdata.format.tokenizer_info import TokenizerInfo, in_present_form, require_items, tokenizer_to_json
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.media.codecs import codec_feature, codecs_of
from vlmdata.media.versions import recorded_pixel_libraries

#: Fingerprints of the codec in a config: versions of its libraries, and the hash of its source code.
CODEC_FINGERPRINTS = frozenset({"codec", "codec_source", "video_codec", "video_codec_source"})
# Names of the counts in ``Manifest.turns``.
#: Assistant turns whose reasoning is in no sample, because the template left it out.
DROPPED_REASONING = "dropped_reasoning"
#: Those of them that are the last turn of their conversation: the template writes no reasoning at all.
LAST_TURNS_WITH_DROPPED_REASONING = "last_turns_with_dropped_reasoning"
#: Rows with turns of dropped reasoning.
ROWS_WITH_DROPPED_REASONING = "rows_with_dropped_reasoning"
#: Rows with a learned turn that follows another text than at inference, where it would be the last turn.
ROWS_UNLIKE_INFERENCE = "rows_unlike_inference"
# Names of what ``--overlong`` took from samples, in ``Manifest.turns``.
#: Turns that ``--overlong drop-turns`` dropped.
DROPPED_TURNS = "dropped_turns"
#: Rows with such turns.
ROWS_WITH_DROPPED_TURNS = "rows_with_dropped_turns"
#: Rows with images that ``--overlong shrink-images`` made smaller.
ROWS_WITH_SHRUNK_IMAGES = "rows_with_shrunk_images"


@dataclass(frozen=True)
class ShardInfo:
    """One shard: rows ``[row_start, row_stop)`` of the source, or of its selected rows (see ``format.selection``)."""

    name: str  # file name
    row_start: int  # first source row
    row_stop: int  # one past the last source row
    #: Accepted candidates. A row is one candidate; a row with a list has one per element, or one if the list is empty.
    samples: int
    rejected: int  # rejected candidates; ``samples + rejected == candidates``
    bytes: int  # file size
    sha256: str  # sha256 of the file
    extra_candidates: int = 0  # candidates beyond one per row; 0 unless rows have lists
    #: What the index adds to the row numbers in the shard's keys and metadata; 0 unless datasets were joined.
    row_offset: int = 0
    #: Samples in the file that the dataset does not have; 0 unless they were selected from another dataset.
    unselected: int = 0

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return self.row_stop - self.row_start + self.extra_candidates


@dataclass(frozen=True)
class Totals:
    """Sums over the dataset. Tokens are true tokens; ``padding`` counts the tokens that ``pad_multiple`` added.

    ``samples + rejected == candidates``; see :class:`ShardInfo`. ``item_bytes`` are the stored bytes of all items,
    shared ones counted once; ``file_bytes`` those of the image files they were made of. Some of 1.1 lack both.
    """

    rows: int
    samples: int
    rejected: int
    tokens: int
    padding: int
    targets: int
    items: int
    patches: int
    bytes: int
    truncated: int
    extra_candidates: int = 0
    item_bytes: int = 0
    file_bytes: int = 0

    @property
    def candidates(self) -> int:
        """Number of candidates: one per row, and the extra ones of rows with lists."""
        return self.rows + self.extra_candidates

    @classmethod
    def summed(cls, parts: Iterable[Totals]) -> Totals:
        """Returns the sums over datasets or shards that share nothing."""
        return cls(**dict.fromkeys(cls.__dataclass_fields__, 0) | summed(vars(part) for part in parts))


@dataclass(frozen=True)
class Manifest:
    """The manifest of a dataset.

    Attributes:
        config: Every resolved option that can change a byte of the output, as nested JSON.
        config_hash: sha256 of the canonical JSON of ``config``.
        source: Identity of the source: kind, spec, split, rows, content hashes.
        tokenizer: Tokenizer data.
        totals: Totals.
        rejects: Rejected candidates by reason.
        shards: All shards in order.
        index_sha256: sha256 of ``index.parquet``.
        ledger_sha256: sha256 of ``rejected.jsonl``.
        features: Features that a reader must support; see :func:`vlmdata.format.schema.supported_features`.
        unused_keys: Number of samples by row key, for keys that the recipe ignores as harmless.
        unknown_keys: Number of samples by row key, for keys that the recipe does not know.
        turns: What the chat template and ``--overlong`` did to turns and images, as counts: see the constants above.
        family: Name of the family of the samples; empty in format 1.0, which had only one.
        schema_version: MAJOR.MINOR of the format.
        created_by: Name and version of the writer.
        tokenizer_files: sha256 of each file in ``tokenizer/``. Empty in manifests of format 1.0.
        version: Of a version after the first: its number, parent, and what differs. Empty in the first.
        processor: What was learned of the model's processor, in the family ``processor``
            (:meth:`vlmdata.families.processor.ProcessorFamily.from_json`). Empty in others.
    """

    config: Mapping[str, Any]
    config_hash: str
    source: Mapping[str, Any]
    tokenizer: TokenizerInfo
    totals: Totals
    rejects: Mapping[str, int]
    shards: tuple[ShardInfo, ...]
    index_sha256: str
    ledger_sha256: str
    features: tuple[str, ...]
    unused_keys: Mapping[str, int] = field(default_factory=dict)
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    turns: Mapping[str, int] = field(default_factory=dict)
    family: str = ""
    schema_version: str = SCHEMA_VERSION
    created_by: str = ""
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)
    version: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """sha256 that identifies the whole content: manifests are equal if and only if the data is."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @cached_property
    def model_family(self) -> Family:
        """Family of the samples."""
        if self.family == PROCESSOR:
            return ProcessorFamily.from_json(self.processor)
        return family(self.family or DEFAULT_FAMILY)

    @property
    def small_files(self) -> dict[str, str]:
        """sha256 of the index, of the ledger, and of the list of image files if there is one, by file name."""
        listed = self.source.get(IMAGE_FILES)
        hashes = {INDEX_NAME: self.index_sha256, LEDGER_NAME: self.ledger_sha256}
        return hashes | ({IMAGE_FILES_NAME: str(listed.get("sha256"))} if isinstance(listed, Mapping) else {})

    @property
    def pixel_libraries(self) -> Mapping[str, str]:
        """Versions of the libraries that decoded and resized the images, by name."""
        return recorded_pixel_libraries(self.config.get("fingerprints"))

    @property
    def video_options(self) -> Mapping[str, Any]:
        """The options of videos; empty in datasets of older versions, and in those without videos or of several."""
        options = self.config.get("options")
        found = options.get("video") if isinstance(options, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def encloses_videos(self) -> bool:
        """Whether vision marks enclose all blocks of a video with times, as in transformers; vLLM drops them."""
        return self.video_options.get("layout") != "vllm"

    @property
    def counts_fractions(self) -> bool:
        """Whether positions of videos that are spaced by time count fractions of a second, not whole seconds alone."""
        return self.video_options.get("positions") == "fractions"

    def to_json(self) -> bytes:
        """Returns canonical JSON text."""
        totals = counts_to_json(self.totals)
        fields = {
            "format": FORMAT_NAME,
            **dataclasses.asdict(self),
            "tokenizer": tokenizer_to_json(self.tokenizer, self.schema_version),
            "totals": totals_to(totals) if is_earlier(self.schema_version) else totals,
            "shards": [counts_to_json(shard) for shard in self.shards],
        }
        # Omits fields that a manifest of format 1.0 lacks, so that reading one does not change its fingerprint.
        for name in ("tokenizer_files", "unused_keys", "unknown_keys", "turns", "family", "version", "processor"):
            if not fields[name]:
                del fields[name]
        return (json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of a dataset directory.

        Raises:
            DatasetFormatError: If there is no manifest, it is damaged, or it needs a newer reader.
        """
        path = directory / MANIFEST_NAME
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise DatasetFormatError(_absent(directory)) from None
        except OSError as error:
            raise DatasetFormatError(f"{path}: not a readable manifest: {error}") from error
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, content: bytes, path: str) -> Manifest:
        """What :meth:`to_json` gave.

        Raises:
            DatasetFormatError: If it is damaged, or needs a newer reader.
        """
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DatasetFormatError(f"{path}: not a readable manifest: {error}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT_NAME:
            raise DatasetFormatError(f'{path}: not a vlmdata manifest ("format" is not "{FORMAT_NAME}")')
        try:
            _check_version(path, fields)
            _check_family(path, fields)
            fields["tokenizer"] = in_present_form(fields["tokenizer"])
            if is_earlier(str(fields["schema_version"])) and isinstance(fields["totals"], Mapping):
                fields["totals"] = totals_from(fields["totals"])
            found = _build(cls, fields)
            require_forms(found.source, "source")
            require_items(found.tokenizer, found.model_family)
            _check_names(path, found)
            return found
        except (AttributeError, KeyError, RecursionError, TypeError) as error:
            raise DatasetFormatError(f"{path}: a field is missing or has the wrong form: {error}") from error


#: Counts that format 1.0 does not have.
_NOT_IN_1_0 = frozenset({"extra_candidates", "item_bytes", "file_bytes", "row_offset", "unselected"})


def counts_to_json(counts: Totals | ShardInfo) -> dict[str, Any]:
    """Returns the JSON form. Includes counts that format 1.0 lacks only if they are not 0.

    Manifests of format 1.0 thus keep their fingerprint.
    """
    fields = dataclasses.asdict(counts)
    return {name: value for name, value in fields.items() if value or name not in _NOT_IN_1_0}


def _absent(directory: Path) -> str:
    if directory.is_file():
        return f"{directory}: it is a file, not the folder of a dataset"
    if not directory.is_dir():
        return f"{directory}: no such directory"
    if (directory / PROGRESS_DIR).is_dir():
        return (
            f"{directory}: preprocessing has not finished. Run the same `vlmdata preprocess` command again, or "
            "`vlmdata finish` if it is made in parts."
        )
    absent = f"{directory}: has no {MANIFEST_NAME}, so it is not a vlmdata dataset"
    inside = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST_NAME}"))
    return f"{absent}. Give one of the datasets in it: {', '.join(inside[:8])}" if inside else absent


def _build[T](kind: type[T], fields: Mapping[str, Any]) -> T:
    """Builds a dataclass from JSON: checks types, converts lists to tuples, ignores fields of later versions."""
    if not isinstance(fields, Mapping):
        raise TypeError(f"{kind.__name__} is {fields!r}, not an object")
    hints = _types_of_fields(kind)  # type: ignore[arg-type]  # mypy knows no hash of type[T]
    # The dataclass uses a default for an absent field, or raises TypeError.
    return kind(
        **{name: _typed(hints[name], fields[name], f"{kind.__name__}.{name}") for name in hints if name in fields}
    )


@cache
def _types_of_fields(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name; evaluating them is most of what reading a manifest takes."""
    return get_type_hints(kind)


def _typed(annotation: Any, value: Any, place: str) -> Any:
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if dataclasses.is_dataclass(kind):
        return _build(annotation, value)
    if kind is tuple and isinstance(value, list):
        return tuple(_typed(args[0], each, place) for each in value)
    if kind is Mapping and isinstance(value, Mapping) and args[1] is not Any:
        return {key: _typed(args[1], each, f"{place}.{key}") for key, each in value.items()}
    # Python takes True for 1, and its numbers have no end.
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or not -1 <= value < 1 << 63)):
        raise TypeError(f"{place} is {value!r}"[:200])
    return value


def _check_names(path: str, manifest: Manifest) -> None:
    """Checks the names and hashes of files, which become paths."""
    for number, shard in enumerate(manifest.shards):
        shard_path(shard.name, f"{path}: shards.{number}.name", of_version=bool(manifest.version))
        sha256_text(shard.sha256, f"{path}: shards.{number}.sha256")
    for name in manifest.tokenizer_files:
        file_path(name, f"{path}: a name in tokenizer_files")


def _check_version(path: str, fields: Mapping[str, Any]) -> None:
    version, features = str(fields.get("schema_version")), fields.get("features", [])
    if version.split(".")[0] not in READ_MAJORS:
        raise DatasetFormatError(
            f"{path}: schema version {version}, but this vlmdata reads {' and '.join(f'{m}.x' for m in READ_MAJORS)}. "
            "Use a matching vlmdata."
        )
    if not isinstance(features, list):
        raise TypeError(f"features is {features!r}, not a list")
    known = supported_features()
    codecs = {codec_feature(name): name for name in codecs_of(map(str, features))}
    unknown = [
        feature
        for feature in map(str, features)
        if feature not in known and not (feature in codecs and CODECS.knows(codecs[feature]))
    ]
    if unknown:
        own = "".join(f"{CODECS.missing(codecs[feature])} " for feature in unknown if feature in codecs)
        raise DatasetFormatError(
            f"{path}: needs features this vlmdata lacks: {', '.join(unknown)}. {own}{_remedy(fields)}"
        )


def _check_family(path: str, fields: Mapping[str, Any]) -> None:
    found = fields.get("family") or DEFAULT_FAMILY
    if not FAMILIES.knows(str(found)):
        raise DatasetFormatError(
            f"{path}: the dataset is for the model family {found!r}; this vlmdata supports "
            f"{', '.join(FAMILIES.names())}. {FAMILIES.missing(str(found))} {_remedy(fields)}"
        )


def _remedy(fields: Mapping[str, Any]) -> str:
    return f"Read it with the version that made it, {fields.get('created_by') or 'unknown'}, or a later one."


def recounted(
    shards: Iterable[ShardInfo], rows: Sequence[int], samples: Sequence[int], rejected: Sequence[int]
) -> tuple[ShardInfo, ...]:
    """Returns shards of which a dataset has a part, with its numbers of rows, samples and rejections of each."""
    counted, start = list[ShardInfo](), 0
    for shard, has_rows, has_samples, has_rejected in zip(shards, rows, samples, rejected, strict=True):
        counted.append(
            dataclasses.replace(
                shard,
                row_start=start,
                row_stop=start + has_rows,
                samples=has_samples,
                rejected=has_rejected,
                extra_candidates=has_samples + has_rejected - has_rows,
                unselected=shard.samples + shard.unselected - has_samples,
            )
        )
        start += has_rows
    return tuple(counted)


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums counts, sorted by name."""
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def canonical_hash(value: Any) -> str:
    """Returns the sha256 of the canonical JSON (sorted keys, no spaces) of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Lists the differences of two JSON values, one line each: ``a.b: 1 there, 2 now``."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else str(key)
            lines += differences(old.get(key), new.get(key), inner)
        return lines
    # A tuple equals the corresponding list in JSON.
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return []
    return [f"{path}: {json.dumps(old)} there, {json.dumps(new)} now"]


def item_sizes(totals: Totals, pixels: str) -> str:
    """What an item takes, and that against its file: ``zstd: 357 KB each, 1.22 times the 293 KB of its file``.

    Returns:
        The text; empty if there are no items, or the manifest does not have their sizes.
    """
    if not totals.items or not totals.item_bytes:
        return ""
    each = f"{pixels}: {_size(totals.item_bytes / totals.items)} each"
    if not totals.file_bytes:
        return each
    times = totals.item_bytes / totals.file_bytes
    return f"{each}, {times:.2f} times the {_size(totals.file_bytes / totals.items)} of its file"


def _size(number: float) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 999_500 else f"{number / 1e3:,.0f} KB" if number >= 1e3 else "<1 KB"
