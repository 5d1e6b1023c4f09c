"""``manifest.json``: the identity and origin of a dataset, and hashes that prove that it is complete.

The manifest has no time, host, output path or worker count, so equal inputs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from vlmdata.errors import DatasetFormatError
from vlmdata.families import DEFAULT_FAMILY, REGISTRY, Family, family
from vlmdata.format.schema import FORMAT_NAME, MANIFEST_NAME, PROGRESS_DIR, SCHEMA_VERSION, supported_features
from vlmdata.media.codecs import codec_feature
from vlmdata.media.versions import recorded_pixel_libraries

#: Fingerprints of the codec in a config: versions of its libraries, and the hash of its source code.
CODEC_FINGERPRINTS = frozenset({"codec", "codec_source"})


@dataclass(frozen=True)
class TokenizerInfo:
    r"""Tokenizer data that reading and auditing need, without loading the tokenizer.

    Attributes:
        name: Name or path from which it was loaded.
        fingerprint: sha256 of its vocabulary, merges, added tokens and pipeline.
        chat_template: sha256 of the chat template.
        vocab_size: Number of ids, added tokens included.
        pad: Padding id.
        im_start: Id of ``<|im_start|>``.
        im_end: Id of ``<|im_end|>``.
        vision_start: Id of ``<|vision_start|>``.
        vision_end: Id of ``<|vision_end|>``.
        image: Id of ``<|image_pad|>``.
        video: Id of ``<|video_pad|>``.
        assistant_header: Ids of ``assistant\n``, which follow ``<|im_start|>`` in an assistant turn.
        special_tokens: Named special tokens (``pad_token``, ``eos_token`` …), which chat templates may write. Empty in
            manifests of format 1.0.
        end_of_text: Id of the token that ends documents. -1 in manifests of format 1.0.
    """

    name: str
    fingerprint: str
    chat_template: str
    vocab_size: int
    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image: int
    video: int
    assistant_header: tuple[int, ...]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    end_of_text: int = -1


@dataclass(frozen=True)
class ShardInfo:
    """One shard: rows ``[row_start, row_stop)`` of the source, or of its selected rows (see ``format.selection``).

    Attributes:
        name: File name.
        row_start: First source row.
        row_stop: One past the last source row.
        samples: Accepted candidates. A row is one candidate; a row with a list has one per element,
            or one if the list is empty.
        rejected: Rejected candidates; ``samples + rejected == candidates``.
        bytes: File size.
        sha256: sha256 of the file.
        extra_candidates: Candidates beyond one per row; 0 unless rows have lists.
        row_offset: What the index adds to the row numbers in the shard's keys and metadata; 0 unless datasets were
            joined.
    """

    name: str
    row_start: int
    row_stop: int
    samples: int
    rejected: int
    bytes: int
    sha256: str
    extra_candidates: int = 0
    row_offset: int = 0

    @property
    def candidates(self) -> int:
        """Number of candidates."""
        return self.row_stop - self.row_start + self.extra_candidates


@dataclass(frozen=True)
class Totals:
    """Sums over the dataset. Tokens are true tokens; ``padding`` counts the tokens that ``pad_multiple`` added.

    ``samples + rejected == candidates``; see :class:`ShardInfo`. ``image_bytes`` are the stored bytes of all images,
    shared ones counted once; ``file_bytes`` those of the image files they were made of. Earlier manifests lack both.
    """

    rows: int
    samples: int
    rejected: int
    tokens: int
    padding: int
    targets: int
    images: int
    patches: int
    bytes: int
    truncated: int
    extra_candidates: int = 0
    image_bytes: int = 0
    file_bytes: int = 0

    @property
    def candidates(self) -> int:
        """Number of candidates: one per row, and the extra ones of rows with lists."""
        return self.rows + self.extra_candidates


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
        turns: What the chat template did to assistant turns, as counts: see :mod:`vlmdata.format.turns`.
        family: Name of the family of the samples; empty in format 1.0, which had only one.
        schema_version: MAJOR.MINOR of the format.
        created_by: Name and version of the writer.
        tokenizer_files: sha256 of each file in ``tokenizer/``. Empty in manifests of format 1.0.
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

    @property
    def fingerprint(self) -> str:
        """sha256 that identifies the whole content: manifests are equal if and only if the data is."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def model_family(self) -> Family:
        """Family of the samples."""
        return family(self.family or DEFAULT_FAMILY)

    @property
    def pixel_libraries(self) -> Mapping[str, str]:
        """Versions of the libraries that decoded and resized the images, by name."""
        return recorded_pixel_libraries(self.config.get("fingerprints"))

    def to_json(self) -> bytes:
        """Returns canonical JSON text."""
        fields = {
            "format": FORMAT_NAME,
            **dataclasses.asdict(self),
            "totals": counts_to_json(self.totals),
            "shards": [counts_to_json(shard) for shard in self.shards],
        }
        # Omits fields that a manifest of format 1.0 lacks, so that reading one does not change its fingerprint.
        optional = [(fields, name) for name in ("tokenizer_files", "unused_keys", "unknown_keys", "turns", "family")]
        for owner, name in (*optional, (fields["tokenizer"], "special_tokens")):
            if not owner[name]:
                del owner[name]
        if fields["tokenizer"]["end_of_text"] < 0:
            del fields["tokenizer"]["end_of_text"]
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

        Args:
            content: The text.
            path: Where it stands, for messages.

        Raises:
            DatasetFormatError: If it is damaged, or needs a newer reader.
        """
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise DatasetFormatError(f"{path}: not a readable manifest: {error}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT_NAME:
            raise DatasetFormatError(f'{path}: not a vlmdata manifest ("format" is not "{FORMAT_NAME}")')
        try:
            _check_version(path, fields)
            _check_family(path, fields)
            fields["tokenizer"] = _build(TokenizerInfo, fields["tokenizer"])
            fields["totals"] = _build(Totals, fields["totals"])
            if not isinstance(fields["shards"], list):
                raise TypeError(f"shards is {fields['shards']!r}, not a list")
            fields["shards"] = [_build(ShardInfo, shard) for shard in fields["shards"]]
            return _build(cls, fields)
        except (KeyError, TypeError) as error:
            raise DatasetFormatError(f"{path}: a field is missing or has the wrong form: {error}") from error


#: Counts that format 1.0 does not have.
_NOT_IN_1_0 = frozenset({"extra_candidates", "image_bytes", "file_bytes", "row_offset"})


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
    values: dict[str, Any] = {}
    for name, annotation in get_type_hints(kind).items():
        if name not in fields:
            continue  # the dataclass uses a default or raises TypeError
        value, expected = fields[name], get_origin(annotation) or annotation
        value = tuple(value) if isinstance(value, list) else value
        right = isinstance(value, expected)
        if right and expected is tuple:
            right = all(isinstance(each, get_args(annotation)[0]) for each in value)
        if not right:
            raise TypeError(f"{kind.__name__}.{name} is {value!r}")
        values[name] = value
    return kind(**values)


def _check_version(path: str, fields: Mapping[str, Any]) -> None:
    version, features = str(fields.get("schema_version")), fields.get("features", [])
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise DatasetFormatError(
            f"{path}: schema version {version}, but this vlmdata reads {SCHEMA_VERSION}. Use a matching vlmdata."
        )
    if not isinstance(features, list):
        raise TypeError(f"features is {features!r}, not a list")
    known = supported_features()
    unknown = [str(feature) for feature in features if feature not in known]
    codecs = [feature.removeprefix(codec_feature("")) for feature in unknown if feature.startswith(codec_feature(""))]
    if unknown:
        own = f"If codec {codecs[0]} is your own, register it here (docs/extend/codec.md). " if codecs else ""
        raise DatasetFormatError(
            f"{path}: needs features this vlmdata lacks: {', '.join(unknown)}. {own}{_remedy(fields)}"
        )


def _check_family(path: str, fields: Mapping[str, Any]) -> None:
    found = fields.get("family") or DEFAULT_FAMILY
    if found not in REGISTRY:
        raise DatasetFormatError(
            f"{path}: the dataset is for the model family {found!r}; this vlmdata supports {', '.join(REGISTRY)}. If "
            f"it is your own, register it here (docs/extend/family.md). {_remedy(fields)}"
        )


def _remedy(fields: Mapping[str, Any]) -> str:
    return f"Read it with the version that made it, {fields.get('created_by') or 'unknown'}, or a later one."


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
